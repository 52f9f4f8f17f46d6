"""Streaming decoding against a slow decoder in plain Python: one row, no cache, from the spec."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import (
    SlotCausal,
    TinyModel,
    message,
    rule_memory,
    script_of,
    scripted,
    sharp_params,
    texts,
)

from mdlm_jax import context as ctx
from mdlm_jax.autoregressive import decode
from mdlm_jax.diffusion import stream
from mdlm_jax.train import mesh

MASK, SIZE = 22, 40
MODEL = SlotCausal()
PROMPTS = [[5, 6, 7, 8], [9, 10], [14, 15, 16, 4, 3, 2, 11]]
PLAN = stream.Plan(
    window=5,
    max_tokens=11,
    mask_id=MASK,
    threshold=1.0,
    penalty=0.05,
    stop_ids=(3, 4),
    stop_sequences=((9, 9), (2, 11, 17)),
)


# ---- the slow decoder ----------------------------------------------------------------------------


def reference(logits_fn, prompt: list[int], plan: stream.Plan, size: int = SIZE) -> dict:
    """One answer by the loop of wedlm.md 4. `logits_fn(ids, positions)` is causal by slot."""
    text, answer, order, logprobs = list(prompt), [], {}, {}
    limit = min(plan.max_tokens, size - len(prompt))
    window = [None] * min(plan.window, size - len(prompt))  # None is a mask
    forwards, fed, finished, stopped = 0, 0, limit == 0, False
    while not finished:
        forwards += 1
        leading = next((i for i, token in enumerate(window) if token is None), len(window))
        room = size - len(text) - len(window)
        window = window + [None] * min(leading, room)
        fed += len(window)
        slots = [i for i, t in enumerate(window) if t is not None]
        masks = [i for i, t in enumerate(window) if t is None]
        ids = text + [window[i] for i in slots] + [plan.mask_id] * len(masks)
        places = list(range(len(text))) + [len(text) + i for i in slots + masks]
        logits = logits_fn(ids, places)[len(text) + len(slots) :]
        begin = len(text)
        for token in window[:leading]:
            text, answer = [*text, token], [*answer, token]
            sequences = [*plan.stop_sequences, *((stop,) for stop in plan.stop_ids)]
            stopped = any(tuple(text[-len(s) :]) == tuple(s) for s in sequences)
            finished = stopped or len(answer) == limit
            if finished:
                break
        window = window[leading:]
        if finished or not masks:
            continue
        logprob = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        entropy = -(np.exp(logprob) * logprob).sum(1)
        cost = [h + plan.penalty * (m - masks[0]) for h, m in zip(entropy, masks, strict=True)]
        sure = [j for j, c in enumerate(cost) if plan.threshold is not None and c < plan.threshold]
        for j in sure or [int(np.argmin(cost))]:
            token = int(logprob[j].argmax())
            window[masks[j] - leading] = token
            order[begin + masks[j]], logprobs[begin + masks[j]] = forwards, logprob[j, token]
    places = range(len(prompt), len(text))
    return {
        "tokens": answer,
        "order": [order[p] for p in places],
        "logprobs": [logprobs[p] for p in places],
        "stopped": stopped,
        "forwards": forwards,
        "fed": fed,
    }


# ---- the fast one --------------------------------------------------------------------------------


@partial(jax.jit, static_argnums=0)
def write(step_fn, params, keys, context, active, plan):
    return stream.generate(step_fn, params, keys, context, active, plan=plan)


@pytest.fixture(scope="module")
def params():
    return sharp_params(11)


def keys_of(rows: int, seed: int = 0):
    return jax.random.split(jax.random.key(seed), rows)


def context_of(params, prompts=PROMPTS, size: int = SIZE):
    return MODEL.read(params, MODEL.memory(len(prompts), size), message(*prompts, width=7))


@jax.jit
def row_logits(params, tokens_1L, positions_1L, length_1):
    live_1L = jnp.arange(tokens_1L.shape[1]) < length_1
    return MODEL.step(params, tokens_1L, positions_1L, live_1L[None])[0][0]


def logits_of(params, ids: list[int], places: list[int]) -> np.ndarray:
    """Logits of a row that is read at once, padded so that nothing is compiled twice."""
    pad = [0] * (SIZE + 8 - len(ids))
    row = lambda values: jnp.asarray([values + pad], jnp.int32)  # noqa: E731
    logits = row_logits(params, row(ids), row(places), jnp.asarray([len(ids)]))
    return np.asarray(logits, np.float64)[: len(ids)]


def check_rows(said, after, prompts, expected: list[dict]) -> None:
    """Every field of a generation, and the context behind it, against the slow decoder."""
    assert texts(said) == [e["tokens"] for e in expected]
    for row, want in enumerate(expected):
        n, width = len(want["tokens"]), said.tokens.shape[1]
        np.testing.assert_array_equal(said.order[row, :n], want["order"])
        np.testing.assert_allclose(said.logprobs[row, :n], want["logprobs"], atol=1e-3)
        np.testing.assert_array_equal(said.sampled[row], np.arange(width) < n)
        for beyond in (said.tokens, said.order, said.logprobs):
            assert not np.asarray(beyond[row, n:]).any()
        end = len(prompts[row]) + n
        assert np.asarray(after.tokens[row, :end]).tolist() == prompts[row] + want["tokens"]
        assert int(after.length[row]) == int(after.cached[row]) == end
    for name in ("stopped", "forwards", "fed"):
        np.testing.assert_array_equal(getattr(said, name), [e[name] for e in expected])
    assert not np.asarray(said.commits).any()


@pytest.mark.parametrize(
    ("threshold", "penalty", "changes"),
    [
        (1.0, 0.05, {}),
        (None, 0.02, {}),
        (0.8, 0.1, {"window": 1}),
    ],
)
def test_ragged_rows_equal_the_slow_decoder(params, threshold, penalty, changes):
    plan = PLAN.replace(threshold=threshold, penalty=penalty, **changes)
    context = context_of(params)
    said, after = write(MODEL.step, params, keys_of(3), context, jnp.ones(3, bool), plan)
    logits_fn = partial(logits_of, params)
    check_rows(said, after, PROMPTS, [reference(logits_fn, prompt, plan) for prompt in PROMPTS])


@pytest.mark.parametrize("size", [7, 10])
def test_the_windows_end_is_the_contexts_end(params, size):
    """WeDLM#4, WeDLM#22: a budget beyond the memory hung, and a prompt that fills it crashed."""
    plan = PLAN.replace(stop_ids=(), stop_sequences=(), threshold=2.0)
    context = context_of(params, size=size)
    said, after = write(MODEL.step, params, keys_of(3), context, jnp.ones(3, bool), plan)
    logits_fn = partial(logits_of, params)
    # The last prompt leaves no place at all in a context of 7.
    expected = [reference(logits_fn, prompt, plan, size) for prompt in PROMPTS]
    check_rows(said, after, PROMPTS, expected)
    np.testing.assert_array_equal(after.length, np.minimum([4 + 11, 2 + 11, 7 + 11], size))
    assert not np.asarray(said.stopped).any()


def test_a_row_depends_on_its_own_key_only_and_idle_rows_say_nothing(params):
    plan, context = PLAN.replace(temperature=1.0), context_of(params)
    everyone = jnp.ones(3, bool)
    said, _ = write(MODEL.step, params, keys_of(3), context, everyone, plan)
    other, _ = write(MODEL.step, params, keys_of(3, 9), context, everyone, plan)
    assert texts(said) != texts(other)
    turned, some = jnp.array([2, 0, 1]), jnp.array([True, False, True])
    context = context_of(params, [PROMPTS[i] for i in turned])
    again, after = write(MODEL.step, params, keys_of(3)[turned], context, some, plan)
    assert texts(again) == [texts(said)[2], [], texts(said)[1]]
    for old, new in zip(jax.tree.leaves(context), jax.tree.leaves(after), strict=True):
        row = (slice(None), 1) if old.ndim == 5 else 1
        np.testing.assert_array_equal(old[row], new[row])
    for name in ("forwards", "fed", "stopped", "order", "logprobs", "sampled"):
        assert not np.asarray(getattr(again, name))[1].any(), name


def test_numbers_may_differ_by_row_and_another_number_compiles_nothing(params):
    context, everyone = context_of(params), jnp.ones(3, bool)
    by_row = PLAN.replace(
        threshold=jnp.array([0.5, 1.0, 2.0]),
        penalty=jnp.array([0.0, 0.05, 0.1]),
        temperature=jnp.array([0.0, 0.0, 1.0]),
        budget=jnp.array([11, 3, 8]),
        stop_ids=(jnp.array([3, -1, 4]),),
        stop_sequences=((jnp.array([9, 9, -1]), jnp.array([9, 8, -1])),),
    )
    together, _ = write(MODEL.step, params, keys_of(3), context, everyone, by_row)
    compiled = None
    for row in range(3):
        mine = jax.tree.map(lambda x, row=row: x[row], by_row)
        alone, _ = write(MODEL.step, params, keys_of(3), context, everyone, mine)
        assert texts(alone)[row] == texts(together)[row]
        compiled = compiled or write._cache_size()
    assert write._cache_size() == compiled


def test_eight_devices_give_what_one_gives(params):
    plan, prompts = PLAN.replace(temperature=1.0), (PROMPTS * 3)[:8]
    one, _ = write(
        MODEL.step, params, keys_of(8), context_of(params, prompts), jnp.ones(8, bool), plan
    )
    on = mesh.make(data=4, fsdp=2, tensor=1)
    by_rank = lambda x: mesh.row_axis(on, 1 if x.ndim == 5 else 0)  # noqa: E731
    context = context_of(params, prompts)
    with jax.set_mesh(on):
        eight, after = write(
            MODEL.step,
            jax.device_put(params, mesh.replicated(on)),
            jax.device_put(keys_of(8), mesh.rows(on)),
            jax.device_put(context, jax.tree.map(by_rank, context)),
            jax.device_put(jnp.ones(8, bool), mesh.rows(on)),
            plan,
        )
    assert len(after.cache.key.sharding.device_set) == 8
    assert texts(eight) == texts(one)
    np.testing.assert_array_equal(eight.order, one.order)


def test_the_cache_is_an_autoregressive_one(params):
    """What was committed may be continued by either decoder, or read on (wedlm.md 4)."""
    context = context_of(params)
    said, after = write(MODEL.step, params, keys_of(3), context, jnp.ones(3, bool), PLAN)
    heard = [[8, 9], [7], [6, 5, 9]]
    after = MODEL.read(params, after, message(*heard, width=7))
    rows = [p + t + h for p, t, h in zip(PROMPTS, texts(said), heard, strict=True)]
    ids = message(*rows, width=SIZE)
    logits = MODEL.logits(params, ids.tokens, ids.length)
    best = [int(logits[row, len(ids) - 1].argmax()) for row, ids in enumerate(rows)]
    # The last token is fed again, as a decoder of single tokens does.
    pending = after.replace(cached=after.length - 1)
    step = TinyModel(1).step
    rule = {"temperature": 0.0, "max_tokens": 2, "stop_ids": (3,)}
    run = jax.jit(lambda *arguments: decode.generate(step, *arguments, **rule))
    word, _ = run(params, keys_of(3), pending, jnp.ones(3, bool))
    assert [text[0] for text in texts(word)] == best


# ---- a scripted model: what it wants to say, and how sure it is, place by place ------------------


def play(scripts, prompts, plan, sure=None):
    """What scripted rows write, and the tokens of their contexts."""
    rows = len(scripts)
    certain = np.full((rows, 32), 20.0, np.float32) if sure is None else sure
    context = ctx.append(rule_memory(rows, 32), message(*prompts, width=9))
    context = context.replace(cached=context.length)
    params = {"script": jnp.asarray(script_of(scripts, prompts)), "sure": jnp.asarray(certain)}
    said, after = write(scripted, params, keys_of(rows), context, jnp.ones(rows, bool), plan)
    return said, np.asarray(after.tokens)


SCRIPT_PLAN = PLAN.replace(
    mask_id=11, window=4, max_tokens=8, stop_ids=(2, 3), stop_sequences=((9, 5), (6, 6, 8))
)


def test_stops_cut_an_answer_wherever_they_stand():
    prompts = [[9] * 3, [1, 2, 6, 6], [9, 5, 9]]
    scripts = [[4, 4, 2, 3, 4], [8, 4, 4], [4, 9, 5, 2]]
    said, _ = play(scripts, prompts, SCRIPT_PLAN)
    assert texts(said) == [[4, 4, 2], [8], [4, 9, 5]]
    assert np.asarray(said.stopped).all()


def test_a_stop_at_the_last_token_counts_and_one_behind_it_does_not():
    scripts = [[4] * 7 + [2], [4] * 8 + [2], [4] * 9]
    said, _ = play(scripts, [[1], [1, 1], [1]], SCRIPT_PLAN)
    assert texts(said) == [[4] * 7 + [2], [4] * 8, [4] * 8]
    np.testing.assert_array_equal(said.stopped, [True, False, False])


def test_the_last_pass_counts_although_it_only_commits():
    """The engine's own count misses it (wedlm.md 5, metric bug)."""
    said, _ = play([[4, 2], [4] * 8], [[1], [1]], SCRIPT_PLAN)
    np.testing.assert_array_equal(said.forwards, [2, 3])
    np.testing.assert_array_equal(said.fed, [4 + 8, 4 + 8 + 8])
    one_by_one = SCRIPT_PLAN.replace(threshold=None)
    said, _ = play([[4, 2], [4] * 8], [[1], [1]], one_by_one)
    np.testing.assert_array_equal(said.forwards, [3, 9])


def slots_of(positions: list[list[int]], masked: list[list[int]]) -> stream.Slots:
    masked = jnp.asarray(masked, bool)
    return stream.Slots(
        tokens=None, positions=jnp.asarray(positions), live=None, masked=masked, leading=None
    )


@pytest.mark.parametrize(
    ("threshold", "picked"),
    [
        (2.0, [[0, 1, 1, 0], [1, 0, 1, 0]]),  # strictly below: 1.0 + 4 * 0.25 is not
        (2.25, [[0, 1, 1, 1], [1, 1, 1, 0]]),
        (0.5, [[0, 1, 0, 0], [0, 0, 1, 0]]),  # none is: the first of the lowest
        (None, [[0, 1, 0, 0], [0, 0, 1, 0]]),
    ],
)
def test_the_threshold_is_strict_and_the_penalty_counts_places(threshold, picked):
    # Costs: [-, 1.0, 1.0, 2.0] and [1.5, 2.0, 1.0, -].
    slots = slots_of([[3, 4, 6, 8], [5, 7, 9, 9]], [[0, 1, 1, 1], [1, 1, 1, 0]])
    entropy = jnp.array([[0.0, 1.0, 0.5, 1.0], [1.5, 1.5, 0.0, 0.0]])
    plan = PLAN.replace(penalty=0.25, threshold=threshold)
    np.testing.assert_array_equal(stream.pick(entropy, slots, plan), np.asarray(picked, bool))


def test_the_mask_id_is_a_token_like_any_other_unless_it_is_forbidden():
    scripts, prompts = [[11, 4, 2], [4, 11, 2]], [[11, 1], [1]]
    said, _ = play(scripts, prompts, SCRIPT_PLAN)
    assert texts(said) == scripts
    said, tokens = play(scripts, prompts, SCRIPT_PLAN.replace(forbid_mask=True))
    assert 11 not in np.asarray(said.tokens)
    np.testing.assert_array_equal(tokens[0, :2], [11, 1])


def test_top_k_and_top_p_look_at_the_raw_logits():
    """At T = 4 a nucleus of the tempered distribution would hold more than one token."""
    sure = np.full((2, 32), 6.0, np.float32)
    plan = SCRIPT_PLAN.replace(temperature=4.0, top_p=0.9)
    said, _ = play([[4] * 8, [5] * 8], [[1], [1]], plan, sure=sure)
    assert texts(said) == [[4] * 8, [5] * 8]
    said, _ = play([[4] * 8, [5] * 8], [[1], [1]], plan.replace(top_p=1.0), sure=sure)
    assert texts(said) != [[4] * 8, [5] * 8]


def test_a_diverged_model_still_comes_to_an_end():
    nan = np.full((2, 32), np.nan, np.float32)
    plan = SCRIPT_PLAN.replace(stop_ids=(), stop_sequences=())
    said, _ = play([[5], [5]], [[9] * 4, [9] * 6], plan, nan)
    np.testing.assert_array_equal(said.length, [8, 8])
