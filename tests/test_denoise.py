"""Parallel unmasking against a slow decoder in plain Python: one row, no cache, from the spec."""

import collections
import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import TinyModel, message, script_of, scripted, sharp_params, texts

from mdlm_jax import context as ctx
from mdlm_jax.diffusion import denoise
from mdlm_jax.structs import CacheShape

MASK, PAD = 22, 0
SIZE = 32  # places of a context
PLAN = denoise.Plan(
    strategy="low_confidence_dynamic",
    block=4,
    steps=4,
    threshold=0.6,
    temperature=0.0,
    max_tokens=11,
    stop_ids=(2, 3),
    mask_id=MASK,
    pad_id=PAD,
)
PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12, 13], [14, 15, 16], [17, 18, 19, 20, 5, 7, 9]]


# ---- the slow decoder ----------------------------------------------------------------------------


def reference(logits_fn, prompt: list[int], plan: denoise.Plan, size: int = SIZE) -> dict:
    """One answer by the loop of sdar.md 5. `logits_fn(ids)` reads whole rows, without a cache."""
    block, context = plan.block, list(prompt)
    limit = min(len(prompt) + plan.max_tokens, size // block * block)
    forwards = commits = 0
    stop, order, logprobs = None, {}, {}
    start = len(prompt) // block * block
    while stop is None and start < limit:
        # Places that an answer may not reach are padding from the start.
        ids = [context[p] if p < len(context) else PAD for p in range(start, start + block)]
        open_places = [p for p in range(len(prompt), limit) if start <= p < start + block]
        step = 0
        while open_places and stop is None:
            for place in open_places:
                ids[place - start] = plan.mask_id
            logits = np.array(logits_fn(context[:start] + ids)[start:], np.float64)
            logprob = logits - np.log(np.exp(logits).sum(1, keepdims=True))
            logits[:, plan.mask_id] = -np.inf  # never chosen; its probability is doubt all the same
            chosen = logits.argmax(1)
            sure = logprob[range(block), chosen]
            k = max(1, block // plan.steps + (step < block % plan.steps))
            forwards, step = forwards + 1, step + 1
            for place in pick(plan, logprob, sure, open_places, start, k):
                ids[place - start] = int(chosen[place - start])
                order[place], logprobs[place] = forwards, sure[place - start]
                open_places.remove(place)
            # A stop token ends the answer as soon as nothing before it is open.
            for place in range(max(start, len(prompt)), min([*open_places, limit, start + block])):
                if ids[place - start] in plan.stop_ids:
                    stop = place
                    ids[place - start + 1 :] = [PAD] * (start + block - place - 1)
                    break
        context, start, commits = context[:start] + ids, start + block, commits + 1
    end = limit if stop is None else stop + 1
    places = range(len(prompt), max(end, len(prompt)))
    return {
        "tokens": [context[p] for p in places],
        "order": [order[p] for p in places],
        "logprobs": [logprobs[p] for p in places],
        "stopped": stop is not None,
        "forwards": forwards,
        "commits": commits,
        "context": context,
    }


def pick(plan, logprob, sure, open_places: list[int], start: int, k: int) -> list[int]:
    """The places that the plan's strategy settles now."""
    sure = {p: np.exp(sure[p - start]) for p in open_places}
    by_confidence = sorted(open_places, key=lambda p: -sure[p])
    if plan.strategy == "sequential":
        return sorted(open_places)[:k]
    if plan.strategy == "low_confidence_static":
        return by_confidence[:k]
    if plan.strategy == "low_confidence_dynamic":
        above = [p for p in open_places if sure[p] > plan.threshold]
        return above if len(above) >= k else by_confidence[:k]
    entropy = {
        p: -sum(np.exp(q) * q for q in logprob[p - start] if np.isfinite(q)) for p in open_places
    }
    by_entropy = sorted(open_places, key=entropy.__getitem__)
    sums = np.cumsum([entropy[p] for p in by_entropy])
    return by_entropy[: max(1, int((sums < plan.threshold).sum()))]


# ---- the fast one --------------------------------------------------------------------------------


@partial(jax.jit, static_argnums=(0, 1))
def write(step_fn, plan, params, keys, context, active):
    return denoise.generate(step_fn, params, keys, context, active, plan=plan)


@pytest.fixture(scope="module")
def params():
    return sharp_params(11)


def keys_of(rows: int, seed: int = 0):
    return jax.random.split(jax.random.key(seed), rows)


def full_logits(model, params, ids: list[int]) -> np.ndarray:
    """Logits of a row that is read at once, padded so that nothing is compiled twice."""
    tokens = jnp.asarray([ids + [1] * (SIZE - len(ids))], jnp.int32)
    return np.asarray(model.logits(params, tokens, jnp.array([len(ids)])))[0, : len(ids)]


def check_rows(said, context, expected: list[dict]) -> None:
    """Every field of a generation, and the context behind it, against the slow decoder."""
    assert texts(said) == [e["tokens"] for e in expected]
    for row, want in enumerate(expected):
        n = len(want["tokens"])
        np.testing.assert_array_equal(said.order[row, :n], want["order"])
        np.testing.assert_allclose(said.logprobs[row, :n], want["logprobs"], atol=1e-3)
        np.testing.assert_array_equal(said.sampled[row], np.arange(said.sampled.shape[1]) < n)
        for beyond in (said.tokens, said.order, said.logprobs):
            assert not np.asarray(beyond[row, n:]).any()
        end = int(context.length[row])
        assert np.asarray(context.tokens[row, :end]).tolist() == want["context"]
    for name in ("stopped", "forwards", "commits"):
        np.testing.assert_array_equal(getattr(said, name), [e[name] for e in expected])
    np.testing.assert_array_equal(context.cached, context.length)


@pytest.mark.parametrize(
    ("strategy", "block", "steps", "threshold"),
    [
        ("low_confidence_static", 4, 2, 0.0),
        ("low_confidence_dynamic", 8, 3, 0.45),
        ("sequential", 4, 3, 0.0),
        ("entropy_bounded", 8, 8, 1.5),
    ],
)
def test_two_turns_equal_the_slow_decoder_row_by_row(params, strategy, block, steps, threshold):
    plan = dataclasses.replace(
        PLAN, strategy=strategy, block=block, steps=steps, threshold=threshold, stop_ids=(4, 14)
    )
    model, active = TinyModel(block), jnp.ones(4, bool)
    logits_fn = partial(full_logits, model, params)
    context = model.read(params, model.memory(4, SIZE), message(*PROMPTS, width=7))
    said, context = write(model.step, plan, params, keys_of(4), context, active)
    first = [reference(logits_fn, prompt, plan) for prompt in PROMPTS]
    check_rows(said, context, first)
    heard = [[6, 4], [8, 4], [9, 10, 11, 4], [4]]
    context = model.read(params, context, message(*heard, width=7))
    said, context = write(model.step, plan, params, keys_of(4, 1), context, active)
    prompts = [f["context"] + h for f, h in zip(first, heard, strict=True)]
    check_rows(said, context, [reference(logits_fn, prompt, plan) for prompt in prompts])
    assert MASK not in np.asarray(said.tokens)


def test_at_temperature_1_a_row_depends_on_its_own_key_only(params):
    plan, model = dataclasses.replace(PLAN, temperature=1.0), TinyModel(4)
    context = model.read(params, model.memory(4, SIZE), message(*PROMPTS, width=7))
    keys, everyone = keys_of(4), jnp.ones(4, bool)
    said, _ = write(model.step, plan, params, keys, context, everyone)
    other, _ = write(model.step, plan, params, keys_of(4, 9), context, everyone)
    assert texts(said) != texts(other)
    turned = jnp.array([2, 0, 3, 1])
    prompts = message(*[PROMPTS[i] for i in turned], width=7)
    context = model.read(params, model.memory(4, SIZE), prompts)
    alone = jnp.array([True, False, False, True])
    again, after = write(model.step, plan, params, keys[turned], context, alone)
    assert texts(again) == [texts(said)[2], [], [], texts(said)[1]]
    np.testing.assert_array_equal(after.length[1:3], context.length[1:3])
    np.testing.assert_array_equal(after.tokens[1:3], context.tokens[1:3])
    np.testing.assert_array_equal(after.cache.key[:, 1:3], context.cache.key[:, 1:3])
    for name in ("forwards", "commits", "stopped", "order", "logprobs", "sampled"):
        assert not np.asarray(getattr(again, name))[1:3].any(), name


# ---- a scripted model: what it wants to say, and how sure it is, place by place ------------------


SCRIPT_PLAN = dataclasses.replace(PLAN, mask_id=11, max_tokens=8, steps=4, threshold=0.9)


def play(scripts: list[list[int]], prompts: list[list[int]], plan=SCRIPT_PLAN, sure=None, size=16):
    """What scripted rows write, and the context after it."""
    rows = len(scripts)
    script = script_of(scripts, prompts, rows=ROWS)
    certain = np.full((ROWS, 32), 20.0, np.float32)
    if sure is not None:
        certain[:rows] = sure
    heard = message(*prompts, *[[9]] * (ROWS - rows), width=9)
    said, tokens, length = write_script(plan, size, {"script": script, "sure": certain}, heard)
    return jax.tree.map(lambda x: np.asarray(x)[:rows], (said, After(tokens, length)))


After = collections.namedtuple("After", "tokens length")
ROWS = 3  # of every scripted batch, so that one program serves them all


@partial(jax.jit, static_argnums=(0, 1))
def write_script(plan, size, params, heard):
    context = ctx.append(ctx.empty(ROWS, size, CacheShape(1, 1, 1), jnp.float32), heard)
    context = context.replace(cached=context.length // plan.block * plan.block)
    keys, active = jax.random.split(jax.random.key(0), ROWS), jnp.ones(ROWS, bool)
    said, after = denoise.generate(scripted, params, keys, context, active, plan=plan)
    return said, after.tokens, after.length


def test_a_stop_is_found_in_the_middle_and_at_the_last_place_of_a_block():
    said, context = play([[5, 2, 6, 6], [5, 6, 8, 3], [5, 6, 8, 9, 2]], [[9] * 4] * 3)
    assert texts(said) == [[5, 2], [5, 6, 8, 3], [5, 6, 8, 9, 2]]
    assert np.asarray(said.stopped).all()
    np.testing.assert_array_equal(context.length, [8, 8, 12])
    np.testing.assert_array_equal(context.tokens[0, 4:8], [5, 2, PAD, PAD])
    np.testing.assert_array_equal(said.commits, [1, 1, 2])


def test_a_stop_id_in_the_prompts_last_block_does_not_stop():
    said, _ = play([[5, 6, 2], [5, 2]], [[9, 9, 9, 9, 2, 3], [9, 9, 2]])
    assert texts(said) == [[5, 6, 2], [5, 2]]


def test_the_prompt_never_changes_even_where_it_holds_the_mask_id():
    said, context = play([[5, 6, 2], [8, 8, 2]], [[9, 11, 9, 9, 11, 11], [11, 11, 11]])
    assert texts(said) == [[5, 6, 2], [8, 8, 2]]
    np.testing.assert_array_equal(context.tokens[0, :6], [9, 11, 9, 9, 11, 11])
    np.testing.assert_array_equal(context.tokens[1, :3], [11, 11, 11])


def test_padding_may_be_a_stop_id():
    plan = dataclasses.replace(SCRIPT_PLAN, stop_ids=(2, PAD), max_tokens=5)
    said, context = play(
        [[5, 0, 6], [5, 6, 8, 9, 7], [4, 2]], [[9, 9, 9, 9, 9], [9] * 4, [9]], plan
    )
    assert texts(said) == [[5, 0], [5, 6, 8, 9, 7], [4, 2]]
    np.testing.assert_array_equal(said.stopped, [True, False, True])
    np.testing.assert_array_equal(context.length, [8, 12, 4])


def test_without_a_stop_a_row_ends_at_its_limit_unstopped():
    plan = dataclasses.replace(
        SCRIPT_PLAN, max_tokens=6
    )  # from places 4, 5, 7: none is a whole block
    said, context = play([[5] * 9] * 3, [[9] * 4, [9] * 5, [9] * 7], plan)
    assert texts(said) == [[5] * 6] * 3
    assert not np.asarray(said.stopped).any()
    np.testing.assert_array_equal(context.length, [12, 12, 16])
    np.testing.assert_array_equal(context.tokens[0, 10:12], [PAD, PAD])


def test_a_stop_behind_the_limit_does_not_count():
    plan = dataclasses.replace(SCRIPT_PLAN, max_tokens=2)
    said, _ = play([[5, 6, 2], [5, 2, 6]], [[9] * 4, [9] * 4], plan)
    assert texts(said) == [[5, 6], [5, 2]]
    np.testing.assert_array_equal(said.stopped, [False, True])


def test_only_whole_blocks_of_the_context_are_written():
    said, context = play([[5] * 9] * 3, [[9] * 7, [9] * 8, [9] * 3], size=11)
    assert texts(said) == [[5], [], [5] * 5]
    assert not np.asarray(said.stopped).any()
    np.testing.assert_array_equal(context.length, [8, 8, 8])
    np.testing.assert_array_equal(said.forwards[1], 0)


def test_tokens_behind_a_stop_are_dropped_whenever_they_were_chosen():
    sure = np.full((2, 32), 20.0, np.float32)
    sure[0, 4] = 1.0  # the token before the stop is chosen last
    sure[1, 6] = 1.0  # a place behind the stop is never needed
    said, context = play([[5, 2, 6, 8], [5, 2, 6, 8]], [[9] * 4] * 2, sure=sure)
    assert texts(said) == [[5, 2], [5, 2]]
    np.testing.assert_array_equal(context.tokens[:, 6:8], PAD)
    np.testing.assert_array_equal(said.order[:, :2], [[2, 1], [1, 1]])
    np.testing.assert_array_equal(said.forwards, [2, 1])


def test_a_settled_token_never_changes_and_rows_finish_on_their_own():
    plan = dataclasses.replace(SCRIPT_PLAN, strategy="low_confidence_static", steps=2)
    said, _ = play([[5, 6, 8, 9, 4, 2], [8, 2]], [[9] * 4, [9] * 6], plan)
    assert texts(said) == [[5, 6, 8, 9, 4, 2], [8, 2]]
    np.testing.assert_array_equal(said.order[0, :6], [1, 1, 2, 2, 3, 3])
    np.testing.assert_array_equal(said.forwards, [3, 1])
    np.testing.assert_array_equal(said.commits, [2, 1])


def test_the_mask_id_is_never_chosen_even_if_the_model_wants_it():
    said, _ = play([[11, 11, 2], [5, 11, 2]], [[9] * 4, [9] * 5])
    assert 11 not in np.asarray(said.tokens)
    assert np.asarray(said.stopped).all()


def test_a_diverged_model_still_comes_to_an_end():
    sure = np.full((2, 32), np.nan, np.float32)
    said, _ = play([[5], [5]], [[9] * 4, [9] * 6], sure=sure)
    np.testing.assert_array_equal(said.length, [8, 8])
