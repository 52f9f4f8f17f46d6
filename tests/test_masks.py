"""The mask against SDAR's rules, written out pair by pair."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from mdlm_jax.models import masks


def may_see(query: tuple, key: tuple) -> bool:
    """SDAR's sentences: (segment, order, noisy) of both sides -> sees or not."""
    (q_segment, q_block, q_noisy), (k_segment, k_block, k_noisy) = query, key
    if k_segment == 0 or q_segment != k_segment:
        return False
    if q_noisy and k_noisy:
        return q_block == k_block
    if q_noisy:
        return k_block < q_block
    if k_noisy:
        return False
    return k_block <= q_block


def sight_of(rows: list[list[tuple]]) -> masks.Sight:
    segment, order, noisy = (
        np.array(x) for x in zip(*(zip(*row, strict=True) for row in rows), strict=True)
    )
    return masks.Sight(jnp.asarray(segment), jnp.asarray(order), jnp.asarray(noisy, bool))


def packed_row(lengths: list[int], *, block: int, pad: int, noisy_half: bool) -> list[tuple]:
    """Segments of these lengths one after the other, padding, then (in training) the noisy copy."""
    clean = [(s, p // block, False) for s, n in enumerate(lengths, 1) for p in range(n)]
    copy = [(s, b, True) for s, b, _ in clean] + [(0, 0, True)] * pad
    return clean + [(0, 0, False)] * pad + (copy if noisy_half else [])


@pytest.mark.parametrize("block", [1, 3, 4])
@pytest.mark.parametrize("noisy_half", [False, True])
def test_the_mask_is_the_papers_sentences_pair_by_pair(block, noisy_half):
    layout = {"block": block, "noisy_half": noisy_half}
    rows = [packed_row([5, 6], pad=3, **layout), packed_row([9, 1, 2], pad=2, **layout)]
    sight = sight_of(rows)
    seen = np.asarray(masks.visible(sight, sight))
    for row, (q, k) in itertools.product(range(2), np.ndindex(*seen.shape[1:])):
        assert seen[row, q, k] == may_see(rows[row][q], rows[row][k]), (row, q, k)


def test_block_length_1_is_the_causal_mask_and_one_large_block_sees_everything():
    positions = jnp.broadcast_to(jnp.arange(7), (2, 7))
    live = positions < jnp.array([[7], [4]])
    causal = masks.clean(live, masks.order(positions, block_length=1))
    expected = np.tril(np.ones((7, 7), bool))
    np.testing.assert_array_equal(masks.visible(causal, causal)[0], expected)
    whole = masks.clean(live, masks.order(positions, block_length=8))
    np.testing.assert_array_equal(masks.visible(whole, whole)[0], np.ones((7, 7), bool))
    real = np.arange(7) < 4
    np.testing.assert_array_equal(masks.visible(whole, whole)[1], real[:, None] & real)


def test_blocks_are_counted_from_position_0():
    positions = jnp.array([[2, 3, 4, 5, 8]])
    np.testing.assert_array_equal(masks.order(positions, block_length=4), [[0, 0, 1, 1, 2]])


def test_with_slots_each_copy_is_causal_inside_its_blocks():
    """WeDLM's rule pair by pair; slots need not follow the positions."""
    rows = [packed_row([5, 6], block=4, pad=3, noisy_half=True)]
    rows += [packed_row([9, 1, 2], block=4, pad=2, noisy_half=True)]
    slots = np.stack([np.random.default_rng(seed).permutation(len(rows[0])) for seed in (0, 1)])
    sight = sight_of(rows).replace(slot=jnp.asarray(slots))
    seen = np.asarray(masks.visible(sight, sight))
    for row, (q, k) in itertools.product(range(2), np.ndindex(*seen.shape[1:])):
        (q_segment, q_block, q_noisy), (k_segment, k_block, k_noisy) = rows[row][q], rows[row][k]
        together = (q_segment, q_block, q_noisy) == (k_segment, k_block, k_noisy)
        before = not k_noisy and k_block < q_block
        allowed = (together and slots[row, k] <= slots[row, q]) or before
        expected = k_segment > 0 and q_segment == k_segment and allowed
        assert seen[row, q, k] == expected, (row, q, k)
