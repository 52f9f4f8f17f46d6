"""The forward process: which tokens of the noisy copy are masked, and at which rate."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from mdlm_jax.structs import TokenBatch

REDRAWS = 10  # SDAR redraws a row without a single mask this often, then forces one
SMALLEST_RATE = 1e-8  # WeDLM's lowest


@struct.dataclass
class Noisy:
    """The corrupted copy of the blocks that hold trained tokens. All [B, M]."""

    tokens: jax.Array  # i32   mask id where masked
    target: jax.Array  # i32   the clean tokens
    segment: jax.Array  # i32  0 = padding
    position: jax.Array  # i32
    masked: jax.Array  # bool
    rate: jax.Array  # f32     the masking rate p that the token was drawn with
    eligible: jax.Array  # f32 1 where a token is trained (masked or not)


def answers(batch: TokenBatch) -> Noisy:
    """The copy before anything is masked; its rates are 1."""
    real_BM = batch.answer_index >= 0
    index_BM = jnp.maximum(batch.answer_index, 0)
    gather = partial(jnp.take_along_axis, indices=index_BM, axis=1)
    target_BM = gather(batch.tokens)
    return Noisy(
        tokens=target_BM,
        target=target_BM,
        segment=jnp.where(real_BM, gather(batch.segment), 0),
        position=gather(batch.position),
        masked=jnp.zeros(real_BM.shape, bool),
        rate=jnp.ones(real_BM.shape, jnp.float32),
        eligible=(real_BM & gather(batch.loss_mask)).astype(jnp.float32),
    )


def hide(copy: Noisy, masked_BM: jax.Array, rate_BM: jax.Array, *, mask_id: int) -> Noisy:
    """The copy with these tokens masked."""
    tokens_BM = jnp.where(masked_BM, mask_id, copy.target)
    return copy.replace(tokens=tokens_BM, masked=masked_BM, rate=rate_BM)


# ---- SDAR: a rate for each segment (specs/sdar.md 4a) ----------------------------------------


def rates(key: jax.Array, shape: tuple[int, int], *, eps: float) -> jax.Array:
    """Masking rates p = (1 - eps) t + eps, t ~ U(0, 1): SDAR's SFT has one per (row, segment).

    The t are spread evenly with one common random offset: each is uniform, their mean varies less.
    """
    count = shape[0] * shape[1]
    offset_key, order_key = jax.random.split(key)
    even = (jax.random.uniform(offset_key) + jnp.arange(count) / count) % 1.0
    t = jax.random.permutation(order_key, even).reshape(shape)
    return (1.0 - eps) * t + eps


def segment_rates(key: jax.Array, copy: Noisy, *, eps: float, segments: int) -> jax.Array:
    """Each token's rate f32[B, M], one for all tokens of a segment."""
    rate_BS = rates(key, (copy.segment.shape[0], segments), eps=eps)
    return jnp.take_along_axis(rate_BS, jnp.maximum(copy.segment - 1, 0), axis=1)


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
    copy = answers(batch)
    rate_BM = segment_rates(rate_key, copy, eps=eps, segments=segments)
    masked_BM = draw_mask(mask_key, copy.eligible.astype(bool), rate_BM)
    return hide(copy, masked_BM, rate_BM, mask_id=mask_id)


# ---- dLLM-RL: a rate for each token, or the steps of a rollout (specs/sdar.md 4b) ------------


def corrupt_tokens(
    key: jax.Array, batch: TokenBatch, *, mask_id: int, lower: float, upper: float
) -> Noisy:
    """Masks each trained token with a rate of its own from U(lower, upper) ("semi-ar")."""
    rate_key, mask_key = jax.random.split(key)
    copy = answers(batch)
    rate_BM = jax.random.uniform(rate_key, copy.rate.shape, minval=lower, maxval=upper)
    lottery_BM = jax.random.uniform(mask_key, rate_BM.shape)
    masked_BM = copy.eligible.astype(bool) & (lottery_BM < rate_BM)
    return hide(copy, masked_BM, rate_BM, mask_id=mask_id)


def trace_rounds(step_BM: jax.Array, *, block_length: int, shrink: int = 1) -> jax.Array:
    """The round, from 0, in which each token of an answer is trained ("trace"), i32[B, M].

    `step_BM` are the steps at which a rollout settled the tokens. The rounds of a block count its
    different steps, in their order; `shrink` of them that follow each other make one round.
    """
    rows, width = step_BM.shape
    whole = -(-width // block_length) * block_length
    # Behind the end stands the last step again: it is no further one.
    step_Bkb = jnp.pad(step_BM, ((0, 0), (0, whole - width)), mode="edge")
    step_Bkb = step_Bkb.reshape(rows, -1, block_length)
    same_Bkbb = step_Bkb[..., :, None] == step_Bkb[..., None, :]
    first_Bkb = jnp.argmax(same_Bkbb, axis=-1) == jnp.arange(block_length)
    earlier_Bkbb = (step_Bkb[..., None, :] < step_Bkb[..., :, None]) & first_Bkb[..., None, :]
    return (earlier_Bkbb.sum(-1) // shrink).reshape(rows, whole)[:, :width]


def replay(copy: Noisy, round_BM: jax.Array, number: int, *, mask_id: int) -> Noisy:
    """One round of a rollout: what came later is masked, too, but what came now is trained."""
    now_BM = round_BM == number
    later = hide(copy, round_BM >= number, copy.rate, mask_id=mask_id)
    return later.replace(eligible=copy.eligible * now_BM)


# ---- WeDLM: a number for each block, and the masks moved to its end (specs/wedlm.md 3) -------


def blocks_of(copy: Noisy, *, block_length: int) -> jax.Array:
    """The number, from 0, of each place's block among those of its row, i32[B, M].

    Blocks are counted from the start of their segment, and the places of one stand together.
    """
    block_BM = copy.position // block_length
    differs = lambda x_BM: x_BM[:, 1:] != x_BM[:, :-1]  # noqa: E731
    border_BM = differs(copy.segment) | differs(block_BM)
    return jnp.pad(jnp.cumsum(border_BM, axis=1), ((0, 0), (1, 0)))


def draw_counts(
    key: jax.Array, eligible_BM: jax.Array, rate_BM: jax.Array, block_BM: jax.Array
) -> jax.Array:
    """Masks round(rate * c) of a block's c eligible tokens, halves to even; may be none of them."""
    # A permutation for lots: no two are equal.
    lot_BM = jnp.argsort(jax.random.uniform(key, rate_BM.shape), axis=1)
    same_BMM = (block_BM[:, :, None] == block_BM[:, None, :]) & eligible_BM[:, None, :]
    drawn_before_BM = (same_BMM & (lot_BM[:, None, :] < lot_BM[:, :, None])).sum(2)
    return eligible_BM & (drawn_before_BM < jnp.round(rate_BM * same_BMM.sum(2)))


def reorder(noisy: Noisy, block_BM: jax.Array) -> Noisy:
    """In each block the observed tokens first, then the masked ones; they keep their positions."""
    slots_BM = jnp.argsort(2 * block_BM + noisy.masked, axis=1, stable=True)
    return jax.tree.map(lambda x_BM: jnp.take_along_axis(x_BM, slots_BM, axis=1), noisy)


def corrupt_blocks(
    key: jax.Array,
    batch: TokenBatch,
    *,
    mask_id: int,
    block_length: int,
    per_block: bool,
    segments: int,
) -> Noisy:
    """Masks a part of every block and reorders it. A rate is a block's own, or its segment's."""
    rate_key, mask_key = jax.random.split(key)
    copy = answers(batch)
    block_BM = blocks_of(copy, block_length=block_length)
    if per_block:
        rate_BM = rates(rate_key, block_BM.shape, eps=SMALLEST_RATE)
        rate_BM = jnp.take_along_axis(rate_BM, block_BM, axis=1)
    else:
        rate_BM = segment_rates(rate_key, copy, eps=SMALLEST_RATE, segments=segments)
    masked_BM = draw_counts(mask_key, copy.eligible.astype(bool), rate_BM, block_BM)
    return reorder(hide(copy, masked_BM, rate_BM, mask_id=mask_id), block_BM)
