"""Making room in a vocabulary: how a causal checkpoint becomes a masked diffusion model.

SDAR and WeDLM were made from Qwen this way: a mask row, everything else kept.
"""

import dataclasses

import jax
import jax.numpy as jnp

from mdlm_jax.models.config import ModelConfig


def add_rows(params: dict, config: ModelConfig, count: int) -> tuple[dict, ModelConfig]:
    """`count` more tokens, each embedded (and scored) as the mean of those that were there.

    The mean is an ordinary point among the others, so training starts from nothing unusual.
    """
    params = dict(params)
    table_VD = params["embed_tokens"]["embedding"]
    params["embed_tokens"] = {"embedding": _extend(table_VD, count, axis=0)}
    if "lm_head" in params:
        params["lm_head"] = {"kernel": _extend(params["lm_head"]["kernel"], count, axis=1)}
    return params, dataclasses.replace(config, vocab_size=config.vocab_size + count)


def _extend(table: jax.Array, count: int, *, axis: int) -> jax.Array:
    mean = table.astype(jnp.float32).mean(axis, keepdims=True).astype(table.dtype)
    return jnp.concatenate([table, jnp.repeat(mean, count, axis)], axis)


def with_mask(
    params: dict, config: ModelConfig, *, words: int, multiple: int = 1
) -> tuple[dict, ModelConfig, int]:
    """The model with a mask token, and its id: the first row that no word of the tokenizer has.

    Released vocabularies are padded, so most have such a row already and nothing changes. Otherwise
    rows are added up to a `multiple` of the vocabulary's size.
    """
    if words < config.vocab_size:
        return params, config, words
    size = -(-(words + 1) // multiple) * multiple
    params, config = add_rows(params, config, size - config.vocab_size)
    return params, config, words
