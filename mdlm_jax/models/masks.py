"""Who sees whom, from three numbers per token. No mask is ever guessed from ids."""

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Sight:
    """What decides which keys a query may see. Arrays are [B, W].

    `prefix` and `ahead` only save work: they promise that none of the first `prefix` places sees
    more than `ahead` places beyond its own, as in rows that are packed in order.
    """

    segment: jax.Array  # i32  tokens see their own segment only; 0 = padding, seen by nobody
    order: jax.Array  # i32  block index (block-causal) or position (causal)
    noisy: jax.Array  # bool  the corrupted copy in training; False everywhere else
    slot: jax.Array | None = None  # i32  where a token lies; it sees its level no further than that
    prefix: int = struct.field(pytree_node=False, default=0)
    ahead: int = struct.field(pytree_node=False, default=0)


def visible(query: Sight, key: Sight) -> jax.Array:
    """Who attends to whom, bool[B, Q, K]: SDAR's training mask (arXiv 2510.06303).

    Clean sees clean of its own and earlier order; noisy sees clean of earlier order and noisy of
    its own; nobody else sees noisy. With order = position and nothing noisy this is the causal
    mask. With slots, each copy is causal inside a block, by slot and not by position: WeDLM's
    training mask (arXiv 2512.22737).
    """
    query = jax.tree.map(lambda x_BQ: x_BQ[:, :, None], query)
    key = jax.tree.map(lambda x_BK: x_BK[:, None, :], key)
    same = (query.segment == key.segment) & (key.segment > 0)
    earlier = key.order < query.order
    level = key.order == query.order
    if key.slot is not None:
        level &= key.slot <= query.slot
    clean_key = ~key.noisy & (earlier | (level & ~query.noisy))
    noisy_key = key.noisy & query.noisy & level
    return same & (clean_key | noisy_key)


def order(positions_BW: jax.Array, *, block_length: int) -> jax.Array:
    """Block index of each position; block length 1 is the causal order."""
    return positions_BW // block_length


def clean(live_BW: jax.Array, order_BW: jax.Array) -> Sight:
    """Sight of one clean segment whose live tokens are marked."""
    return Sight(live_BW.astype(jnp.int32), order_BW, jnp.zeros(live_BW.shape, bool))
