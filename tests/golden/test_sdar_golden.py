"""SDAR's decoding against the public engines: tokens, passes, and when each token was settled.

Cases whose programs are equal run as one ragged batch; what differs in them by number (steps,
threshold, temperature, stops, length) is given per row.
"""

import collections
import functools
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import Case
from fakes import TinyModel, message

from mdlm_jax import sampling
from mdlm_jax.diffusion import denoise, strategies

sdar = pytest.mark.golden("sdar")


class Family(Case):
    """A golden folder, and the shapes that its batches share, by block length."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.batches = collections.defaultdict(list)  # by what a program depends on
        for case in self.facts["cases"]:
            self.batches[form(case)].append(case)

    def shape(self, block: int) -> tuple[int, int, int, int]:
        """Rows, prompt width, answer width and context size of every batch of a block length."""
        batches = [cases for key, cases in self.batches.items() if key.block == block]
        cases = [case for batch in batches for case in batch]
        engines = [b for b in self.facts.get("jetengine_batch", []) if b["block_length"] == block]
        prompts = [case["prompt"] for case in cases] + sum((b["prompts"] for b in engines), [])
        prompt = max(map(len, prompts))
        answer = max([case["gen_length"] for case in cases] + [b["max_tokens"] for b in engines])
        size = -(-(prompt + answer) // block) * block
        rows = max([len(batch) for batch in batches] + [len(b["prompts"]) for b in engines])
        return rows, prompt, answer, size


Form = collections.namedtuple("Form", "engine strategy block top_k")


def form(case: dict) -> Form:
    """What a case's program depends on. Its draws are greedy: of the one most likely token."""
    return Form(case["engine"], case["strategy"], case["block_length"], case.get("top_k"))


@functools.cache
def family(folder: Path) -> Family:
    return Family(folder)


def plan_of(facts: dict, key: Form, answer: int, cases: list[dict], rows: int) -> denoise.Plan:
    """The engine's plan, with one value per row where cases differ."""

    def numbers(read, dtype) -> jax.Array:
        values = [read(case) for case in cases]
        return jnp.asarray(values + values[:1] * (rows - len(cases)), dtype)

    preset = strategies.PRESETS[key.engine]
    if key.engine == "generate_py" and key.top_k is None:
        # These runs took the arg-max of an unfiltered distribution: both confidences are one.
        preset = preset | {"filtered": False}
    longest = max(len(case["stop"] or ()) for case in facts["cases"])
    stop = lambda case, i: ([*(case["stop"] or ()), *[-1] * longest])[i]  # noqa: E731
    return denoise.Plan(
        strategy=key.strategy,
        block=key.block,
        max_tokens=answer,
        mask_id=facts["mask_token_id"],
        pad_id=facts["pad_token_id"],
        steps=numbers(lambda case: case["denoising_steps"], jnp.int32),
        threshold=numbers(threshold_of, jnp.float32),
        temperature=numbers(lambda case: case["temperature"], jnp.float32),
        stop_ids=tuple(numbers(partial(stop, i=i), jnp.int32) for i in range(longest)),
        budget=numbers(lambda case: case["gen_length"], jnp.int32),
        top_k=1,
    ).replace(**preset)


def threshold_of(case: dict) -> float:
    name = "eb_threshold" if case["strategy"] == "entropy_bounded" else "threshold"
    value = case.get(name)
    return 1.0 if value is None else value


@partial(jax.jit, static_argnums=0)
def write(model: TinyModel, params, keys, context, active, plan):
    return denoise.generate(model.step, params, keys, context, active, plan=plan)


def run(its: Family, key: Form, cases: list[dict], shape: tuple[int, int, int, int]) -> tuple:
    """The cases as one batch; rows that are left over are idle."""
    rows, prompt, answer, size = shape
    model, idle = TinyModel(key.block, its.config), rows - len(cases)
    heard = message(*[case["prompt"] for case in cases], *[[1]] * idle, width=prompt)
    context = model.read(its.params, model.memory(rows, size), heard)
    plan = plan_of(its.facts, key, answer, cases, rows)
    keys, active = jax.random.split(jax.random.key(0), rows), jnp.arange(rows) < len(cases)
    said, after = write(model, its.params, keys, context, active, plan)
    return jax.tree.map(np.asarray, (said, after))


def calls(case: dict, tokens: list[int], order: np.ndarray, mask_id: int) -> list[list[int]]:
    """Every pass as the goldens list them: [1 look | 2 store, first place, tokens fed]."""
    block, start, seen, found = case["block_length"], len(case["prompt"]), 0, []
    when = np.concatenate([np.zeros(start, int), order])
    for first in range(start // block * block, len(tokens), block):
        part, then = tokens[first : first + block], when[first : first + block]
        for look in range(seen + 1, then.max() + 1):
            fed = [mask_id if at >= look else token for token, at in zip(part, then, strict=True)]
            found.append([1, first, *fed])
        seen = then.max()
        found.append([2, first, *part])
    return found


def check(case: dict, said, after, row: int, mask_id: int) -> None:
    """One row against its golden case."""
    about = f"case {case.get('id')}"
    length, start = int(after.length[row]), len(case["prompt"])
    tokens = after.tokens[row, :length].tolist()
    golden = case["tokens"]
    # generate.py and OpenCompass return a buffer that is filled with masks.
    assert golden == tokens + [mask_id] * (len(golden) - length), about
    assert said.forwards[row] == case["n_denoise"], about
    assert said.commits[row] == case["n_store"], about
    assert after.cached[row] == length, about
    order = said.order[row, : length - start]
    if "trajectory" in case:
        assert order.tolist() == case["trajectory"], about
    if "calls" in case:
        assert calls(case, tokens, order, mask_id) == case["calls"], about
    if "logprobs" in case:
        chosen = said.logprobs[row, : length - start]
        np.testing.assert_allclose(chosen, case["logprobs"], atol=2e-4, err_msg=about)
    # The answer ends with the first stop token, though its block was denoised to the end.
    ends = [place for place in range(start, length) if tokens[place] in (case["stop"] or ())]
    assert bool(said.stopped[row]) == bool(ends), about
    answer = tokens[start : min(ends, default=length - 1) + 1]
    assert said.tokens[row, : said.length[row]].tolist() == answer, about


@sdar
def test_every_case_in_ragged_batches(golden: Path):
    its = family(golden)
    for key, cases in its.batches.items():
        said, after = run(its, key, cases, its.shape(key.block))
        for row, case in enumerate(cases):
            check(case, said, after, row, its.facts["mask_token_id"])


@sdar
def test_a_row_alone_writes_what_it_writes_in_a_batch(golden: Path):
    """SDAR#5: the public generate.py can't batch at all."""
    its = family(golden)
    blocks = {key.block for key in its.batches}
    forms = [next(key for key in its.batches if key.block == block) for block in sorted(blocks)]
    for key in forms:
        for case in its.batches[key][:3]:
            said, after = run(its, key, [case], (1, *its.shape(key.block)[1:]))
            check(case, said, after, 0, its.facts["mask_token_id"])


@sdar
def test_the_engines_own_batches(golden: Path):
    its = family(golden)
    for batch in its.facts.get("jetengine_batch", []):
        shared = {"engine": "jetengine", "gen_length": batch["max_tokens"], "stop": None}
        rows = zip(batch["prompts"], batch["tokens"], batch["trajectories"], strict=True)
        cases = [
            {**batch, **shared, "temperature": 1.0, "prompt": prompt, "tokens": tokens}
            | {"trajectory": trajectory, "n_denoise": looks, "n_store": stores}
            for (prompt, tokens, trajectory), looks, stores in zip(
                rows, batch["n_denoise"], batch["n_store"], strict=True
            )
        ]
        said, after = run(its, form(cases[0]), cases, its.shape(batch["block_length"]))
        for row, case in enumerate(cases):
            check(case, said, after, row, its.facts["mask_token_id"])


@sdar
def test_confidences_and_entropies_of_every_pass(golden: Path):
    """What a strategy sees, where the goldens recorded it, from rows read at once."""
    its = family(golden)
    seen = [case for case in its.facts["cases"] if "confidences" in case or "entropies" in case]
    for block in sorted({case["block_length"] for case in seen}):
        cases = [case for case in seen if case["block_length"] == block]
        looks = [(case, call) for case in cases for call in case["calls"] if call[0] == 1]
        rows = [case["tokens"][: call[1]] + call[2:] for case, call in looks]
        heard = message(*rows, width=max(map(len, rows)))
        logits = TinyModel(block, its.config).logits(its.params, heard.tokens, heard.length)
        places = heard.length[:, None] - block + jnp.arange(block)
        logits = jnp.take_along_axis(logits, places[..., None], axis=1)
        plan = plan_of(its.facts, form(cases[0]), block, [case for case, _ in looks], len(looks))
        view = strategies.look(jax.random.split(jax.random.key(0), len(looks)), logits, plan)
        check_views(looks, np.asarray(view.confidence), np.asarray(view.entropy))


def check_views(looks: list[tuple], confidence: np.ndarray, entropy: np.ndarray) -> None:
    """Rows of looks against the goldens: confidences by pass, entropies by token."""
    passes = collections.Counter()
    for row, (case, call) in enumerate(looks):
        number = passes[case["id"]]
        passes[case["id"]] += 1
        if "confidences" in case:
            np.testing.assert_allclose(confidence[row], case["confidences"][number], atol=2e-4)
        if "entropies" in case:
            for place, settled in enumerate(case["trajectory"], len(case["prompt"])):
                if settled == number + 1:
                    golden = case["entropies"][place - len(case["prompt"])]
                    np.testing.assert_allclose(entropy[row, place - call[1]], golden, atol=1e-3)


@sdar
def test_schedules(golden: Path):
    for name, due in family(golden).facts["functions"]["num_transfer_tokens"].items():
        block, steps = map(int, name.split("_"))
        step_B = jnp.arange(len(due))
        ours = strategies.remainder_first(step_B, block=block, steps=steps)
        np.testing.assert_array_equal(ours, due, err_msg=name)
        assert sum(due) == block


@sdar
def test_filters_and_both_confidences(golden: Path):
    its, draws = family(golden), 64
    logits = jnp.asarray(its.arrays["filter_logits"])
    canvas = jnp.repeat(logits[:, None], draws, axis=1)  # f32[4, 64, V]
    keys = jax.random.split(jax.random.key(0), len(logits))
    for i, (temperature, k, p) in enumerate(its.facts["functions"]["filter_combos_T_k_p"]):
        kept = sampling.filter_logits(logits, temperature=temperature, top_k=k, top_p=p)
        probs = its.arrays[f"filter_{i}_probs"]
        np.testing.assert_allclose(jax.nn.softmax(kept), probs, atol=1e-5)
        for engine, filtered in (("generate_py", True), ("opencompass", False)):
            options = {"temperature": temperature, "top_k": k, "top_p": p, "filtered": filtered}
            ids, confidence, _ = sampling.choose(keys, canvas, **options)
            assert (np.take_along_axis(probs, np.asarray(ids), axis=1) > 0).all()
            for row, golden_confidence in enumerate(its.arrays[f"filter_{i}_conf_{engine}"]):
                likeliest = np.asarray(ids[row] == probs[row].argmax())
                assert likeliest.any()
                found = np.asarray(confidence[row])[likeliest]
                np.testing.assert_allclose(found, golden_confidence, atol=1e-5)
