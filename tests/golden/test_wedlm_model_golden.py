"""WeDLM's model against the published code: causal attention over a permuted array."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import ATOL, Case, causal, straight

from mdlm_jax import context as ctx
from mdlm_jax.structs import CacheShape

wedlm = pytest.mark.golden("wedlm")


@pytest.fixture(scope="module")
def case(golden: Path) -> Case:
    return Case(golden)


@wedlm
def test_logits(case: Case):
    tokens = case["plain_input_ids"]
    positions = straight(tokens)
    np.testing.assert_allclose(
        case.logits(tokens, positions, causal(positions)), case["plain_logits"], atol=ATOL
    )


@wedlm
def test_the_mask_follows_the_array_the_rotation_follows_the_positions(case: Case):
    tokens, positions = case["explicitpos_input_ids"], case["explicitpos_position_ids"]
    logits = case.logits(tokens, jnp.asarray(positions), causal(straight(tokens)))
    np.testing.assert_allclose(logits, case["explicitpos_logits"], atol=ATOL)


@wedlm
def test_left_padding(case: Case):
    live = case["leftpad_attention_mask"] == 1
    tokens, positions = case["leftpad_input_ids"], jnp.asarray(case["leftpad_position_ids"])
    logits = case.logits(tokens, positions, causal(straight(tokens), live))
    np.testing.assert_allclose(logits[live], case["leftpad_logits"][live], atol=ATOL)


@wedlm
def test_observed_tokens_first_then_masks(case: Case):
    tokens, positions = case["reorder_input_ids"][None], case["reorder_position_ids"][None]
    slots = causal(straight(tokens))
    logits = case.logits(tokens, jnp.asarray(positions), slots)
    np.testing.assert_allclose(logits[0], case["reorder_logits"], atol=ATOL)
    natural = case["reorder_masked_ids"][None]
    logits = case.logits(natural, straight(natural), slots)
    np.testing.assert_allclose(logits[0], case["natural_masked_logits"], atol=ATOL)


@wedlm
def test_a_reordered_window_over_the_cache(case: Case):
    whole, known = case["reorder_input_ids"][None], int(case["cached_prefix_len"])
    config = case.config
    shape = CacheShape(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
    cache = ctx.empty(1, known + 2, shape, jnp.float32).cache
    positions = jnp.asarray(case["reorder_position_ids"][None, :known])
    fresh = jax.jit(case.hidden)(case.params, whole[:, :known], positions, causal(positions))[1]
    cache = ctx.write(cache, fresh, positions, jnp.ones(positions.shape, bool))
    tokens = case["cached_window_input_ids"][None]
    places = jnp.asarray(case["cached_window_position_ids"][None])
    logits = case.logits(tokens, places, causal(straight(tokens)), cache, jnp.array([known]))
    np.testing.assert_allclose(logits[0], case["cached_window_logits"], atol=ATOL)
