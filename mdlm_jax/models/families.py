"""The families of the hub: their config files in our words, and their tensors under our names."""

from collections.abc import Callable

import numpy as np

from mdlm_jax.models.config import ModelConfig
from mdlm_jax.models.rope import VARIANTS, Scaling

WEDLM_MASK_ID = 151665  # the published configs have null and mean this one


# ---- config.json -> ModelConfig ----------------------------------------------------------------


def model_config(raw: dict) -> ModelConfig:
    """The shape that a `config.json` describes, in old or new field names.

    Raises ValueError that names the field and what is known.
    """
    kind = raw.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(f"unknown model_type {kind!r}; known: {', '.join(sorted(FAMILIES))}")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {raw['hidden_act']!r}: only silu is known")
    try:
        return ModelConfig(**{**_common(raw), **FAMILIES[kind](raw)})
    except KeyError as error:
        raise ValueError(f"{error.args[0]} is missing") from None


def _common(raw: dict) -> dict:
    heads = raw["num_attention_heads"]
    theta, scaling = rope_parameters(raw)
    return {
        "vocab_size": raw["vocab_size"],
        "hidden_size": raw["hidden_size"],
        "num_hidden_layers": raw["num_hidden_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": raw.get("head_dim") or raw["hidden_size"] // heads,
        "intermediate_size": raw.get("intermediate_size", 0),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-6),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "qk_norm": False,
    }


def rope_parameters(raw: dict) -> tuple[float, Scaling | None]:
    """The base and the scaling, from `rope_parameters` or `rope_theta` and `rope_scaling`."""
    given = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    theta = float(given.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    kind = given.get("rope_type") or given.get("type") or "default"
    if float(given.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))) != 1.0:
        raise ValueError("partial_rotary_factor: only 1 is known")
    if kind == "default":
        return theta, None
    if kind not in VARIANTS:
        raise ValueError(f"rope_type {kind!r} is unknown; known: default, {', '.join(VARIANTS)}")
    fields = Scaling.__dataclass_fields__
    known = {name: value for name, value in given.items() if name in fields and value is not None}
    # Some files keep the first length beside the scaling, not in it.
    first = raw.get("original_max_position_embeddings")
    known = {
        "max_position_embeddings": raw.get("max_position_embeddings", 0),
        **({"original_max_position_embeddings": first} if first else {}),
        **known,
        "rope_type": kind,
    }
    hashable = {n: tuple(v) if isinstance(v, list) else v for n, v in known.items()}
    return theta, Scaling(**hashable)


def _llama(raw: dict) -> dict:
    bias = bool(raw.get("attention_bias", False))
    return {
        "attention_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": bool(raw.get("mlp_bias", False)),
    }


def _mistral(raw: dict) -> dict:
    window = raw.get("sliding_window")
    kinds = ("sliding_attention",) * raw["num_hidden_layers"] if window else ()
    return {"sliding_window": window, "layer_types": kinds}


def _qwen_window(raw: dict) -> dict:
    """Qwen's window: on the layers that `layer_types` names, or on those past max_window_layers."""
    layers, window = raw["num_hidden_layers"], raw.get("sliding_window")
    if not window or not raw.get("use_sliding_window", False):
        return {}
    first = raw.get("max_window_layers", layers)
    kinds = raw.get("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(layers)
    ]
    return {"sliding_window": window, "layer_types": tuple(kinds)}


def _qwen2(raw: dict) -> dict:
    return {"attention_bias": True, **_qwen_window(raw)}


def _qwen3(raw: dict) -> dict:
    bias = bool(raw.get("attention_bias", False))
    return {
        "qk_norm": True,
        "attention_bias": bias,
        "attention_out_bias": bias,
        **_qwen_window(raw),
    }


def _wedlm(raw: dict) -> dict:
    return {
        "qk_norm": bool(raw.get("qk_norm", False)),
        "attention_bias": bool(raw.get("attention_bias", True)),
        **_qwen_window(raw),
    }


def _experts(raw: dict) -> dict:
    layers = raw["num_hidden_layers"]
    step, dense = raw.get("decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    kinds = [
        "experts" if layer not in dense and (layer + 1) % step == 0 else "dense"
        for layer in range(layers)
    ]
    return {
        **_qwen3(raw),
        "feed_forwards": tuple(kinds),
        "num_experts": raw["num_experts"],
        "num_experts_per_tok": raw["num_experts_per_tok"],
        "moe_intermediate_size": raw["moe_intermediate_size"],
        "norm_topk_prob": bool(raw.get("norm_topk_prob", True)),
    }


def _lfm2(raw: dict) -> dict:
    layers = raw["num_hidden_layers"]
    attention = raw.get("full_attn_idxs")
    attention = range(layers) if attention is None else attention
    kinds = raw.get("layer_types") or [
        "full_attention" if layer in attention else "conv" for layer in range(layers)
    ]
    return {
        "qk_norm": True,
        "layer_types": tuple(kinds),
        "intermediate_size": _lfm2_width(raw),
        "rms_norm_eps": raw.get("norm_eps", 1e-5),
        "tie_word_embeddings": bool(raw.get("tie_embedding", raw.get("tie_word_embeddings", True))),
        "conv_L_cache": raw.get("conv_L_cache", 3),
        "conv_bias": bool(raw.get("conv_bias", False)),
    }


def _lfm2_width(raw: dict) -> int:
    """Width of LFM2's feed-forward part: two thirds of the stated one, scaled, rounded up."""
    width = raw.get("block_ff_dim") or raw["intermediate_size"]
    if not raw.get("block_auto_adjust_ff_dim", True):
        return width
    width, scale = int(2 * width / 3), raw.get("block_ffn_dim_multiplier", 1.0)
    if scale is None:
        return width
    multiple = raw.get("block_multiple_of", 256)
    return -(-int(scale * width) // multiple) * multiple


FAMILIES: dict[str, Callable[[dict], dict]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _experts,
    "lfm2": _lfm2,
    "sdar": _qwen3,
    "sdar_moe": _experts,
    "wedlm": _wedlm,
}


# ---- ModelConfig -> config.json ----------------------------------------------------------------


def raw_config(config: ModelConfig) -> dict:
    """A `config.json` for a model that was made here: Qwen3's form, or Llama's without qk-norm.

    Raises ValueError for forms that only released checkpoints have; those keep their own file.
    """
    made_here = ModelConfig(
        **{name: getattr(config, name) for name in _SIZES},
        qk_norm=config.qk_norm,
        attention_bias=config.attention_bias,
        attention_out_bias=config.attention_bias,
    )
    if made_here != config:
        raise ValueError("this form has no config.json of its own; keep the checkpoint's")
    kind, name = ("qwen3", "Qwen3") if config.qk_norm else ("llama", "Llama")
    raw = {"architectures": [f"{name}ForCausalLM"], "model_type": kind, "hidden_act": "silu"}
    return raw | {n: getattr(config, n) for n in _SIZES} | {"attention_bias": config.attention_bias}


_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "rope_theta",
    "rms_norm_eps",
    "tie_word_embeddings",
)


# ---- our parameters <-> the hub's tensors ------------------------------------------------------

_LFM2_NAMES = {
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "self_attn.o_proj": "self_attn.out_proj",
    "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm",
    "norm": "embedding_norm",
}
_RENAMED = {"lfm2": _LFM2_NAMES}


def tensor_names(path: tuple[str, ...], config: ModelConfig, model_type: str) -> np.ndarray:
    """The hub's tensors that one of our parameters is made of, by the places of its stack.

    `path` holds the parameter's keys. The array of str has no axis for a parameter of its own, one
    axis (layers) for a stack, two (layers, experts) for a stack of experts.
    """
    if path[0] != "layers":
        name = _hub_name(path, "" if path[0] == "lm_head" else "model.", model_type)
        return np.array(name, dtype=object)
    run = config.runs[int(path[1])]
    layers = [f"model.layers.{layer}." for layer in run.layers]
    if run.feed_forward == "experts" and path[2] == "mlp" and path[3] != "gate":
        experts = [f"mlp.experts.{e}.{path[3]}.weight" for e in range(config.num_experts)]
        return np.array([[layer + expert for expert in experts] for layer in layers], dtype=object)
    return np.array([_hub_name(path[2:], layer, model_type) for layer in layers], dtype=object)


def _hub_name(path: tuple[str, ...], prefix: str, model_type: str) -> str:
    *module, leaf = path
    if module == ["conv"]:
        module = ["conv", "conv"]
    elif leaf == "gate":
        module, leaf = [*module, "gate"], "kernel"
    dotted = ".".join(module)
    dotted = _RENAMED.get(model_type, {}).get(dotted, dotted)
    return f"{prefix}{dotted}.{'bias' if leaf == 'bias' else 'weight'}"


def layout(path: tuple[str, ...]) -> str:
    """How a tensor lies in our parameter: "same", "transposed", or as a convolution's "taps"."""
    if path[-1] == "kernel" and path[-2] == "conv":
        return "taps"
    turned = path[-1] in ("kernel", "gate", "gate_proj", "up_proj", "down_proj")
    return "transposed" if turned else "same"
