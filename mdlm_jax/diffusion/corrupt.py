"""The forward process: which tokens of the noisy copy are masked, and at which rate."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from mdlm_jax.structs import TokenBatch

REDRAWS = 10  # SDAR redraws a row without a single mask this often, then forces one


@struct.dataclass
class Noisy:
    """The corrupted copy of the blocks that hold trained tokens. All [B, M]."""

    tokens: jax.Array  # i32   mask id where masked
    target: jax.Array  # i32   the clean tokens
    segment: jax.Array  # i32  0 = padding
    position: jax.Array  # i32
    masked: jax.Array  # bool
    rate: jax.Array  # f32     the masking rate p of the token's segment
    eligible: jax.Array  # f32 1 where a token is trained (masked or not)


def rates(key: jax.Array, shape: tuple[int, int], *, eps: float) -> jax.Array:
    """One masking rate per (row, segment): p = (1 - eps) t + eps, t ~ U(0, 1) (SDAR's SFT).

    The t are spread evenly with one common random offset: each is uniform, their mean varies less.
    """
    count = shape[0] * shape[1]
    offset_key, order_key = jax.random.split(key)
    even = (jax.random.uniform(offset_key) + jnp.arange(count) / count) % 1.0
    t = jax.random.permutation(order_key, even).reshape(shape)
    return (1.0 - eps) * t + eps


def draw_mask(key: jax.Array, eligible_BM: jax.Array, rate_BM: jax.Array) -> jax.Array:
    """Masks each eligible token with its rate, and at least one in a row that has any."""

    def lottery(attempt):
        return jax.random.uniform(jax.random.fold_in(key, attempt), rate_BM.shape)

    def draw(attempt):
        return eligible_BM & (lottery(attempt) < rate_BM)

    def lacking(masked_BM):
        return ~masked_BM.any(1) & eligible_BM.any(1)

    def redraw(state):
        attempt, masked_BM = state
        return attempt + 1, jnp.where(lacking(masked_BM)[:, None], draw(attempt), masked_BM)

    def unfinished(state):
        return (state[0] <= REDRAWS) & lacking(state[1]).any()

    _, masked_BM = jax.lax.while_loop(unfinished, redraw, (jnp.int32(1), draw(0)))
    winner_B = jnp.argmax(lottery(REDRAWS + 1) * eligible_BM, axis=1)
    one_BM = jax.nn.one_hot(winner_B, rate_BM.shape[1], dtype=bool)
    return jnp.where(lacking(masked_BM)[:, None], one_BM & eligible_BM, masked_BM)


def corrupt(key: jax.Array, batch: TokenBatch, *, mask_id: int, eps: float, segments: int) -> Noisy:
    """Masks a random part of the trained tokens; `segments` bounds the segments of a row."""
    rate_key, mask_key = jax.random.split(key)
    real_BM = batch.answer_index >= 0
    index_BM = jnp.maximum(batch.answer_index, 0)
    gather = partial(jnp.take_along_axis, indices=index_BM, axis=1)
    segment_BM = jnp.where(real_BM, gather(batch.segment), 0)
    rate_BS = rates(rate_key, (segment_BM.shape[0], segments), eps=eps)
    rate_BM = jnp.take_along_axis(rate_BS, jnp.maximum(segment_BM - 1, 0), axis=1)
    eligible_BM = real_BM & gather(batch.loss_mask)
    masked_BM = draw_mask(mask_key, eligible_BM, rate_BM)
    target_BM = gather(batch.tokens)
    return Noisy(
        tokens=jnp.where(masked_BM, mask_id, target_BM),
        target=target_BM,
        segment=segment_BM,
        position=gather(batch.position),
        masked=masked_BM,
        rate=rate_BM,
        eligible=eligible_BM.astype(jnp.float32),
    )
