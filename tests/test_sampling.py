"""What a row draws depends on its key and its logits, and on nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mdlm_jax import ops, sampling

VOCAB = 31


@pytest.fixture
def logits_BV():
    return 2 * jax.random.normal(jax.random.key(0), (6, VOCAB))


@pytest.fixture
def keys_B():
    return jax.random.split(jax.random.key(1), 6)


def test_a_row_does_not_depend_on_its_batch_mates(keys_B, logits_BV):
    ids, logprobs = sampling.sample(keys_B, logits_BV, temperature=0.8)
    order = jnp.array([4, 1, 5])
    some_ids, some_logprobs = sampling.sample(keys_B[order], logits_BV[order], temperature=0.8)
    np.testing.assert_array_equal(ids[order], some_ids)
    np.testing.assert_array_equal(logprobs[order], some_logprobs)


def test_one_program_serves_greedy_and_sampling(keys_B, logits_BV):
    traced = jax.jit(
        lambda temperature: sampling.sample(keys_B, logits_BV, temperature=temperature)
    )
    for temperature in (0.0, 0.7, 1.3):
        ids, logprobs = traced(temperature)
        static_ids, static_logprobs = sampling.sample(keys_B, logits_BV, temperature=temperature)
        np.testing.assert_array_equal(ids, static_ids)
        np.testing.assert_allclose(logprobs, static_logprobs, rtol=1e-6)
    assert traced._cache_size() == 1
    np.testing.assert_array_equal(traced(0.0)[0], jnp.argmax(logits_BV, axis=-1))


def test_a_constant_temperature_of_0_draws_no_random_numbers(keys_B, logits_BV):
    greedy = jax.jit(lambda keys, logits: sampling.sample(keys, logits, temperature=0.0))
    cost = greedy.lower(keys_B, logits_BV).compile().cost_analysis()
    random = jax.jit(lambda keys, logits: sampling.sample(keys, logits, temperature=1.0))
    assert cost["flops"] < 0.5 * random.lower(keys_B, logits_BV).compile().cost_analysis()["flops"]


@pytest.mark.parametrize("temperature", [0.0, 0.4, 1.0, 1.3])
def test_logprobs_are_those_of_the_tempered_unfiltered_distribution(keys_B, logits_BV, temperature):
    ids, logprobs = sampling.sample(keys_B, logits_BV, temperature=temperature, top_k=3, top_p=0.9)
    expected = jax.nn.log_softmax(logits_BV / (temperature or 1.0))
    np.testing.assert_allclose(logprobs, expected[jnp.arange(6), ids], atol=1e-6)


def test_sample_filters_as_filter_logits(logits_BV):
    options = {"temperature": 1.1, "top_k": 9, "top_p": 0.8, "min_p": 0.05}
    keys = jax.random.split(jax.random.key(5), 2000)
    kept = np.isfinite(sampling.filter_logits(logits_BV[0], **options))
    rows = jnp.broadcast_to(logits_BV[0], (2000, VOCAB))
    ids, _ = sampling.sample(keys, rows, **options)
    assert set(np.unique(ids)) == set(np.flatnonzero(kept))


def test_choose_gives_each_place_of_a_canvas_its_own_draw():
    logits = jnp.zeros((500, 3, 4)).at[..., 3].set(-jnp.inf)
    keys = jax.random.split(jax.random.key(2), 500)
    ids, confidence, logprobs = sampling.choose(keys, logits, temperature=1.0)
    assert ids.shape == confidence.shape == logprobs.shape == (500, 3)
    assert ids.max() == 2
    np.testing.assert_allclose(confidence, 1 / 3, rtol=1e-6)
    np.testing.assert_allclose(jnp.exp(logprobs), confidence)
    counts = np.stack([np.bincount(ids[:, place], minlength=3) for place in range(3)])
    assert (np.abs(counts / 500 - 1 / 3) < 0.1).all()
    assert 0.2 < (ids[:, 0] == ids[:, 1]).mean() < 0.45  # independent places agree a third


def test_forbidden_tokens_are_never_chosen(keys_B, logits_BV):
    best = int(jnp.argmax(logits_BV[0]))
    masked = sampling.forbid(logits_BV, (best, 3))
    assert int(jnp.argmax(masked[0])) not in (best, 3)
    probs = jax.nn.softmax(masked)
    assert (probs[:, [best, 3]] == 0).all()
    assert np.isfinite(ops.entropy(masked)).all()


def test_repetition_penalty_skips_empty_places_and_does_not_compound():
    logits = jnp.array([[2.0, -2.0, 1.0, 1.0]])
    seen = jnp.array([[0, 0, 1, -1]])
    penalised = sampling.repetition_penalty(logits, seen, 2.0)
    np.testing.assert_allclose(penalised, [[1.0, -4.0, 1.0, 1.0]])


def test_filters_left_at_their_defaults_change_nothing(logits_BV):
    np.testing.assert_array_equal(sampling.filter_logits(logits_BV, temperature=1.0), logits_BV)


def test_bfloat16_logits_are_raised_to_float32(keys_B, logits_BV):
    _, logprobs = sampling.sample(keys_B, logits_BV.astype(jnp.bfloat16), temperature=1.0)
    assert logprobs.dtype == jnp.float32
    ids = jnp.zeros((2, 3), jnp.int32)
    assert ops.token_logprobs(jnp.zeros((2, 3, 5), jnp.bfloat16), ids).dtype == jnp.float32


def test_masked_mean_ignores_what_is_masked_and_adds_up():
    values = jnp.array([1.0, jnp.nan, 3.0, 8.0])
    mask = jnp.array([1, 0, 1, 1])
    whole = ops.masked_mean(values, mask)
    assert float(ops.mean_value(whole)) == 4.0
    halves = ops.masked_mean(values[:2], mask[:2]) + ops.masked_mean(values[2:], mask[2:])
    assert float(ops.mean_value(halves)) == 4.0
    assert float(ops.mean_value(ops.masked_mean(values, jnp.zeros(4)))) == 0.0


def test_length_mask():
    expected = [[False, False, False], [True, True, False], [True, True, True]]
    np.testing.assert_array_equal(ops.length_mask(jnp.array([0, 2, 5]), 3), expected)


def test_entropy_of_a_uniform_and_of_a_certain_distribution():
    logits = jnp.array([[0.0, 0.0, -jnp.inf, 0.0], [0.0, -jnp.inf, -jnp.inf, -jnp.inf]])
    np.testing.assert_allclose(ops.entropy(logits), [np.log(3), 0.0], atol=1e-6)
    assert np.isfinite(jax.grad(lambda x: ops.entropy(x).sum())(logits)).all()
