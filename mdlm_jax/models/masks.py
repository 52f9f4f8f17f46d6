"""Who sees whom, from three numbers per token. No mask is ever guessed from ids."""

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Sight:
    """What decides which keys a query may see. All fields [B, W]."""

    segment: jax.Array  # i32  tokens see their own segment only; 0 = padding, seen by nobody
    order: jax.Array  # i32  block index (block-causal) or position (causal)
    noisy: jax.Array  # bool  the corrupted copy in training; False everywhere else


def visible(query: Sight, key: Sight) -> jax.Array:
    """bool[B, Q, K]: True = attend. SDAR's training mask (arXiv 2510.06303), of which the rest are cases.

    Clean sees clean of its own and earlier order; noisy sees clean of earlier order and noisy of its
    own; nobody else sees noisy. With order = position and nothing noisy this is the causal mask.
    """
    q = lambda x: x[:, :, None]  # noqa: E731
    k = lambda x: x[:, None, :]  # noqa: E731
    same = (q(query.segment) == k(key.segment)) & (k(key.segment) > 0)
    earlier = k(key.order) < q(query.order)
    level = k(key.order) == q(query.order)
    clean_key = ~k(key.noisy) & (earlier | (level & ~q(query.noisy)))
    noisy_key = k(key.noisy) & q(query.noisy) & level
    return same & (clean_key | noisy_key)


def order(positions_BW: jax.Array, *, block_length: int) -> jax.Array:
    """Block index of each position; block length 1 is the causal order."""
    return positions_BW // block_length


def clean(live_BW: jax.Array, order_BW: jax.Array) -> Sight:
    """Sight of one clean segment whose live tokens are marked."""
    return Sight(live_BW.astype(jnp.int32), order_BW, jnp.zeros(live_BW.shape, bool))
