"""SDAR's model and training loss against the published code: masks, padding, cache, gradients."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import ATOL, Case, block_causal, straight

from mdlm_jax import context as ctx
from mdlm_jax import ops
from mdlm_jax.diffusion import losses
from mdlm_jax.diffusion.corrupt import Noisy
from mdlm_jax.models import hub, masks
from mdlm_jax.structs import CacheShape

sdar = pytest.mark.golden("sdar")


@pytest.fixture(scope="module")
def case(golden: Path) -> Case:
    return Case(golden)


def blocks_of(case: Case) -> list[int]:
    names = (name for name in case.arrays if name.startswith("fwd_bs") and name.endswith("_mask"))
    return [int(name[len("fwd_bs") : -len("_mask")]) for name in names]


@sdar
def test_logits_under_the_block_causal_mask(case: Case):
    tokens = case["fwd_input_ids"]
    positions = straight(tokens)
    assert blocks_of(case)
    for block in blocks_of(case):
        sight = block_causal(positions, block)
        allowed = masks.visible(sight, sight)[0]
        np.testing.assert_array_equal(allowed, case[f"fwd_bs{block}_mask"])
        logits = case.logits(tokens, positions, sight)
        np.testing.assert_allclose(logits[0], case[f"fwd_bs{block}_logits"], atol=ATOL)


@sdar
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side(case: Case, side: str):
    part = lambda name: case[f"pad_{side}_{name}"]  # noqa: E731
    valid, block = part("valid"), blocks_of(case)[0]
    sight = block_causal(part("position_ids"), block, valid)
    allowed = np.asarray(masks.visible(sight, sight))
    np.testing.assert_array_equal(allowed[valid], part("mask")[valid])
    logits = case.logits(part("input_ids"), part("position_ids"), sight)
    np.testing.assert_allclose(logits[valid], part("logits")[valid], atol=ATOL)


@sdar
def test_the_cache_through_a_denoising_pass(case: Case):
    """Prefill, a look at a noisy block, its clean version stored, a look at the next block."""
    block, row = int(case["cache_block"]), lambda name: case[f"cache_{name}"][None]
    config, size = case.config, len(case["cache_prefill_ids"]) + 2 * block
    shape = CacheShape(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
    context = ctx.empty(1, size, shape, jnp.float32)
    at, cache = 0, context.cache
    for name, logits, stored in (
        ("prefill_ids", "prefill_logits", True),
        ("noisy_ids", "noisy_logits", False),
        ("clean_ids", "store_logits", True),
        ("next_ids", "next_logits", False),
    ):
        tokens = row(name)
        positions = jnp.asarray(at + straight(tokens))
        inputs = (positions, block_causal(positions, block), cache, jnp.array([at]))
        np.testing.assert_allclose(case.logits(tokens, *inputs), row(logits), atol=ATOL)
        if stored:
            _, fresh = case.hidden(case.params, tokens, *inputs)
            cache = ctx.write(cache, fresh, positions, jnp.ones(positions.shape, bool))
            at += tokens.shape[1]
    for name, kept in (("k", cache.key), ("v", cache.value)):
        first = kept[0, 0, :, :at]
        np.testing.assert_allclose(first, case[f"cache_{name}_layer0"], atol=1e-5)


# ---- the training loss -------------------------------------------------------------------------


def sft_cases(case: Case) -> list[str]:
    return [
        name[: -len("_loss")]
        for name in case.arrays
        if name.startswith("lf_") and name.endswith("_loss")
    ]


def segments(position_BL: np.ndarray, labels_BL: np.ndarray) -> np.ndarray:
    """1, 2, ... per sample; pads that fill the row (position 0 to its end) are 0."""
    starts_BL = position_BL == 0
    segment_BL = np.cumsum(starts_BL, axis=1)
    filling_BL = np.cumprod((starts_BL & (labels_BL == -100))[:, ::-1], axis=1)[:, ::-1] > 0
    filling_BL[:, 0] = False
    return np.where(filling_BL, 0, segment_BL)


def noisy_of(case: Case, name: str) -> tuple[Noisy, np.ndarray]:
    """The corrupted copy that the published code drew, as ours."""
    part = lambda key: case[f"{name}_{key}"]  # noqa: E731
    position = np.broadcast_to(part("position_ids"), part("input_ids").shape)
    rate = np.ones(position.shape, np.float32)
    rate[part("masked")] = part("p_mask")
    noisy = Noisy(
        tokens=part("noisy_input_ids"),
        target=part("input_ids"),
        segment=segments(position, part("labels")),
        position=position,
        masked=part("masked"),
        rate=rate,
        eligible=(part("labels") != -100).astype(np.float32),
    )
    return jax.tree.map(jnp.asarray, noisy), part("input_ids")


def training_loss(case: Case, params: dict, noisy: Noisy, clean_BL, block: int):
    """SDAR's loss on [clean | noisy], both copies whole."""
    both = lambda a, b: jnp.concatenate([a, b], axis=1)  # noqa: E731
    positions = both(noisy.position, noisy.position)
    sight = masks.Sight(
        segment=both(noisy.segment, noisy.segment),
        order=masks.order(positions, block_length=block),
        noisy=both(jnp.zeros_like(noisy.masked), jnp.ones_like(noisy.masked)),
    )
    hidden, _ = case.hidden(params, both(clean_BL, noisy.tokens), positions, sight)
    logits = case.unembed(params, hidden[:, clean_BL.shape[1] :])
    return ops.mean_value(losses.sdar_loss(logits, noisy)), logits


@sdar
def test_sft_losses_and_gradients(case: Case):
    assert sft_cases(case)
    for name in sft_cases(case):
        noisy, clean = noisy_of(case, name)
        block = int(case[f"{name}_block"])

        def loss_of(params, noisy=noisy, clean=clean, block=block):
            return training_loss(case, params, noisy, clean, block)

        (loss, logits), grads = jax.jit(jax.value_and_grad(loss_of, has_aux=True))(case.params)
        np.testing.assert_allclose(loss, case[f"{name}_loss"], rtol=1e-5, err_msg=name)
        nll = -ops.token_logprobs(logits, noisy.target)
        np.testing.assert_allclose(nll[noisy.masked], case[f"{name}_ce"], atol=ATOL)
        named = dict(hub.hub_tensors(grads, case.config, case.checkpoint.model_type))
        for key in (key for key in case.arrays if key.startswith(f"{name}_grad:")):
            expected = case[key]
            scale = np.abs(expected).max()
            np.testing.assert_allclose(
                named[key.split(":")[1]], expected, atol=1e-4 * scale, rtol=1e-4, err_msg=key
            )
        for parameter, norm in case.facts["grad_norms"].get(name, {}).items():
            found = np.linalg.norm(named[parameter])
            np.testing.assert_allclose(found, norm, rtol=1e-4, atol=1e-6, err_msg=parameter)
