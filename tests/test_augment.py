"""Renaming changes which words are used, and nothing else."""

import jax
import numpy as np

from mdlm_jax.structs import Message, Tasks, TokenBatch
from mdlm_jax.train import augment

VOCAB, SPECIALS = 23, 3
CONTENT = np.arange(VOCAB) >= 9


def batch() -> TokenBatch:
    """Two rows; the first holds two episodes and padding."""
    tokens = np.random.default_rng(0).integers(SPECIALS, VOCAB, size=(2, 11)).astype(np.int32)
    segment = np.array([[1] * 5 + [2] * 4 + [0] * 2, [1] * 11], np.int32)
    tokens[segment == 0] = 0
    return TokenBatch(tokens, segment, segment, segment > 0, np.zeros((2, 1), np.int32))


def rename(share: float) -> np.ndarray:
    new = augment.rename(jax.random.key(1), batch(), content_V=CONTENT, share=share, segments=2)
    return np.asarray(new.tokens)


def is_a_renaming(old: np.ndarray, new: np.ndarray) -> bool:
    """Grammar stays; content goes to content, one to one."""
    pairs = set(zip(old.tolist(), new.tolist(), strict=True))
    stays = all(b == a for a, b in pairs if not CONTENT[a])
    moves = {(a, b) for a, b in pairs if CONTENT[a]}
    one_to_one = len({a for a, _ in moves}) == len(moves) == len({b for _, b in moves})
    return stays and one_to_one and all(CONTENT[b] for _, b in moves)


def test_no_share_changes_nothing():
    np.testing.assert_array_equal(rename(0.0), batch().tokens)


def test_every_episode_is_renamed_by_a_permutation_of_its_own():
    old, new = batch().tokens, rename(1.0)
    segment = batch().segment
    for row, number in ((0, 1), (0, 2), (1, 1)):
        here = segment[row] == number
        assert is_a_renaming(old[row][here], new[row][here])
    assert (new[segment == 0] == 0).all()
    assert (new != old).any()


def test_both_sides_of_a_task_are_renamed_alike():
    ids = np.random.default_rng(2).integers(SPECIALS, VOCAB, size=(4, 6)).astype(np.int32)
    length = np.full(4, 6, np.int32)
    tasks = Tasks(policy=Message(ids[:, :3], length // 2), world=Message(ids, length))
    new = augment.rename_tasks(jax.random.key(3), tasks, content_V=CONTENT, share=1.0)
    np.testing.assert_array_equal(new.policy.tokens, new.world.tokens[:, :3])
    for before, after in zip(ids, np.asarray(new.world.tokens), strict=True):
        assert is_a_renaming(before, after)
    np.testing.assert_array_equal(new.world.length, length)


def test_content_is_what_is_known_and_few_episodes_share():
    episodes = [np.array([0, 4, 5, 5]), np.array([0, 4, 6]), np.array([0, 5, 2])]
    content = augment.content_tokens(episodes, known=(2, 4, 5, 6, 7), vocab_size=9, share=0.5)
    # 4 and 5 stand in two of the three; 7 in none, but it is known; 0 is common, 8 is not known.
    np.testing.assert_array_equal(np.flatnonzero(content), [2, 6, 7])
