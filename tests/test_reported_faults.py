"""Faults of decoding that users of the public code reported (specs/sdar.md 9, specs/wedlm.md 6).

The number is that of the spec's list. What concerns weights, training or other models is tested
elsewhere; WeDLM's are in test_stream.py.
"""

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
from mdlm_jax.diffusion import denoise, strategies
from mdlm_jax.train import mesh

MASK, PAD, SIZE = 22, 0, 48
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
ENGINE = PLAN.replace(**strategies.PRESETS["opencompass"])


@partial(jax.jit, static_argnums=0)
def write(step_fn, params, keys, context, active, plan):
    return denoise.generate(step_fn, params, keys, context, active, plan=plan)


@pytest.fixture(scope="module")
def params():
    return sharp_params(11)


def keys_of(rows: int, seed: int = 0):
    return jax.random.split(jax.random.key(seed), rows)


# One object for each: the methods of equal ones are not equal, and would be compiled again.
MODELS = {block: TinyModel(block) for block in (4, 8, 16)}
SLOTS = SlotCausal()


def answer(params, plan, prompts=PROMPTS, model=None, keys=None) -> tuple:
    model, rows = model or MODELS[plan.block], len(prompts)
    heard = message(*prompts, width=12)
    context = model.read(params, model.memory(rows, SIZE), heard)
    keys = keys_of(rows) if keys is None else keys
    return write(model.step, params, keys, context, jnp.ones(rows, bool), plan)


# ---- a scripted model: what it wants to say, and how sure it is, place by place ------------------


def play(scripts, prompts, plan, sure=None):
    """What scripted rows write, and their contexts' tokens and lengths."""
    rows = len(scripts)
    certain = np.full((rows, 32), 20.0, np.float32) if sure is None else sure
    context = ctx.append(rule_memory(rows, 24), message(*prompts, width=10))
    cached = context.length if plan.causal else context.length // plan.block * plan.block
    params = {"script": jnp.asarray(script_of(scripts, prompts)), "sure": jnp.asarray(certain)}
    context = context.replace(cached=cached)
    said, after = write(scripted, params, keys_of(rows), context, jnp.ones(rows, bool), plan)
    return said, np.asarray(after.tokens), np.asarray(after.length)


SCRIPT = ENGINE.replace(mask_id=11, max_tokens=8)


# ---- SDAR ----------------------------------------------------------------------------------------


def test_a_batch_of_mixed_lengths_writes_what_its_rows_write_alone(params):
    """SDAR 1 (JetAstra/SDAR#5), 14 (dllm#15): batches crashed, or ignored who is padding."""
    together, _ = answer(params, ENGINE)
    for row, prompt in enumerate(PROMPTS):
        alone, _ = answer(params, ENGINE, [prompt], keys=keys_of(4)[row][None])
        assert texts(alone)[0] == texts(together)[row]


@pytest.mark.parametrize(
    "strategy", ["low_confidence_static", "low_confidence_dynamic", "sequential"]
)
def test_settled_tokens_and_prompts_are_never_overwritten(params, strategy):
    """SDAR 2: with fewer masks left than tokens due, generate.py overwrote prompt and answer."""
    plan = ENGINE.replace(strategy=strategy, steps=2, threshold=0.3)
    said, after = answer(params, plan)
    for row, prompt in enumerate(PROMPTS):
        assert np.asarray(after.tokens[row, : len(prompt)]).tolist() == prompt
    # A token that was replaced would carry the later pass, and leave a place without any.
    reached = np.asarray(after.length) - [len(prompt) for prompt in PROMPTS]
    for row, n in enumerate(reached):
        assert (np.asarray(said.order[row, :n]) > 0).all()
    replay(params, plan, said, after)


def replay(params, plan, said, after) -> None:
    """Every token and its log-prob once more, from the canvas of its own pass."""
    model, block = MODELS[plan.block], plan.block
    for row, prompt in enumerate(PROMPTS):
        length = int(after.length[row])
        tokens = np.asarray(after.tokens[row, :length])
        order = np.concatenate(
            [np.zeros(len(prompt), int), said.order[row, : length - len(prompt)]]
        )
        for number in range(1, int(said.forwards[row]) + 1):
            places = np.flatnonzero(order == number)
            first = places[0] // block * block
            canvas = np.where(order >= number, plan.mask_id, tokens)[: first + block]
            heard = message(canvas.tolist(), width=SIZE)
            logits = model.logits(params, heard.tokens, heard.length)[0, places]
            logprobs = jax.nn.log_softmax(logits)[np.arange(len(places)), tokens[places]]
            found = said.logprobs[row, places - len(prompt)]
            np.testing.assert_allclose(found, logprobs, atol=1e-3)


def test_stops_count_in_the_answer_only():
    """SDAR 4 (dLLM-RL#33): two stop ids, in mid block, at its end; none in the prompt counts."""
    prompts = [[9, 2, 3, 9, 2, 3], [9] * 4, [2, 9, 9, 9]]
    said, tokens, length = play([[5, 6, 3, 6], [5, 6, 8, 2], [5] * 7 + [2]], prompts, SCRIPT)
    assert texts(said) == [[5, 6, 3], [5, 6, 8, 2], [5] * 7 + [2]]
    assert np.asarray(said.stopped).all()
    np.testing.assert_array_equal(length, [12, 8, 12])
    # What was denoised behind a stop stays in the buffer, outside the answer.
    np.testing.assert_array_equal(tokens[0, 6:12], [5, 6, 3, 6, 7, 7])


def test_a_mask_token_in_the_prompt_is_a_token():
    """SDAR 5 (SGLang PR#39592): it crashed, or was edited."""
    prompts = [[11, 9, 11, 11, 11], [11] * 4]
    said, tokens, _ = play([[5, 2], [6, 2]], prompts, SCRIPT)
    assert texts(said) == [[5, 2], [6, 2]]
    np.testing.assert_array_equal(tokens[0, :5], prompts[0])
    np.testing.assert_array_equal(tokens[1, :4], prompts[1])


def test_a_partial_block_is_not_cached(params):
    """SDAR 5: the cache holds whole blocks only, before and after an answer."""
    model = MODELS[4]
    context = model.read(params, model.memory(4, SIZE), message(*PROMPTS, width=12))
    np.testing.assert_array_equal(context.cached, [4, 4, 0, 4])
    _, after = answer(params, ENGINE)
    np.testing.assert_array_equal(after.cached % 4, 0)
    np.testing.assert_array_equal(after.cached, after.length)


@pytest.mark.parametrize("name", strategies.PRESETS)
@pytest.mark.parametrize("steps", [1, 3, 4])
def test_no_mask_is_chosen_and_none_is_left(name, steps):
    """SDAR 6: endless loops, index errors, or masks in the text (entropy bounded, S < b)."""
    plan = SCRIPT.replace(strategy="entropy_bounded", steps=steps, threshold=0.01)
    plan = plan.replace(**strategies.PRESETS[name])
    said, tokens, length = play([[11] * 8, [5, 11, 2]], [[9] * 4, [9] * 6], plan)
    for row, start in enumerate((4, 6)):
        assert 11 not in tokens[row, start : length[row]]
    assert (np.asarray(said.forwards) <= 4 * np.asarray(said.commits)).all()


def test_named_semantics_differ_where_the_engines_do():
    """SDAR 7 (dLLM-RL#5, DARE#11): one model, one block, and who settles what at its first look."""
    sure = np.full((2, 32), 20.0, np.float32)
    confidence = np.array([0.3, 0.95, 0.6, 0.9])
    sure[:, 4:8] = np.log(confidence / (1 - confidence) * 11)  # of 12 tokens
    plan = SCRIPT.replace(steps=2, threshold=0.93)
    first = {}
    for name in ("canonical", "jetengine", "lmdeploy", "sglang"):
        its = plan.replace(**strategies.PRESETS[name])
        said, *_ = play([[5] * 8] * 2, [[9] * 4] * 2, its, sure=sure)
        first[name] = (np.asarray(said.order[0, :4]) == 1).astype(int).tolist()
    # Two are due and one is sure.
    assert first["canonical"] == [0, 1, 0, 1]  # the two best
    assert first["jetengine"] == [1, 1, 0, 0]  # the two left-most
    assert first["lmdeploy"] == [0, 1, 0, 0]  # the best
    assert first["sglang"] == [0, 1, 0, 0]  # one is due, and one is sure


def test_rollouts_at_temperature_1_differ(params):
    """SDAR 7 (DARE#20): all rollouts of a group were identical."""
    model = MODELS[4]
    plan = ENGINE.replace(temperature=1.0, stop_ids=())
    context = model.read(params, model.memory(8, SIZE), message(*[PROMPTS[1]] * 8, width=12))
    said, _ = write(model.step, params, keys_of(8), context, jnp.ones(8, bool), plan)
    assert len({tuple(text) for text in texts(said)}) == 8


@pytest.mark.parametrize(("block", "steps"), [(8, 8), (16, 5), (16, 16)])
def test_other_block_lengths_settle_what_is_due(params, block, steps):
    """SDAR 8 (dLLM-RL#55, #56): which number of steps when the block length changes."""
    plan = ENGINE.replace(block=block, steps=steps, strategy="low_confidence_static", stop_ids=())
    said, after = answer(params, plan)
    due = [block // steps + (step < block % steps) for step in range(steps)]
    for row, prompt in enumerate(PROMPTS):
        masks = block - len(prompt) % block  # of the first block
        looks = next(n for n in range(1, steps + 1) if sum(due[:n]) >= masks)
        first = np.asarray(said.order[row, :masks])
        assert first.max() == looks
        assert (np.bincount(first, minlength=looks + 1)[1:looks] == due[: looks - 1]).all()
    np.testing.assert_array_equal(after.length % block, 0)


def test_logprobs_are_those_of_the_replayed_passes(params):
    """SDAR 12 (lmdeploy#4206, dLLM-RL#17), 15: a rollout can be replayed from its step map."""
    said, after = answer(params, ENGINE.replace(threshold=0.4))
    replay(params, ENGINE, said, after)


def test_the_step_map_reaches_to_the_end_of_the_block():
    """SDAR 15 (DARE, 2026-07-28): a text that is cut in mid block can't be replayed."""
    said, tokens, length = play([[5, 2, 6, 8], [5] * 4], [[9] * 4, [9] * 3], SCRIPT)
    assert texts(said)[0] == [5, 2]
    assert int(said.length[0]) == 2
    np.testing.assert_array_equal(said.order[0, :5], [1, 1, 1, 1, 0])
    np.testing.assert_array_equal(said.tokens[0, :4], tokens[0, 4 : length[0]])


# ---- limits, stops and layouts -------------------------------------------------------------------


def test_limits_of_the_engines():
    """Whole blocks, with an answer that is rounded up or cut; and our own shorter one."""
    scripts, prompts = [[5] * 12] * 2, [[9] * 3, [9] * 4]
    plan = SCRIPT.replace(max_tokens=6)
    said, _, length = play(scripts, prompts, plan)
    np.testing.assert_array_equal(said.length, [9, 8])
    np.testing.assert_array_equal(length, [12, 12])
    said, _, length = play(scripts, prompts, plan.replace(**strategies.PRESETS["lmdeploy"]))
    np.testing.assert_array_equal(said.length, [6, 6])
    np.testing.assert_array_equal(length, [12, 12])
    np.testing.assert_array_equal((np.asarray(said.order) > 0).sum(1), [9, 8])
    said, tokens, _ = play(scripts, prompts, plan.replace(**strategies.PRESETS["canonical"]))
    np.testing.assert_array_equal(said.length, [6, 6])
    np.testing.assert_array_equal((np.asarray(said.order) > 0).sum(1), [6, 6])
    np.testing.assert_array_equal(tokens[:, 11], PAD)
    said, *_ = play(scripts, prompts, plan.replace(budget=jnp.array([2, 5])))
    np.testing.assert_array_equal(said.length, [5, 8])


def test_a_stop_behind_an_exact_limit_does_not_count():
    plan = SCRIPT.replace(**strategies.PRESETS["lmdeploy"], max_tokens=2)
    said, *_ = play([[5, 6, 2], [5, 2, 6]], [[9] * 4, [9] * 4], plan)
    assert texts(said) == [[5, 6], [5, 2]]
    np.testing.assert_array_equal(said.stopped, [False, True])


def test_wedlms_blocks_follow_the_prompt_and_end_with_the_answer():
    plan = SCRIPT.replace(**strategies.PRESETS["wedlm_block"], max_tokens=6)
    said, tokens, length = play([[5, 6, 2, 8, 8], [5] * 9], [[9] * 3, [9] * 5], plan)
    assert texts(said) == [[5, 6, 2], [5] * 6]
    np.testing.assert_array_equal(length, [6, 11])
    np.testing.assert_array_equal(said.stopped, [True, False])
    np.testing.assert_array_equal(said.commits, [1, 2])
    np.testing.assert_array_equal(tokens[1, :11], [9] * 5 + [5] * 6)


def test_wedlms_blocks_leave_a_causal_cache(params):
    """A second turn reads on from the cache as from a fresh reading."""
    plan = PLAN.replace(**strategies.PRESETS["wedlm_block"], stop_ids=(4, 14), threshold=0.4)
    model = SLOTS
    said, after = answer(params, plan, model=model)
    heard = [[6, 4], [8, 4], [9, 10, 11, 4], [4]]
    after = model.read(params, after, message(*heard, width=5))
    rows = [p + t + h for p, t, h in zip(PROMPTS, texts(said), heard, strict=True)]
    fresh = model.read(params, model.memory(4, SIZE), message(*rows, width=SIZE))
    np.testing.assert_array_equal(after.length, fresh.length)
    active = jnp.ones(4, bool)
    again, _ = write(model.step, params, keys_of(4, 1), after, active, plan)
    other, _ = write(model.step, params, keys_of(4, 1), fresh, active, plan)
    assert texts(again) == texts(other)


def test_numbers_may_differ_by_row_and_another_number_compiles_nothing(params):
    by_row = ENGINE.replace(
        steps=jnp.array([4, 2, 3, 1]),
        threshold=jnp.array([0.5, 0.9, 0.2, 0.7]),
        temperature=jnp.array([0.0, 1.0, 0.0, 0.7]),
        stop_ids=(jnp.array([2, -1, 3, 4]),),
        budget=jnp.array([11, 4, 7, 2]),
    )
    together, _ = answer(params, by_row)
    compiled = None
    for row in range(4):
        mine = jax.tree.map(lambda x, row=row: x[row], by_row)
        alone, _ = answer(params, mine)
        assert texts(alone)[row] == texts(together)[row]
        compiled = compiled or write._cache_size()
    assert write._cache_size() == compiled


def test_eight_devices_give_what_one_gives(params):
    plan, model = ENGINE.replace(temperature=1.0), MODELS[4]
    context = model.read(params, model.memory(8, SIZE), message(*PROMPTS * 2, width=12))
    one, _ = write(model.step, params, keys_of(8), context, jnp.ones(8, bool), plan)
    on = mesh.make(data=4, fsdp=2, tensor=1)
    by_rank = lambda x: mesh.row_axis(on, 1 if x.ndim == 5 else 0)  # noqa: E731
    with jax.set_mesh(on):
        eight, after = write(
            model.step,
            jax.device_put(params, mesh.replicated(on)),
            jax.device_put(keys_of(8), mesh.rows(on)),
            jax.device_put(context, jax.tree.map(by_rank, context)),
            jax.device_put(jnp.ones(8, bool), mesh.rows(on)),
            plan,
        )
    assert len(after.cache.key.sharding.device_set) == 8
    assert texts(eight) == texts(one)
    np.testing.assert_array_equal(eight.order, one.order)
