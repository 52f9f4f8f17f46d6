"""What a model has read so far: reading messages, looking at windows, writing the cache.

Both ways of generating keep the same books. `cached` leading tokens have their keys and values in
the cache; the tokens from there to `length` are pending and are fed again with the next forward
pass.

The step function that everything here takes is

    step_fn(params, tokens_BW, positions_BW, live_BW, cache, cached_B)
        -> hidden_BWD, fresh Cache of W

and sees the cache up to `cached` plus the fresh window, under the model's own mask.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from mdlm_jax.structs import Cache, CacheShape, Context, Message


def empty(rows: int, size: int, shape: CacheShape, dtype: jnp.dtype) -> Context:
    """An unread context of `size` places."""
    shape_NBJCK = (shape.layers, rows, shape.heads, size, shape.width)
    conv = None
    if shape.conv_layers:
        conv = jnp.zeros((shape.conv_layers, rows, shape.conv_taps, shape.conv_width), dtype)
    # An array each: memory that is shared could not be donated.
    return Context(
        tokens=jnp.zeros((rows, size), jnp.int32),
        length=jnp.zeros((rows,), jnp.int32),
        cached=jnp.zeros((rows,), jnp.int32),
        cache=Cache(jnp.zeros(shape_NBJCK, dtype), jnp.zeros(shape_NBJCK, dtype), conv),
    )


def window(context: Context, start_B: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """Tokens and positions i32[B, width] from `start_B` on; past the end stands the last token."""
    positions_BW = start_B[:, None] + jnp.arange(width)
    return at(context.tokens, positions_BW), positions_BW


def at(buffer_BC: jax.Array, positions_BW: jax.Array) -> jax.Array:
    """What stands at each position, [B, W]; outside the buffer, what stands at its nearer end."""
    inside_BW = jnp.clip(positions_BW, 0, buffer_BC.shape[1] - 1)
    return jnp.take_along_axis(buffer_BC, inside_BW, axis=1)


def limit(
    prompt_B: jax.Array, size: int, *, max_tokens: int, budget: int | jax.Array | None = None
) -> jax.Array:
    """Where an answer behind the prompt ends at the latest, i32[B], in a context of `size` places.

    `budget` is a row's own number of tokens, where that is fewer than `max_tokens`.
    """
    most = max_tokens if budget is None else jnp.minimum(budget, max_tokens)
    return jnp.minimum(prompt_B + most, size)


def put(
    buffer_BC: jax.Array, values_BW: jax.Array, positions_BW: jax.Array, keep_BW: jax.Array
) -> jax.Array:
    """Writes the kept values at their positions; the rest, and what lies outside, is dropped."""
    places_BW = jnp.where(keep_BW, positions_BW, buffer_BC.shape[1])
    rows_B1 = jnp.arange(buffer_BC.shape[0])[:, None]
    return buffer_BC.at[rows_B1, places_BW].set(values_BW.astype(buffer_BC.dtype), mode="drop")


def write(cache: Cache, fresh: Cache, positions_BW: jax.Array, keep_BW: jax.Array) -> Cache:
    """Writes what a model keeps of a window's kept places, once, for all layers.

    With convolutions, the window must begin at the first place that is not cached, and the kept
    places must be its first ones.
    """
    size = cache.key.shape[3]
    places_BW = jnp.where(keep_BW, positions_BW, size)
    rows_B1 = jnp.arange(places_BW.shape[0])[:, None]

    def scatter(old_NBJCK, new_NBJWK):
        new_BWNJK = new_NBJWK.transpose(1, 3, 0, 2, 4).astype(old_NBJCK.dtype)
        return old_NBJCK.at[:, rows_B1, :, places_BW].set(new_BWNJK, mode="drop")

    conv = None if cache.conv is None else _advance(cache.conv, fresh.conv, keep_BW.sum(1))
    return Cache(scatter(cache.key, fresh.key), scatter(cache.value, fresh.value), conv)


def _advance(old_NBTD: jax.Array, new_NBWD: jax.Array, count_B: jax.Array) -> jax.Array:
    """The last T inputs after `count` more were read: a window that slides along each row."""
    taps = old_NBTD.shape[2]
    joined = jnp.concatenate([old_NBTD, new_NBWD.astype(old_NBTD.dtype)], axis=2)
    places_BT = count_B[:, None] + jnp.arange(taps)
    return jnp.take_along_axis(joined, places_BT[None, :, :, None], axis=2)


def append(context: Context, message: Message) -> Context:
    """Adds the message's ids. What does not fit is cut; callers check `room` first."""
    size, width = context.tokens.shape[1], message.tokens.shape[1]
    places_BW = context.length[:, None] + jnp.arange(width)
    keep_BW = jnp.arange(width) < message.length[:, None]
    tokens_BC = put(context.tokens, message.tokens, places_BW, keep_BW)
    return context.replace(
        tokens=tokens_BC, length=jnp.minimum(context.length + message.length, size)
    )


def fill(message: Message, *, slot: int, pad_id: int) -> Message:
    """The message filled up with padding to whole slots; silence stays silence."""
    rows, width = message.tokens.shape
    whole = -(-width // slot) * slot
    tokens_BW = jnp.pad(message.tokens, ((0, 0), (0, whole - width)))
    spoken_BW = jnp.arange(whole) < message.length[:, None]
    length_B = -(-message.length // slot) * slot
    return Message(jnp.where(spoken_BW, tokens_BW, pad_id), length_B)


def align(context: Context, *, block: int, pad_id: int) -> Context:
    """The context filled up to a whole number of blocks with padding that waits to be read."""
    pads_BW = jnp.full((context.length.shape[0], block - 1), pad_id, jnp.int32)
    return append(context, Message(pads_BW, -context.length % block))


def room(context: Context) -> jax.Array:
    """Places left, i32[B]."""
    return context.tokens.shape[1] - context.length


def read(
    step_fn: Callable,
    params: dict,
    context: Context,
    message: Message,
    *,
    pending: int,
    settled: Callable,
    chunk: int | None = None,
) -> Context:
    """Appends a message and caches what is settled.

    `pending` is the most tokens that may wait uncached before the message; `settled(length_B)` says
    how many leading tokens may be cached at that length (whole blocks, or all but the last).
    Messages that may be wider than `chunk`, a multiple of the block length, are read in pieces of
    it until every row has read its own, so that short ones cost little.
    """
    context = append(context, message)
    goal_B = jnp.where(message.length > 0, settled(context.length), context.cached)
    width = pending + message.tokens.shape[1]

    def piece(context: Context, width: int) -> Context:
        tokens_BW, positions_BW = window(context, context.cached, width)
        live_BW = positions_BW < context.length[:, None]
        _, fresh = step_fn(params, tokens_BW, positions_BW, live_BW, context.cache, context.cached)
        after_B = jnp.minimum(goal_B, context.cached + width)
        cache = write(context.cache, fresh, positions_BW, positions_BW < after_B[:, None])
        return context.replace(cache=cache, cached=after_B)

    if chunk is None or width <= chunk:
        return piece(context, width)
    unread = lambda c: (c.cached < goal_B).any()  # noqa: E731
    return jax.lax.while_loop(unread, partial(piece, width=chunk), context)


def begin(read_fn: Callable, prompts: Message, context: Context, *, group: int) -> Context:
    """Reads P prompts once each and copies them to their `group` rows, in `context`'s memory.

    Rows are group-contiguous: row r continues prompt r // group.
    """
    rows, width = prompts.tokens.shape
    cache = context.cache
    small = read_fn(empty(rows, width, _shape(cache), cache.key.dtype), prompts)
    copies = partial(jnp.repeat, repeats=group)

    def paste(old_NBJCK, small_NPJWK):
        return old_NBJCK.at[:, :, :, :width].set(copies(small_NPJWK, axis=1))

    read = small.cache
    return Context(
        tokens=context.tokens.at[:, :width].set(copies(small.tokens, axis=0)),
        length=copies(small.length, axis=0),
        cached=copies(small.cached, axis=0),
        cache=Cache(
            key=paste(cache.key, read.key),
            value=paste(cache.value, read.value),
            conv=None if read.conv is None else copies(read.conv, axis=1),
        ),
    )


def _shape(cache: Cache) -> CacheShape:
    layers, _, heads, _, width = cache.key.shape
    if cache.conv is None:
        return CacheShape(layers, heads, width)
    conv_layers, _, taps, conv_width = cache.conv.shape
    return CacheShape(layers, heads, width, conv_layers, taps, conv_width)
