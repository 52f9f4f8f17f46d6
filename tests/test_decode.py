"""One token at a time: equal to recomputing everything, and exact about what was chosen."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import TinyModel, message, sharp_params, texts

from mdlm_jax import sampling
from mdlm_jax.autoregressive import decode, score
from mdlm_jax.structs import Cache

MODEL, SIZE, MOST = TinyModel(1), 24, 7
STOPS = (3, 4)
PROMPTS = [[5, 6, 7, 8], [9, 10], [14, 15, 16, 4, 3]]


@partial(jax.jit, static_argnums=(0, 1))
def write(step_fn, rule, params, keys, context, active):
    return decode.generate(step_fn, params, keys, context, active, **dict(rule))


def rule(temperature: float, stop_ids: tuple[int, ...] = STOPS, most: int = MOST) -> tuple:
    return (("temperature", temperature), ("max_tokens", most), ("stop_ids", stop_ids))


@pytest.fixture(scope="module")
def params():
    return sharp_params(5)


@pytest.fixture(scope="module")
def context(params):
    return MODEL.read(params, MODEL.memory(3, SIZE), message(*PROMPTS, width=5))


def keys_of(rows: int, seed: int = 0):
    return jax.random.split(jax.random.key(seed), rows)


def full_logprobs(params, rows: list[list[int]]) -> jax.Array:
    """Log-probs of every token of finished rows, without a cache."""
    tokens = message(*rows, width=SIZE)
    logits = MODEL.logits(params, tokens.tokens, tokens.length)
    return score.next_token_logprobs(logits, tokens.tokens)


def test_greedy_text_equals_recomputing_the_whole_row_for_every_token(params, context):
    said, after = write(MODEL.step, rule(0.0), params, keys_of(3), context, jnp.ones(3, bool))
    for prompt, text in zip(PROMPTS, texts(said), strict=True):
        row = list(prompt)
        for place, token in enumerate(text):
            ids = message(row, row, row, width=SIZE)
            best = int(MODEL.logits(params, ids.tokens, ids.length)[0, len(row) - 1].argmax())
            is_last = place == MOST - 1
            assert token == (best if best in STOPS or not is_last else STOPS[0])
            row.append(token)
        assert len(text) == MOST or text[-1] in STOPS
    np.testing.assert_array_equal(after.cached, after.length - 1)
    np.testing.assert_array_equal(said.forwards, said.length)


def test_recorded_logprobs_are_those_of_the_finished_rows(params, context):
    said, after = write(MODEL.step, rule(1.0), params, keys_of(3), context, jnp.ones(3, bool))
    rows = [p + t for p, t in zip(PROMPTS, texts(said), strict=True)]
    expected = np.asarray(full_logprobs(params, rows))
    for row, (prompt, text) in enumerate(zip(PROMPTS, texts(said), strict=True)):
        assert np.asarray(after.tokens[row, : len(rows[row])]).tolist() == rows[row]
        chosen = len(text) - (not bool(said.stopped[row]))
        np.testing.assert_array_equal(said.sampled[row], np.arange(MOST) < chosen)
        want = expected[row, len(prompt) : len(prompt) + chosen]
        np.testing.assert_allclose(said.logprobs[row, :chosen], want, atol=1e-3)
        assert not np.asarray(said.logprobs[row, chosen:]).any()
        np.testing.assert_array_equal(said.order[row, : len(text)], 1 + np.arange(len(text)))


def test_a_row_does_not_depend_on_its_batch_mates_and_idle_rows_say_nothing(params, context):
    everyone, some = jnp.ones(3, bool), jnp.array([True, False, True])
    first, _ = write(MODEL.step, rule(1.0), params, keys_of(3), context, everyone)
    second, after = write(MODEL.step, rule(1.0), params, keys_of(3), context, some)
    assert texts(second) == [texts(first)[0], [], texts(first)[2]]
    other, _ = write(MODEL.step, rule(1.0), params, keys_of(3, 8), context, everyone)
    assert texts(first) != texts(other)
    np.testing.assert_array_equal(after.tokens[1], context.tokens[1])
    np.testing.assert_array_equal(after.cache.key[:, 1], context.cache.key[:, 1])
    assert int(after.length[1]) == int(context.length[1])
    for name in ("stopped", "forwards", "sampled", "tokens", "logprobs", "order"):
        assert not np.asarray(getattr(second, name))[1].any(), name


def test_a_later_message_continues_the_cache(params, context):
    said, after = write(MODEL.step, rule(0.0), params, keys_of(3), context, jnp.ones(3, bool))
    heard = [[8, 9], [7], [6, 5, 9]]
    after = MODEL.read(params, after, message(*heard, width=5))
    again, _ = write(MODEL.step, rule(0.0), params, keys_of(3), after, jnp.ones(3, bool))
    rows = [p + t + h for p, t, h in zip(PROMPTS, texts(said), heard, strict=True)]
    ids = message(*rows, width=SIZE)
    logits = MODEL.logits(params, ids.tokens, ids.length)
    best = [int(logits[row, len(ids) - 1].argmax()) for row, ids in enumerate(rows)]
    assert [text[0] for text in texts(again)] == best


def test_a_repetition_penalty_counts_all_that_was_read_and_said(params, context):
    filters, plain = sampling.Filters(repetition_penalty=1.7), dict(rule(0.0))
    options = tuple((plain | {"filters": filters}).items())
    said, _ = write(MODEL.step, options, params, keys_of(3), context, jnp.ones(3, bool))
    for number, (prompt, text) in enumerate(zip(PROMPTS, texts(said), strict=True)):
        row = list(prompt)
        for place, token in enumerate(text[:-1]):
            ids = message(row, row, row, width=SIZE)
            logits = MODEL.logits(params, ids.tokens, ids.length)[0, len(row) - 1]
            seen = jnp.asarray([row])
            judged = sampling.repetition_penalty(logits[None], seen, 1.7)[0]
            assert token == int(judged.argmax())
            logprob = jax.nn.log_softmax(logits)[token]
            np.testing.assert_allclose(said.logprobs[number, place], logprob, atol=1e-3)
            row.append(token)
    plainly, _ = write(MODEL.step, rule(0.0), params, keys_of(3), context, jnp.ones(3, bool))
    assert texts(said) != texts(plainly)


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p"])
def test_a_filter_that_leaves_one_token_is_greedy_and_keeps_the_logprobs(params, context, name):
    tight = {"top_k": 1, "top_p": 1e-6, "min_p": 1.0}[name]
    options = (*rule(1.0), ("filters", sampling.Filters(**{name: tight})))
    said, _ = write(MODEL.step, options, params, keys_of(3), context, jnp.ones(3, bool))
    greedy, _ = write(MODEL.step, rule(0.0), params, keys_of(3), context, jnp.ones(3, bool))
    assert texts(said) == texts(greedy)
    np.testing.assert_allclose(said.logprobs, greedy.logprobs, atol=1e-6)


def scripted(params, tokens_B1, positions_B1, live_B1, cache, cached_B):
    """Wants to say `params[row, position + 1]`; needs no cache."""
    del live_B1, cache, cached_B
    want_B1 = jnp.take_along_axis(params, positions_B1 + 1, axis=1)
    empty = jnp.zeros((2, tokens_B1.shape[0], 2, 1, 4))
    return 20.0 * jax.nn.one_hot(want_B1, 23), Cache(empty, empty)


def test_the_last_place_is_a_stop_the_models_own_or_a_forced_one(context):
    script = np.full((3, SIZE + 1), 9)
    script[0, 4 + 2] = 4  # stops at its third token
    script[1, 2 + 6] = 4  # stops by itself at the last place
    arguments = (jnp.asarray(script), keys_of(3), context, jnp.ones(3, bool))
    said, _ = write(scripted, rule(0.0), *arguments)
    assert texts(said) == [[9, 9, 4], [9] * 6 + [4], [9] * 6 + [3]]
    np.testing.assert_array_equal(said.stopped, [True, True, False])
    np.testing.assert_array_equal(said.sampled.sum(1), [3, 7, 6])


def test_a_full_context_ends_a_row(context):
    script = jnp.full((3, SIZE + 1), 9)
    near = context.replace(length=jnp.array([SIZE - 2, SIZE, SIZE - 1]))
    said, after = write(scripted, rule(0.0), script, keys_of(3), near, jnp.ones(3, bool))
    assert texts(said) == [[9, 3], [], [3]]
    np.testing.assert_array_equal(after.length, SIZE)
    assert not np.asarray(said.stopped).any()


def test_an_empty_context_says_nothing(context):
    script = jnp.full((3, SIZE + 1), 9)
    blank = context.replace(length=jnp.array([0, 2, 0]))
    said, _ = write(scripted, rule(0.0), script, keys_of(3), blank, jnp.ones(3, bool))
    np.testing.assert_array_equal(said.length, [0, 7, 0])
