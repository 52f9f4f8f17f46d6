"""Qwen3, Mistral and LFM2 against transformers: logits, padding, caches, greedy generation."""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import ATOL, Case, causal, straight
from fakes import message

from mdlm_jax.autoregressive import decode
from mdlm_jax.models import blocks, families, hub, masks, transformer

policies = pytest.mark.golden("qwen3", "mistral", "lfm2")


@pytest.fixture(scope="module")
def case(golden: Path) -> Case:
    return Case(golden)


@policies
def test_old_and_new_field_names_are_one_config(golden: Path):
    old = json.loads((golden / "config.hub_style.json").read_text())
    assert families.model_config(old) == hub.read(golden).config


@policies
def test_logits(case: Case):
    tokens = case["input_ids"]
    positions = straight(tokens)
    logits = case.logits(tokens, positions, causal(positions))
    np.testing.assert_allclose(logits, case["logits"], atol=ATOL)


@policies
def test_hidden_states_layer_by_layer(case: Case):
    """The scan over stacked layers equals the layers one by one, and each equals the golden."""
    tokens = case["input_ids"][:1]
    config, params = case.config, case.params
    positions = jnp.asarray(straight(tokens))
    sight = masks.clean(jnp.ones(tokens.shape, bool), positions)
    view = transformer.look(config, positions, sight)
    x = params["embed_tokens"]["embedding"][tokens]
    found = [x]
    for number, run in enumerate(config.runs):
        windows = transformer.Layers(config)._windows(run)
        for place in range(run.length):
            own = jax.tree.map(lambda p, i=place: p[i], params["layers"][str(number)])
            window = None if windows is None else windows[place]
            layer = transformer.Layer(config, run)
            x, _ = layer.apply({"params": own}, x, 0, window, view)
            found.append(x)
    norm = blocks.RMSNorm(config.rms_norm_eps)
    found[-1] = norm.apply({"params": params["norm"]}, found[-1])
    np.testing.assert_allclose(jnp.concatenate(found), case["hidden_states_row0"], atol=ATOL)


@policies
@pytest.mark.parametrize("side", ["leftpad", "rightpad"])
def test_padding_on_either_side(case: Case, side: str):
    live = case[f"{side}_attention_mask"] == 1
    tokens, positions = case[f"{side}_input_ids"], case[f"{side}_position_ids"]
    logits = case.logits(tokens, positions, causal(positions, live))
    np.testing.assert_allclose(logits[live], case[f"{side}_logits"][live], atol=ATOL)


def prompts_of(case: Case) -> list[list[int]]:
    live = case["leftpad_attention_mask"] == 1
    ids = case["leftpad_input_ids"]
    return [row[on].tolist() for row, on in zip(ids, live, strict=True)]


def generate(case: Case, prompts: list[list[int]], new: int, pieces: int = 1) -> np.ndarray:
    """Greedy continuations, the prompts read in so many pieces."""
    width = max(map(len, prompts))
    context = case.model.memory(len(prompts), width + new)
    for part in range(pieces):
        cuts = [row[len(row) * part // pieces : len(row) * (part + 1) // pieces] for row in prompts]
        context = case.model.read(case.params, context, message(*cuts, width=width))
    write = partial(
        decode.generate,
        case.model.step,
        temperature=0.0,
        max_tokens=new,
        stop_ids=(case.config.vocab_size,),  # no stop
    )
    keys = jax.random.split(jax.random.key(0), len(prompts))
    said, _ = jax.jit(write)(case.params, keys, context, jnp.ones(len(prompts), bool))
    return np.asarray(said.tokens)


@policies
@pytest.mark.parametrize("pieces", [1, 3])
def test_greedy_generation_in_a_ragged_batch(case: Case, pieces: int):
    expected = case["generate_leftpad_new_tokens"]
    found = generate(case, prompts_of(case), expected.shape[1] + 1, pieces)
    np.testing.assert_array_equal(found[:, :-1], expected)  # the last place is a forced stop


@policies
def test_greedy_generation_alone(case: Case):
    expected = case["generate_single_new_tokens"].ravel()
    prompt = case["generate_single_prompt"].ravel().tolist()
    found = generate(case, [prompt, prompt[:2]], len(expected) + 1)[0]
    np.testing.assert_array_equal(found[:-1], expected)


@policies
def test_first_generated_logits(case: Case):
    live = case["leftpad_attention_mask"] == 1
    positions = case["leftpad_position_ids"]
    logits = case.logits(case["leftpad_input_ids"], positions, causal(positions, live))
    np.testing.assert_allclose(logits[:, -1], case["generate_leftpad_first_step_logits"], atol=ATOL)


@pytest.mark.golden("lfm2")
@pytest.mark.parametrize("count", [9, 1])
def test_state_of_a_convolution(case: Case, count: int):
    name = "conv_state_first_conv_layer_after_" + str(count)
    rows = case["input_ids"][:, :count].tolist()
    context = case.model.memory(len(rows), count + 3)
    fresh = context.cache.replace(conv=jnp.zeros_like(context.cache.conv))
    context = context.replace(cache=fresh)
    # One more token, since the last one of a causal context stays pending.
    asked = message(*[[*row, 0] for row in rows], width=count + 1)
    context = case.model.read(case.params, context, asked)
    first = context.cache.conv[0].transpose(0, 2, 1)
    np.testing.assert_allclose(first, case[name], atol=ATOL)
