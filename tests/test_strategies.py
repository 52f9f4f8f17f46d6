"""What is settled after one look, by hand: strategies, fall-backs, schedules, confidences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mdlm_jax.diffusion import strategies

PLAN = strategies.Plan(
    strategy="low_confidence_dynamic",
    block=4,
    steps=4,
    threshold=0.6,
    temperature=0.0,
    max_tokens=11,
    stop_ids=(2, 3),
    mask_id=4,
    pad_id=0,
)


def view_of(**fields) -> strategies.View:
    return strategies.View(
        **dict.fromkeys(("ids", "confidence", "logprobs", "entropy", "lottery")) | fields
    )


SCORE = jnp.array([[0.5, 0.9, 0.7, 0.95], [0.2, 0.2, 0.1, 0.99]])
MASKED = jnp.array([[True, True, True, False], [True, True, True, False]])
VIEW = view_of(confidence=SCORE, lottery=SCORE, entropy=SCORE)
DUE = jnp.array([1, 2])
BEST = [[0, 1, 0, 0], [1, 1, 0, 0]]


@pytest.mark.parametrize(
    ("name", "threshold", "picked"),
    [
        ("low_confidence_static", 0.6, BEST),
        ("random", 0.6, BEST),
        ("low_confidence_dynamic", 0.6, [[0, 1, 1, 0], [1, 1, 0, 0]]),
        ("low_confidence_dynamic", 0.9, BEST),
        ("sequential", 0.6, [[1, 0, 0, 0], [1, 1, 0, 0]]),
        ("entropy_bounded", 1.3, [[1, 0, 1, 0], [1, 1, 1, 0]]),
        ("entropy_bounded", 0.05, [[1, 0, 0, 0], [0, 0, 1, 0]]),
        ("entropy_bounded", 9.0, [[1, 1, 1, 0], [1, 1, 1, 0]]),
    ],
)
def test_strategies_by_hand(name, threshold, picked):
    plan = PLAN.replace(threshold=threshold)
    settled = strategies.STRATEGIES[name](VIEW, MASKED, DUE, plan)
    np.testing.assert_array_equal(settled, np.asarray(picked, bool))


@pytest.mark.parametrize(
    ("fallback", "picked"),
    [
        ("top_k", [[0, 1, 1, 0], [1, 1, 0, 0]]),
        ("left_most", [[1, 1, 0, 0], [1, 1, 0, 0]]),
        ("best", [[0, 1, 0, 0], [1, 0, 0, 0]]),
    ],
)
def test_what_is_settled_when_too_few_are_sure(fallback, picked):
    """DARE#11: engines disagree. In row 0 one token is sure where two are due; in row 1 none is."""
    plan, due = PLAN.replace(fallback=fallback, threshold=0.8), jnp.array([2, 2])
    settled = strategies.low_confidence_dynamic(VIEW, MASKED, due, plan)
    np.testing.assert_array_equal(settled, np.asarray(picked, bool))


def test_left_most_counts_places_not_masks():
    """As JetEngine does: place 1 is settled, and uses up one of the two."""
    masked = jnp.array([[True, False, True, True], [False, True, True, False]])
    picked = strategies.left_most(SCORE, masked, jnp.array([2, 2]))
    np.testing.assert_array_equal(picked.astype(int), [[1, 0, 0, 0], [0, 1, 1, 0]])


def test_a_threshold_is_strict_unless_it_is_inclusive():
    score = jnp.array([[0.5, 0.75, 0.625, 0.75], [0.75, 0.25, 0.75, 0.75]])
    view, due = view_of(confidence=score), jnp.array([1, 1])
    plan = PLAN.replace(threshold=0.75)
    settled = strategies.low_confidence_dynamic(view, MASKED, due, plan)
    np.testing.assert_array_equal(settled.astype(int), [[0, 1, 0, 0], [1, 0, 0, 0]])
    settled = strategies.low_confidence_dynamic(view, MASKED, due, plan.replace(inclusive=True))
    np.testing.assert_array_equal(settled.astype(int), [[0, 1, 0, 0], [1, 0, 1, 0]])


def test_each_row_may_have_its_own_threshold():
    plan = PLAN.replace(threshold=jnp.array([0.6, 0.15]))
    settled = strategies.low_confidence_dynamic(VIEW, MASKED, jnp.array([1, 1]), plan)
    np.testing.assert_array_equal(settled.astype(int), [[0, 1, 1, 0], [1, 1, 0, 0]])
    settled = strategies.entropy_bounded(VIEW, MASKED, DUE, plan)
    np.testing.assert_array_equal(settled.astype(int), [[1, 0, 0, 0], [0, 0, 1, 0]])


@pytest.mark.parametrize("fallback", strategies.FALLBACKS)
@pytest.mark.parametrize("name", strategies.STRATEGIES)
def test_a_diverged_model_still_settles_a_token(name, fallback):
    nan = jnp.full((2, 4), jnp.nan)
    view = view_of(confidence=nan, lottery=nan, entropy=nan)
    masked = jnp.array([[True, False, True, True], [False, False, False, True]])
    plan = PLAN.replace(fallback=fallback)
    settled = np.asarray(strategies.STRATEGIES[name](view, masked, jnp.array([1, 1]), plan))
    assert settled.any(axis=1).all()
    assert not (settled & ~masked).any()


@pytest.mark.parametrize(
    ("block", "steps", "due"),
    [(4, 4, [1, 1, 1, 1]), (8, 3, [3, 3, 2]), (4, 1, [4]), (4, 9, [1, 1, 1, 1]), (5, 2, [3, 2])],
)
def test_the_schedule_spreads_a_block_over_its_steps(block, steps, due):
    step_B = jnp.arange(len(due))
    np.testing.assert_array_equal(strategies.remainder_first(step_B, block=block, steps=steps), due)


def test_other_schedules_take_further_steps():
    step_B = jnp.arange(3)
    np.testing.assert_array_equal(strategies.floor(step_B, block=8, steps=3), [2, 2, 2])
    np.testing.assert_array_equal(strategies.floor(step_B, block=4, steps=9), [1, 1, 1])
    np.testing.assert_array_equal(strategies.one(step_B, block=8, steps=2), [1, 1, 1])
    by_row = strategies.remainder_first(step_B, block=8, steps=jnp.array([4, 3, 3]))
    np.testing.assert_array_equal(by_row, [2, 3, 2])


def test_every_preset_is_a_plan():
    for name, preset in strategies.PRESETS.items():
        plan = PLAN.replace(**preset)
        assert plan.fallback in strategies.FALLBACKS, name
        assert plan.schedule in strategies.SCHEDULES, name
        assert plan.strategy in strategies.STRATEGIES, name
        assert plan.replace(**strategies.PRESETS["canonical"]).schedule == "remainder_first"
    assert PLAN.replace(**strategies.PRESETS["canonical"]) == PLAN  # the defaults


PROBS = np.array([[0.5, 0.2, 0.15, 0.05, 0.1], [0.05, 0.3, 0.05, 0.1, 0.5]])


@pytest.mark.parametrize(
    ("changes", "confidence"),
    [
        ({}, [0.5, 0.3]),
        ({"top_k": 2}, [0.5, 0.3]),
        ({"top_k": 2, "filtered": True}, [0.5 / 0.7, 0.3 / 0.8]),
        ({"top_k": 1, "filtered": True}, [1.0, 0.3 / 0.5]),
        ({"top_p": 0.6, "filtered": True}, [0.5 / 0.7, 0.3 / 0.8]),
        ({"min_p": 0.35, "filtered": True}, [0.5 / 0.7, 0.3 / 0.8]),
    ],
)
def test_confidence_before_and_after_the_filters(changes, confidence):
    """The mask, id 4, is never chosen, but its probability is part of the model's doubt."""
    logits = jnp.log(jnp.asarray(PROBS))[:, None]
    plan = PLAN.replace(temperature=0.0, **changes)
    view = strategies.look(jax.random.split(jax.random.key(0), 2), logits, plan)
    np.testing.assert_array_equal(view.ids[:, 0], [0, 1])
    np.testing.assert_allclose(view.confidence[:, 0], confidence, rtol=1e-5)
    np.testing.assert_allclose(jnp.exp(view.logprobs[:, 0]), [0.5, 0.3], rtol=1e-5)
    whole = -(PROBS * np.log(PROBS)).sum(1)
    if plan.filtered:
        assert (np.asarray(view.entropy[:, 0]) < whole - 0.1).all()
    else:
        np.testing.assert_allclose(view.entropy[:, 0], whole, rtol=1e-5)


def test_a_single_candidate_is_exactly_certain():
    """Strictly above 1 is nothing, so the static evaluation of generate.py stays static."""
    logits = 9.0 * jax.random.normal(jax.random.key(1), (2, 40, 4))
    plan = PLAN.replace(top_k=1, filtered=True, temperature=0.7)
    view = strategies.look(jax.random.split(jax.random.key(0), 2), logits, plan)
    assert (np.asarray(view.confidence) == 1.0).all()
