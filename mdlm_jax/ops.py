"""Array operations that several files share: exact means, token log-probs, places in a row."""

import jax
import jax.numpy as jnp

from mdlm_jax.structs import Mean


def masked_mean(values: jax.Array, mask: jax.Array) -> Mean:
    """Mean of `values` where `mask` holds, kept as its parts.

    Args:
        values: f[...]; what lies under a false mask is never read, NaN included.
        mask: bool[...] or 0/1, same shape.
    """
    mask = mask.astype(bool)
    total = jnp.sum(jnp.where(mask, values.astype(jnp.float32), 0.0))  # f32[]
    return Mean(total, jnp.sum(mask, dtype=jnp.float32))


def pairwise_sum(x: jax.Array, *, axis: int) -> jax.Array:
    """Sum over one axis, halves added to halves.

    A float32 error grows with log n instead of n, and the order, so the result, is the same on
    every machine: what cancels (advantages of a group) cancels to the last digits.
    """
    x = jnp.moveaxis(x, axis, -1)
    size = 1 << (x.shape[-1] - 1).bit_length()
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])
    while size > 1:
        size //= 2
        x = x[..., :size] + x[..., size:]
    return x[..., 0]


def mean_value(mean: Mean) -> jax.Array:
    """The mean itself, or the sum of several, f32[]; one is 0 when nothing was counted."""
    return jnp.sum(mean.total / jnp.maximum(mean.count, jnp.finfo(jnp.float32).tiny))


def token_logprobs(logits_BLV: jax.Array, ids_BL: jax.Array) -> jax.Array:
    """Log-probability of each given token under the logits at its own place, f32[B, L].

    Logits are raised to float32 first: in bfloat16 the policy's ratio to itself would not be 1.
    """
    logits_BLV = logits_BLV.astype(jnp.float32)
    chosen_BL1 = jnp.take_along_axis(logits_BLV, ids_BL[..., None], axis=-1)
    return chosen_BL1[..., 0] - jax.nn.logsumexp(logits_BLV, axis=-1)


def entropy(logits: jax.Array) -> jax.Array:
    """Entropy in nats of softmax(logits) over the last axis: f[..., V] -> f32[...]."""
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    # A forbidden token has -inf here and would give 0 * -inf.
    logprobs = jnp.maximum(logprobs, jnp.finfo(jnp.float32).min)
    return -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)


def length_mask(length_B: jax.Array, width: int) -> jax.Array:
    """True on the first `length` places of each row: i32[B] -> bool[B, W]."""
    return jnp.arange(width) < length_B[:, None]


def one_of(tokens_BW: jax.Array, ids: tuple[int | jax.Array, ...]) -> jax.Array:
    """Whether each token is one of the ids, bool[B, W]. An id is a number, or i32[B]: its row's."""
    found_BW = jnp.zeros(tokens_BW.shape, bool)
    for id_ in ids:
        found_BW |= tokens_BW == jnp.reshape(id_, (-1, 1))
    return found_BW


def behind_first(found_BW: jax.Array) -> jax.Array:
    """Places behind the first true one of each row, bool[B, W]."""
    return jnp.cumsum(found_BW, axis=1) - found_BW > 0
