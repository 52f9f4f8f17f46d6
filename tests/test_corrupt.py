"""What may be masked, how often, and what never is."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mdlm_jax.diffusion import corrupt
from mdlm_jax.structs import TokenBatch

MASK, EPS, BLOCK = 99, 0.01, 4


def batch() -> TokenBatch:
    """Two segments and padding in row 0, one segment in row 1, nothing to learn in row 2."""
    length = 16
    segment = np.array([[1] * 6 + [2] * 8 + [0] * 2, [1] * 12 + [0] * 4, [1] * 8 + [0] * 8])
    position = np.array(
        [[*range(6), *range(8), 0, 0], [*range(12)] + [0] * 4, [*range(8)] + [0] * 8]
    )
    trained = np.zeros((3, length), bool)
    trained[0, [2, 3, 4, 5]] = True
    trained[0, 11:14] = True
    trained[1, 3] = True
    index = [[*range(6), *range(10, 14), -1, -1], [0, 1, 2, 3] + [-1] * 8, [-1] * 12]
    tokens = np.arange(3 * length).reshape(3, length)
    fields = (tokens, segment, position, trained, np.array(index))
    return TokenBatch(*(jnp.asarray(field) for field in fields))


draw = jax.jit(partial(corrupt.corrupt, mask_id=MASK, eps=EPS, segments=2))
many = jax.jit(jax.vmap(partial(corrupt.corrupt, mask_id=MASK, eps=EPS, segments=2), (0, None)))


@pytest.fixture(scope="module")
def draws() -> corrupt.Noisy:
    return many(jax.random.split(jax.random.key(0), 500), batch())


def test_only_trained_tokens_are_masked_and_the_rest_stays_clean(draws):
    eligible = np.zeros((3, 12), bool)
    eligible[0, [2, 3, 4, 5, 7, 8, 9]] = True
    eligible[1, 3] = True
    np.testing.assert_array_equal(draws.eligible[0], eligible)
    masked = np.asarray(draws.masked)
    assert not masked[:, ~eligible].any()
    np.testing.assert_array_equal(draws.tokens, np.where(masked, MASK, draws.target))
    places = np.array([[*range(6), *range(10, 14)]])
    np.testing.assert_array_equal(draws.target[0, :1, :10], places)
    np.testing.assert_array_equal(draws.segment[0, 0], [1] * 6 + [2] * 4 + [0, 0])
    np.testing.assert_array_equal(draws.position[0, 0, :10], [*range(6), *range(4, 8)])
    assert not np.asarray(draws.segment[0, 2]).any()


def test_each_row_with_trained_tokens_has_a_mask(draws):
    masked = np.asarray(draws.masked).any(axis=2)
    np.testing.assert_array_equal(masked.all(axis=0), [True, True, False])
    np.testing.assert_array_equal(masked.any(axis=0), [True, True, False])


def test_a_rate_belongs_to_a_segment_and_is_uniform(draws):
    rate = np.asarray(draws.rate)
    np.testing.assert_array_equal(rate[:, 0, :6], rate[:, 0, :1].repeat(6, 1))
    np.testing.assert_array_equal(rate[:, 0, 6:10], rate[:, 0, 6:7].repeat(4, 1))
    assert (rate[:, 0, 0] != rate[:, 0, 6]).all()
    assert rate.min() >= EPS
    assert rate.max() <= 1
    for values in (rate[:, 0, 0], rate[:, 0, 6], rate[:, 1, 0]):
        np.testing.assert_allclose(
            np.quantile(values, [0.25, 0.5, 0.75]), [0.25, 0.5, 0.75], atol=0.08
        )


def test_tokens_are_masked_as_often_as_their_rate_says(draws):
    masked, rate = np.asarray(draws.masked)[:, 0], np.asarray(draws.rate)[:, 0]
    eligible = np.asarray(draws.eligible)[0, 0].astype(bool)
    # Redraws favour rows with a mask a little; with seven tokens that is hardly seen.
    np.testing.assert_allclose(masked[:, eligible].mean(), rate[:, eligible].mean(), atol=0.04)
    high = rate[:, 0] > 0.8
    assert masked[high][:, 2:6].mean() > 0.8
    low = rate[:, 0] < 0.2
    assert masked[low][:, 2:6].mean() < 0.25


def test_a_mask_that_no_draw_gives_is_forced_on_one_trained_token():
    eligible = jnp.array([[True, False, True], [False, False, False], [False, False, True]])
    masks = jax.vmap(lambda key: corrupt.draw_mask(key, eligible, jnp.zeros((3, 3))))
    masked = np.asarray(masks(jax.random.split(jax.random.key(1), 60)))
    np.testing.assert_array_equal(masked.sum(axis=2), np.array([[1, 0, 1]] * 60))
    assert not masked[:, ~np.asarray(eligible)].any()
    assert 10 < masked[:, 0, 0].sum() < 50  # either token may win


def test_the_draw_depends_on_the_key_only():
    first, again, other = (draw(jax.random.key(seed), batch()) for seed in (4, 4, 5))
    np.testing.assert_array_equal(first.masked, again.masked)
    assert (np.asarray(first.masked) != np.asarray(other.masked)).any()
