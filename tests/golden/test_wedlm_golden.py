"""WeDLM's decoding against the published engine and block decoder: tokens, passes, and commits.

Cases of one window run as one ragged batch, each row with its own numbers.
"""

import collections
import functools
import itertools
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import Case
from fakes import SlotCausal, TinyModel, message

from mdlm_jax import ops
from mdlm_jax.autoregressive import decode
from mdlm_jax.diffusion import denoise, strategies, stream
from mdlm_jax.structs import Context

wedlm = pytest.mark.golden("wedlm")


class Family(Case):
    """A golden folder, and its model as streaming sees it."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.mask_id = self.checkpoint.mask_id
        self.model = SlotCausal(config=self.config)

    def read(self, prompts: list[list[int]], model: TinyModel, *, room: int) -> Context:
        """A context that has read the prompts."""
        width = max(map(len, prompts))
        memory = model.memory(len(prompts), width + room)
        return model.read(self.params, memory, message(*prompts, width=width))


@functools.cache
def family(folder: Path) -> Family:
    return Family(folder)


def keys_of(rows: int) -> jax.Array:
    return jax.random.split(jax.random.key(0), rows)


# ---- streaming -----------------------------------------------------------------------------------


def engine_cases(facts: dict) -> list[dict]:
    """Every run of the engine, of all kinds."""
    batch = facts.get("engine_batch", {}).get("cases", [])
    return facts["engine_cases"] + facts.get("engine_extra", []) + batch


def batches_of(facts: dict) -> dict[tuple, list[dict]]:
    """Cases by what a program depends on: the window, and whether there is a threshold."""
    batches = collections.defaultdict(list)
    for case in engine_cases(facts):
        batches[case["window"], case["threshold"] is None].append(case)
    return batches


def columns(rows: list[list[int]], count: int) -> tuple[jax.Array, ...]:
    """Lists of ids as `count` arrays i32[B]; -1, which no token is, fills them up."""
    filled = np.asarray([row + [-1] * (count - len(row)) for row in rows], np.int32)
    return tuple(jnp.asarray(column) for column in filled.reshape(len(rows), count).T)


def stops_of(cases: list[dict]) -> dict:
    """Stop ids and stop sequences of every row, by row."""
    ids = [case["stop_token_ids"] for case in cases]
    by_length = [
        {n: [s for s in case["stop_sequences"] if len(s) == n] for n in lengths(cases)}
        for case in cases
    ]
    sequences = []
    for n in lengths(cases):
        for place in range(max(len(row[n]) for row in by_length)):
            rows = [row[n][place] if place < len(row[n]) else [] for row in by_length]
            sequences.append(columns(rows, n))
    return {"stop_ids": columns(ids, max(map(len, ids))), "stop_sequences": tuple(sequences)}


def lengths(cases: list[dict]) -> list[int]:
    return sorted({len(sequence) for case in cases for sequence in case["stop_sequences"]})


def plan_of(its: Family, cases: list[dict]) -> stream.Plan:
    number = lambda name: jnp.asarray([case[name] for case in cases], jnp.float32)  # noqa: E731
    limits = [case["max_tokens"] for case in cases]
    return stream.Plan(
        window=cases[0]["window"],
        max_tokens=max(limits),
        mask_id=its.mask_id,
        threshold=None if cases[0]["threshold"] is None else number("threshold"),
        penalty=number("penalty"),
        budget=jnp.asarray(limits),
        **stops_of(cases),
    )


def run(its: Family, cases: list[dict]) -> tuple:
    """One ragged batch, and what every pass of it was fed."""
    passes = []

    def step(params, tokens_BW, positions_BW, live_BW, *cached):
        logits, fresh = its.model.step(params, tokens_BW, positions_BW, live_BW, *cached)
        seen = (tokens_BW, positions_BW, live_BW, ops.entropy(logits))
        jax.debug.callback(
            lambda *x: passes.append(jax.tree.map(np.asarray, x)), *seen, ordered=True
        )
        return logits, fresh

    plan, rows = plan_of(its, cases), len(cases)
    room = plan.max_tokens + 2 * plan.window
    context = its.read([case["prompt"] for case in cases], its.model, room=room)
    write = jax.jit(lambda *args: stream.generate(step, *args[:4], plan=args[4]))
    arguments = (its.params, keys_of(rows), context, jnp.ones(rows, bool), plan)
    said, after = jax.tree.map(np.asarray, write(*arguments))
    jax.effects_barrier()
    return said, after, passes


def committed(case: dict, said, after, row: int) -> list[list[int]]:
    """What each pass released: a token follows in the pass after the last of all up to it."""
    count, passes, start = int(said.length[row]), int(said.forwards[row]), len(case["prompt"])
    when = np.maximum.accumulate(said.order[row, :count]) + 1
    released = [int((when == number).sum()) for number in range(1, passes + 1)]
    text = after.tokens[row, start:].tolist()
    surplus = int(said.fed[row]) - passes * case["window"] - sum(released)
    ends_by_id = bool(said.stopped[row]) and text[count - 1] in case["stop_token_ids"]
    released[-1] += 0 if ends_by_id else surplus
    ends = list(itertools.accumulate(released))
    return [text[end - n : end] for n, end in zip(released, ends, strict=True)]


def check(case: dict, said, after, row: int) -> None:
    about = f"{case.get('kind')} window {case['window']} prompt {case['prompt'][:3]}"
    length = int(said.length[row])
    assert said.tokens[row, :length].tolist() == case["completion"], about
    assert said.forwards[row] == case["decode_forwards"], about
    assert said.fed[row] == case["tokens_processed"], about
    assert committed(case, said, after, row) == case["committed_per_step"], about
    assert after.length[row] == after.cached[row] == len(case["prompt"]) + length, about
    ends = [*case["stop_sequences"], *([stop] for stop in case["stop_token_ids"])]
    whole = case["prompt"] + case["completion"]
    assert bool(said.stopped[row]) == any(whole[-len(end) :] == end for end in ends), about


def check_trace(case: dict, passes: list[tuple], row: int) -> None:
    """Every pass: what was fed in which order, and the entropies of the masks."""
    assert len(passes) >= len(case["trace"])
    for (tokens, positions, live, entropy), golden in zip(passes, case["trace"], strict=False):
        there = live[row]
        assert tokens[row][there].tolist() == golden["input_ids"]
        assert positions[row][there].tolist() == golden["positions"]
        if golden["entropies"] or golden is not case["trace"][-1]:  # the last pass only commits
            of_masks = entropy[row][there][golden["num_non_mask"] :]
            np.testing.assert_allclose(of_masks, golden["entropies"], atol=1e-3)


@wedlm
def test_the_engine_in_ragged_batches(golden: Path):
    its = family(golden)
    for cases in batches_of(its.facts).values():
        said, after, passes = run(its, cases)
        for row, case in enumerate(cases):
            check(case, said, after, row)
            if "trace" in case:
                check_trace(case, passes, row)


@wedlm
def test_a_row_alone_writes_what_it_writes_in_a_batch(golden: Path):
    its = family(golden)
    cases = list(batches_of(its.facts).values())[-1]
    for case in (cases[0], cases[-1]):
        check(case, *run(its, [case])[:2], 0)


# ---- the other decoders --------------------------------------------------------------------------


@partial(jax.jit, static_argnums=0)
def write_blocks(model: SlotCausal, params, keys, context, active, plan):
    return denoise.generate(model.step, params, keys, context, active, plan=plan)


@wedlm
def test_the_block_decoder(golden: Path):
    its = family(golden)
    batches = collections.defaultdict(list)
    for case in its.facts["hf_block"]:
        batches[case["block_size"], case["confidence_threshold"] <= 0].append(case)
    for (block, one_by_one), cases in batches.items():
        preset = strategies.PRESETS["wedlm_block"]
        if one_by_one:
            preset = preset | {"strategy": "low_confidence_static"}
        limits = [case["max_new_tokens"] for case in cases]
        plan = denoise.Plan(
            strategy=preset["strategy"],
            block=block,
            max_tokens=max(limits),
            mask_id=its.mask_id,
            pad_id=0,
            steps=block,
            threshold=jnp.asarray([case["confidence_threshold"] for case in cases]),
            temperature=jnp.asarray([case["temperature"] for case in cases]),
            stop_ids=(),
            budget=jnp.asarray(limits),
            top_k=1,
        ).replace(**preset)
        context = its.read([case["prompt"] for case in cases], its.model, room=max(limits))
        active = jnp.ones(len(cases), bool)
        said, after = write_blocks(
            its.model, its.params, keys_of(len(cases)), context, active, plan
        )
        for row, case in enumerate(cases):
            length = int(after.length[row])
            assert np.asarray(after.tokens[row, :length]).tolist() == case["sequence"]
            assert int(said.forwards[row]) == case["total_steps"]
            order = np.asarray(said.order[row, : said.length[row]])
            assert int(said.commits[row]) == len(case["tokens_per_step"])
            settled = collections.Counter(order.tolist())
            per_step = list(itertools.chain.from_iterable(case["tokens_per_step"]))
            assert [settled[step + 1] for step in range(len(per_step))] == per_step


@wedlm
def test_one_token_at_a_time(golden: Path):
    """The same weights under the autoregressive decoder."""
    its = family(golden)
    model, cases = TinyModel(1, its.config), its.facts["ar_greedy"]
    most = max(len(case["completion"]) for case in cases) + 1  # the last one is a forced stop
    context = its.read([case["prompt"] for case in cases], model, room=most)
    write = jax.jit(
        partial(decode.generate, model.step, temperature=0.0, max_tokens=most, stop_ids=(-1,))
    )
    said, _ = write(its.params, keys_of(len(cases)), context, jnp.ones(len(cases), bool))
    for row, case in enumerate(cases):
        completion = case["completion"]
        assert np.asarray(said.tokens[row, : len(completion)]).tolist() == completion
