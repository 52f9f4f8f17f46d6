"""Renaming: the same episode told with other content words, so that a model learns to look them up.

A text world has few names, and a small model would rather learn them by heart than learn to copy;
then it fails at every name it has not met. With renaming, some of an episode's content tokens trade
places by a random permutation, the same one for all that is said in the episode. What happened
stays true (the thing that was taken is the thing in the inventory), but only reading the episode
tells its names. Few tokens move in one episode and most of them in another: unknown names are made
of known words, too ("dirty black pullover"), and what usually stands together must not be trusted.
"""

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mdlm_jax.structs import Message, Tasks, TokenBatch


def content_tokens(
    episodes: Sequence[Sequence[int]], *, known: Iterable[int], vocab_size: int, share: float
) -> np.ndarray:
    """bool[V]: known tokens that stand in fewer than `share` of the episodes; others are grammar.

    Known tokens are those that some text of the run is spelled with. One that stands in no episode
    is content too: by renaming, a model learns to copy words it has not met. A piece that BPE only
    passed through on its way to a word is no token to learn. `episodes` are ids.
    """
    seen = np.zeros(vocab_size, np.int64)
    for ids in episodes:
        seen[np.unique(ids)] += 1
    content = np.zeros(vocab_size, bool)
    content[list(known)] = True
    return content & (seen < share * len(episodes))


def permutations(key: jax.Array, shape: tuple[int, ...], content_V: np.ndarray) -> jax.Array:
    """Random permutations of the vocabulary that move content tokens only, i32[*shape, V].

    In each, a content token takes part with a chance of its own, drawn from U(0, 1); those that do
    trade places among themselves.
    """
    content = jnp.asarray(np.flatnonzero(content_V), jnp.int32)  # i32[n]
    share_key, part_key, lottery_key = jax.random.split(key, 3)
    share = jax.random.uniform(share_key, (*shape, 1))
    moves = jax.random.uniform(part_key, (*shape, len(content))) < share
    lottery = jax.random.uniform(lottery_key, moves.shape)
    # Both orders list the movers first, and those that stay behind them in the same order.
    place = jnp.arange(len(content), dtype=jnp.float32)
    before = content[jnp.argsort(jnp.where(moves, place, len(content) + place), axis=-1)]
    after = content[jnp.argsort(jnp.where(moves, lottery, len(content) + place), axis=-1)]
    same = jnp.broadcast_to(jnp.arange(len(content_V)), (*shape, len(content_V)))
    return jnp.put_along_axis(same, before, after, axis=-1, inplace=False)


def rename_tasks(key: jax.Array, tasks: Tasks, *, content_V: np.ndarray, share: float) -> Tasks:
    """Renames a random `share` of the tasks, alike on both sides: dreams of unknown things."""
    permute_key, choose_key = jax.random.split(key)
    count = tasks.policy.tokens.shape[0]
    names_PV = permutations(permute_key, (count,), content_V)
    chosen_P1 = jax.random.uniform(choose_key, (count, 1)) < share

    def told(message: Message) -> Message:
        renamed_PW = jnp.take_along_axis(names_PV, message.tokens, axis=1)
        return message.replace(tokens=jnp.where(chosen_P1, renamed_PW, message.tokens))

    return Tasks(policy=told(tasks.policy), world=told(tasks.world))


def rename(
    key: jax.Array, batch: TokenBatch, *, content_V: np.ndarray, share: float, segments: int
) -> TokenBatch:
    """Renames a random `share` of each row's segments, of which there are at most `segments`."""
    permute_key, choose_key = jax.random.split(key)
    rows = batch.tokens.shape[0]
    names_BSV = permutations(permute_key, (rows, segments), content_V)
    segment_BL = jnp.maximum(batch.segment - 1, 0)
    row_B1 = jnp.arange(rows)[:, None]
    renamed_BL = names_BSV[row_B1, segment_BL, batch.tokens]
    chosen_BS = jax.random.uniform(choose_key, (rows, segments)) < share
    chosen_BL = jnp.take_along_axis(chosen_BS, segment_BL, axis=1) & (batch.segment > 0)
    return batch.replace(tokens=jnp.where(chosen_BL, renamed_BL, batch.tokens))
