"""Loads golden checkpoints in Qwen3's form, until models/hub.py loads every family."""

import json
import struct
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from mdlm_jax.models.transformer import ModelConfig

STACKED = {
    "input_layernorm": "weight",
    "post_attention_layernorm": "weight",
    "q_norm": "weight",
    "k_norm": "weight",
    "q_proj": "kernel",
    "k_proj": "kernel",
    "v_proj": "kernel",
    "o_proj": "kernel",
    "gate_proj": "kernel",
    "up_proj": "kernel",
    "down_proj": "kernel",
}
HUB = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"), "self_attn."),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp."),
}


def load(folder: Path) -> tuple[ModelConfig, dict]:
    """A checkpoint's shape and its parameters in float32."""
    raw = json.loads((folder / "config.json").read_text())
    if raw.get("attention_bias") or raw.get("qk_norm") is False:
        raise NotImplementedError(f"{folder}: biases and no qk-norm come with models/hub.py")
    names = (field for field in ModelConfig.__dataclass_fields__ if field in raw)
    config = ModelConfig(**{name: raw[name] for name in names})
    found = tensors(folder / "model.safetensors")

    def stack(name: str, kind: str) -> jnp.ndarray:
        path = f"model.layers.{{}}.{HUB.get(name, '')}{name}.weight"
        layers = [found[path.format(i)] for i in range(config.num_hidden_layers)]
        return jnp.stack([x.T if kind == "kernel" else x for x in layers])

    layers = {name: {kind: stack(name, kind)} for name, kind in STACKED.items()}
    attention = {name: layers.pop(name) for name, part in HUB.items() if part == "self_attn."}
    params = {
        "embed_tokens": {"embedding": jnp.asarray(found["model.embed_tokens.weight"])},
        "layers": layers | {"self_attn": attention},
        "norm": {"weight": jnp.asarray(found["model.norm.weight"])},
    }
    if not config.tie_word_embeddings:
        params["lm_head"] = {"kernel": jnp.asarray(found["lm_head.weight"].T)}
    return config, params


def tensors(file: Path) -> dict[str, np.ndarray]:
    """All tensors of a safetensors file in float32."""
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(body[slice(*about["data_offsets"])], "<f4").reshape(about["shape"])
        for name, about in header.items()
    }
