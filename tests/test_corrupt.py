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


# ---- WeDLM ---------------------------------------------------------------------------------------


def plain_batch(lengths_by_row: list[list[int]], prompt: int) -> TokenBatch:
    """Rows of segments whose first tokens are a prompt; all blocks with an answer have a copy."""
    width = max(map(sum, lengths_by_row)) + 3
    rows = [plain_row(lengths, prompt, width) for lengths in lengths_by_row]
    return TokenBatch(*(jnp.asarray(np.stack(field)) for field in zip(*rows, strict=True)))


def plain_row(lengths: list[int], prompt: int, width: int) -> tuple[np.ndarray, ...]:
    segment = np.repeat(np.arange(len(lengths)) + 1, lengths)
    position = np.concatenate([np.arange(n) for n in lengths])
    index = np.flatnonzero(position >= prompt // BLOCK * BLOCK)
    pad = lambda x, value: np.pad(x, (0, width - len(x)), constant_values=value)  # noqa: E731
    tokens = np.arange(len(segment)) + 100
    fields = ((tokens, 0), (segment, 0), (position, 0), (position >= prompt, False), (index, -1))
    return tuple(pad(*field) for field in fields)


def reordered(key, rows: TokenBatch, *, per_block: bool = True) -> corrupt.Noisy:
    options = {"mask_id": MASK, "block_length": BLOCK, "per_block": per_block, "segments": 2}
    return corrupt.corrupt_blocks(key, rows, **options)


ROWS = plain_batch([[11, 13], [17]], prompt=5)  # neither prompts nor ends at block borders


@pytest.fixture(scope="module")
def block_draws() -> corrupt.Noisy:
    keys = jax.random.split(jax.random.key(2), 300)
    return jax.jit(jax.vmap(reordered, (0, None)))(keys, ROWS)


def blocks(noisy: corrupt.Noisy, draw: int, row: int) -> dict[tuple[int, int], np.ndarray]:
    """Places of each (segment, block) of a row."""
    keys = zip(
        np.asarray(noisy.segment[draw, row]).tolist(),
        (np.asarray(noisy.position[draw, row]) // BLOCK).tolist(),
        strict=True,
    )
    found: dict[tuple[int, int], list[int]] = {}
    for place, key in enumerate(keys):
        if key[0]:
            found.setdefault(key, []).append(place)
    return {key: np.array(places) for key, places in found.items()}


def test_a_block_masks_the_number_that_its_rate_says_halves_to_even(block_draws):
    counts = set()
    for draw in range(100):
        for row in range(2):
            for places in blocks(block_draws, draw, row).values():
                at = lambda name, d=draw, r=row, p=places: np.asarray(  # noqa: E731
                    getattr(block_draws, name)[d, r]
                )[p]
                eligible = int(at("eligible").sum())
                assert len(set(at("rate").tolist())) == 1
                assert at("masked").sum() == round(float(at("rate")[0]) * eligible)
                assert not at("masked")[at("eligible") == 0].any()
                counts.add(int(at("masked").sum()))
    assert counts == {0, 1, 2, 3, 4}


def test_halves_are_rounded_to_even():
    eligible, block = jnp.ones((2, 5), bool), jnp.zeros((2, 5), jnp.int32)
    rate = jnp.array([[0.5] * 5, [0.3] * 5])  # 2.5 and 1.5 tokens
    masked = corrupt.draw_counts(jax.random.key(0), eligible, rate, block)
    np.testing.assert_array_equal(masked.sum(1), [2, 2])


def test_the_tokens_of_a_block_are_chosen_uniformly():
    eligible = jnp.array([[1, 0, 1, 1, 1], [1, 1, 1, 1, 0]], bool)
    rate, block = jnp.full((2, 5), 0.5), jnp.array([[0] * 5, [0, 0, 1, 1, 1]])
    draw = jax.vmap(lambda key: corrupt.draw_counts(key, eligible, rate, block))
    often = np.asarray(draw(jax.random.split(jax.random.key(3), 2000))).mean(0)
    np.testing.assert_allclose(often[0], [0.5, 0, 0.5, 0.5, 0.5], atol=0.05)
    np.testing.assert_allclose(often[1], [0.5, 0.5, 0.5, 0.5, 0], atol=0.05)


def test_observed_tokens_stand_before_masks_and_all_keep_their_positions(block_draws):
    natural = corrupt.answers(ROWS)
    tokens, segment = np.asarray(ROWS.tokens), np.asarray(ROWS.segment)
    moved = 0
    for draw in range(50):
        noisy = jax.tree.map(lambda x, d=draw: np.asarray(x[d]), block_draws)
        np.testing.assert_array_equal(noisy.segment, natural.segment)
        np.testing.assert_array_equal(noisy.tokens, np.where(noisy.masked, MASK, noisy.target))
        for row in range(2):
            for (number, _), places in blocks(block_draws, draw, row).items():
                position, masked = noisy.position[row][places], noisy.masked[row][places]
                assert (np.diff(places) == 1).all()
                assert (np.diff(masked.astype(int)) >= 0).all()
                for part in (position[masked], position[~masked]):
                    assert (np.diff(part) > 0).all()
                start = np.flatnonzero(segment[row] == number)[0]
                np.testing.assert_array_equal(
                    noisy.target[row][places], tokens[row][start + position]
                )
                moved += (np.diff(position) < 0).any()
        real = np.asarray(natural.segment) > 0
        assert (noisy.segment[~real] == 0).all()
        assert not noisy.masked[~real].any()
    assert moved > 50


def test_a_block_that_is_masked_whole_or_not_at_all_keeps_its_order():
    copy = corrupt.answers(ROWS)
    block = corrupt.blocks_of(copy, block_length=BLOCK)
    for rate in (0.0, 1.0):
        noisy = corrupt.hide(copy, jnp.full(block.shape, rate > 0), copy.rate, mask_id=MASK)
        same = corrupt.reorder(noisy, block)
        for ours, before in zip(jax.tree.leaves(same), jax.tree.leaves(noisy), strict=True):
            np.testing.assert_array_equal(ours, before)


def test_a_rate_belongs_to_a_block_or_to_a_segment(block_draws):
    keys = jax.random.split(jax.random.key(5), 40)
    by_segment = jax.vmap(lambda key: reordered(key, ROWS, per_block=False))(keys)
    for draws, kinds in ((block_draws, 5), (by_segment, 2)):
        real = np.asarray(draws.segment[0, 0]) > 0
        rates = np.asarray(draws.rate)[:40, 0][:, real]
        assert {len(set(rate.tolist())) for rate in rates} == {kinds}
    values = np.asarray(block_draws.rate)[:, 1, 0]
    np.testing.assert_allclose(np.quantile(values, [0.25, 0.5, 0.75]), [0.25, 0.5, 0.75], atol=0.1)


# ---- dLLM-RL -------------------------------------------------------------------------------------


def test_a_rate_of_its_own_for_each_token():
    draw = jax.vmap(
        lambda key: corrupt.corrupt_tokens(key, batch(), mask_id=MASK, lower=0.3, upper=0.5)
    )
    draws = draw(jax.random.split(jax.random.key(6), 400))
    rate, masked = np.asarray(draws.rate), np.asarray(draws.masked)
    eligible = np.asarray(draws.eligible[0]).astype(bool)
    assert rate.min() >= 0.3
    assert rate.max() < 0.5
    assert (rate[:, 0, 0] != rate[:, 0, 1]).all()
    assert not masked[:, ~eligible].any()
    np.testing.assert_allclose(masked[:, eligible].mean(), 0.4, atol=0.04)
    assert (masked.any(axis=2)[:, :2] == 0).any()  # no mask is forced
    np.testing.assert_array_equal(draws.tokens, np.where(masked, MASK, draws.target))


def rounds_by_hand(steps: list[int], block: int, shrink: int) -> list[int]:
    """The round of each token, block by block, from its place among the block's steps."""
    rounds = []
    for start in range(0, len(steps), block):
        part = steps[start : start + block]
        distinct = sorted(set(part))
        rounds += [distinct.index(step) // shrink for step in part]
    return rounds


@pytest.mark.parametrize("shrink", [1, 2, 3])
def test_rounds_follow_the_steps_of_each_block(shrink):
    steps = np.random.default_rng(shrink).integers(0, 6, (3, 14))
    found = corrupt.trace_rounds(jnp.asarray(steps), block_length=BLOCK, shrink=shrink)
    for row, ours in zip(steps.tolist(), found.tolist(), strict=True):
        assert ours == rounds_by_hand(row, BLOCK, shrink)


def test_all_rounds_of_a_replay_train_each_token_once():
    copy, rng = corrupt.answers(batch()), np.random.default_rng(8)
    steps = jnp.asarray(rng.integers(0, 4, copy.tokens.shape))
    rounds = corrupt.trace_rounds(steps, block_length=BLOCK)
    trained = np.zeros(rounds.shape)
    for number in range(BLOCK):
        noisy = corrupt.replay(copy, rounds, number, mask_id=MASK)
        np.testing.assert_array_equal(noisy.tokens == MASK, np.asarray(rounds) >= number)
        trained += np.asarray(noisy.eligible)
    np.testing.assert_array_equal(trained, copy.eligible)
