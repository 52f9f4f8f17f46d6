"""GGUF files, llama.cpp's format, as Hugging Face tensors."""

import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def open_file(path: pathlib.Path) -> Any:
    """A reader of the file. Raises ValueError where the file or the gguf package is missing."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ValueError('GGUF files need one more package: pip install "mdlm_jax[gguf]"') from None
    if not pathlib.Path(path).is_file():
        raise ValueError(f"{path}: no such file")
    try:
        return GGUFReader(path)
    except (ValueError, IndexError) as error:
        raise ValueError(f"{path}: torn or not GGUF ({error})") from error


def fields(reader: Any) -> dict[str, Any]:
    """Everything the file says about itself, lists included."""
    return {name: field.contents() for name, field in reader.fields.items()}


def raw_config(reader: Any, said: dict[str, Any]) -> dict:
    """The `config.json` of a Llama-like model. Raises ValueError for other architectures.

    `said` holds the reader's `fields`, which take a second to unpack.
    """
    kind = said["general.architecture"]
    if kind != "llama":
        raise ValueError(f"general.architecture is {kind!r}; of GGUF files only llama is known")
    heads = said["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": len(said["tokenizer.ggml.tokens"]),
        "hidden_size": said["llama.embedding_length"],
        "intermediate_size": said["llama.feed_forward_length"],
        "num_hidden_layers": said["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": said.get("llama.attention.head_count_kv", heads),
        "max_position_embeddings": said["llama.context_length"],
        "rope_theta": float(said["llama.rope.freq_base"]),
        "rms_norm_eps": float(said["llama.attention.layer_norm_rms_epsilon"]),
        "bos_token_id": said.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": said.get("tokenizer.ggml.eos_token_id"),
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "torch_dtype": "float32",
    }


def hub_tensors(reader: Any, raw: dict) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor under its hub name, dequantised to f32, one at a time."""
    from gguf.quants import dequantize

    heads = {"attn_q": raw["num_attention_heads"], "attn_k": raw["num_key_value_heads"]}
    for tensor in reader.tensors:
        *layer, name, leaf = tensor.name.split(".")
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if name in heads:
            values = unpermute(values, heads=heads[name])
        prefix = f"model.layers.{layer[1]}." if layer else ""
        yield f"{prefix}{NAMES[name]}.{leaf}", values


def unpermute(kernel: np.ndarray, *, heads: int) -> np.ndarray:
    """Undoes llama.cpp's order of a llama's query and key rows, f32[out, in].

    There the two halves of a head are interleaved, as its rotation wants them.
    """
    rows, width = kernel.shape
    halves = kernel.reshape(heads, rows // heads // 2, 2, width)
    return halves.swapaxes(1, 2).reshape(kernel.shape)
