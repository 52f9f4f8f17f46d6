"""SDAR's loss by hand, and by every way of cutting a batch into pieces."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import TINY, TinyModel, message, sharp_params

from mdlm_jax import ops
from mdlm_jax.diffusion import losses
from mdlm_jax.diffusion.corrupt import Noisy
from mdlm_jax.models import masks, transformer
from mdlm_jax.structs import Mean
from mdlm_jax.train import state

MASK, BLOCK = 22, 4


def noisy_of(masked, rate, eligible, target) -> Noisy:
    masked, target = jnp.asarray(masked, bool), jnp.asarray(target, jnp.int32)
    zeros = jnp.zeros_like(target)
    return Noisy(
        tokens=jnp.where(masked, MASK, target),
        target=target,
        segment=zeros + 1,
        position=zeros,
        masked=masked,
        rate=jnp.asarray(rate, jnp.float32),
        eligible=jnp.asarray(eligible, jnp.float32),
    )


def test_the_loss_weighs_masked_tokens_and_divides_by_all_trained_ones():
    logits = np.log([[[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]], [[0.2, 0.2, 0.6], [1 / 3] * 3]])
    noisy = noisy_of(
        [[1, 0], [1, 1]], [[0.5, 0.5], [0.25, 0.25]], [[1, 1], [1, 1]], [[0, 2], [2, 1]]
    )
    loss = losses.sdar_loss(jnp.asarray(logits), noisy)
    expected = -(np.log(0.5) / 0.5 + (np.log(0.6) + np.log(1 / 3)) / 0.25)
    np.testing.assert_allclose(loss.total, expected, rtol=1e-5)
    assert float(loss.count) == 4
    np.testing.assert_allclose(ops.mean_value(loss), expected / 4, rtol=1e-5)


def test_rows_without_a_mask_give_no_loss_and_finite_gradients():
    noisy = noisy_of(np.zeros((2, 3)), np.ones((2, 3)), np.zeros((2, 3)), np.zeros((2, 3)))
    logits = jnp.zeros((2, 3, 5))
    grads = jax.grad(lambda x: losses.sdar_loss(x, noisy).total)(logits)
    assert not np.asarray(grads).any()
    assert float(ops.mean_value(losses.sdar_loss(logits, noisy))) == 0


def test_semi_ar_has_no_weights_and_divides_by_the_padded_length_of_trained_rows():
    logits = np.log([[[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]], [[0.2, 0.2, 0.6], [1 / 3] * 3]] * 2)
    masked = [[1, 0], [1, 1], [1, 1], [0, 0]]
    eligible = [[1, 1], [1, 0], [0, 0], [1, 1]]  # row 2 shows masks that it does not train
    noisy = noisy_of(masked, np.full((4, 2), 0.5), eligible, [[0, 2], [2, 1]] * 2)
    loss = losses.semi_ar_loss(jnp.asarray(logits), noisy)
    np.testing.assert_allclose(loss.total, -(np.log(0.5) + np.log(0.6)), rtol=1e-5)
    assert float(loss.count) == 2 * 2


@pytest.mark.parametrize("weighting", ["weighted", "uniform"])
def test_the_weights_of_the_masks_are_normalised(weighting):
    logits = np.log([[[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]], [[0.2, 0.2, 0.6], [1 / 3] * 3]])
    noisy = noisy_of(
        [[1, 0], [1, 1]], [[0.5, 0.5], [0.25, 0.75]], [[1, 1], [1, 1]], [[0, 2], [2, 1]]
    )
    loss = losses.mlm_loss(jnp.asarray(logits), noisy, weighting=weighting)
    weights = np.array([2, 4, 4 / 3]) if weighting == "weighted" else np.ones(3)
    expected = np.average(-np.log([0.5, 0.6, 1 / 3]), weights=weights)
    np.testing.assert_allclose(ops.mean_value(loss), expected, rtol=1e-5)
    np.testing.assert_allclose(loss.count, weights.sum(), rtol=1e-5)


def test_without_a_mask_the_mlm_loss_is_0_and_its_gradient_finite():
    noisy = noisy_of(np.zeros((2, 3)), np.ones((2, 3)), np.ones((2, 3)), np.zeros((2, 3)))
    value = lambda x: ops.mean_value(losses.mlm_loss(x, noisy, weighting="weighted"))  # noqa: E731
    loss, grads = jax.value_and_grad(value)(jnp.zeros((2, 3, 5)))
    assert float(loss) == 0
    assert not np.asarray(grads).any()


def test_the_next_token_loss_weighs_what_it_is_told():
    mlm, ar = Mean(jnp.array(6.0), jnp.array(2.0)), Mean(jnp.array(5.0), jnp.array(10.0))
    for weight, expected in ((1.0, (3 + 0.5) / 2), (0.5, (3 + 0.25) / 1.5)):
        loss = losses.wedlm_loss(mlm, ar, ar_weight=weight)
        np.testing.assert_allclose(ops.mean_value(loss), expected, rtol=1e-6)


def training_logits(params, tokens_BL, noisy_BL, length_B):
    """Logits of the noisy half of [clean | noisy], as SDAR trains."""
    positions = jnp.broadcast_to(jnp.arange(tokens_BL.shape[1]), tokens_BL.shape)
    live = (positions < length_B[:, None]).astype(jnp.int32)
    twice = lambda x: jnp.concatenate([x, x], axis=1)  # noqa: E731
    is_noisy = jnp.concatenate([jnp.zeros_like(live), jnp.ones_like(live)], axis=1).astype(bool)
    order = masks.order(twice(positions), block_length=BLOCK)
    sight = masks.Sight(twice(live), order, is_noisy)
    module = transformer.Transformer(TINY)
    both = jnp.concatenate([tokens_BL, noisy_BL], axis=1)
    hidden, _ = module.apply({"params": params}, both, twice(positions), sight)
    noisy_hidden = hidden[:, tokens_BL.shape[1] :]
    return module.apply({"params": params}, noisy_hidden, method="unembed")


def test_training_logits_are_those_of_a_denoise_call_on_the_clean_cache():
    params, model = sharp_params(31), TinyModel(BLOCK)
    rows = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [9, 8, 7, 6, 5, 4, 15]]
    prompts = [6, 3]  # neither ends at a block border
    opened = [[6, 7], [3]]  # what is masked of the block that holds the prompt's end
    clean = message(*rows, width=12)
    noisy = np.asarray(clean.tokens).copy()
    noisy[0, [6, 7, 9]] = MASK
    noisy[1, [3, 5]] = MASK
    trained = jax.jit(training_logits)(params, clean.tokens, jnp.asarray(noisy), clean.length)
    heard = message(*[row[:n] for row, n in zip(rows, prompts, strict=True)], width=6)
    context = model.read(params, model.memory(2, 16), heard)
    positions = context.cached[:, None] + jnp.arange(BLOCK)
    ids = jnp.take_along_axis(jnp.asarray(noisy), positions, axis=1)
    live = jnp.ones((2, BLOCK), bool)
    step = jax.jit(model.step)
    decoded, _ = step(params, ids, positions, live, context.cache, context.cached)
    for row, places in enumerate(opened):
        for place in places:
            block_place = place - int(context.cached[row])
            np.testing.assert_allclose(decoded[row, block_place], trained[row, place], atol=2e-4)


# ---- the gradient over pieces --------------------------------------------------------------------


def linear_loss(params, piece: Noisy):
    """A model that is a table: logits of a place depend on its noisy token only."""
    logits = params["layers"]["kernel"][piece.tokens]
    loss = losses.sdar_loss(logits, piece)
    return loss, {"masked": ops.masked_mean(piece.rate, piece.masked)}


def pieces_of(noisy: Noisy, count: int) -> Noisy:
    return jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), noisy)


def random_noisy(rows: int, width: int) -> Noisy:
    rng = np.random.default_rng(3)
    eligible = rng.random((rows, width)) < 0.6
    masked = eligible & (rng.random((rows, width)) < 0.5)
    rate = rng.uniform(0.2, 1.0, (rows, 1)).repeat(width, 1)
    return noisy_of(masked, rate, eligible, rng.integers(0, 5, (rows, width)))


@pytest.fixture(scope="module")
def table():
    return {"layers": {"kernel": jnp.asarray(np.random.default_rng(4).normal(size=(23, 5)))}}


def test_micro_batches_change_nothing(table):
    noisy = random_noisy(8, 7)
    gradients = jax.jit(partial(state.gradients, linear_loss))
    whole, loss, metrics = gradients(table, pieces_of(noisy, 1))
    for count in (2, 4):
        grads, loss_, metrics_ = gradients(table, pieces_of(noisy, count))
        np.testing.assert_allclose(
            grads["layers"]["kernel"], whole["layers"]["kernel"], atol=1e-6, rtol=1e-5
        )
        np.testing.assert_allclose(ops.mean_value(loss_), ops.mean_value(loss), rtol=1e-6)
        found, expected = metrics_["masked"], metrics["masked"]
        np.testing.assert_allclose(ops.mean_value(found), ops.mean_value(expected), rtol=1e-6)
    expected_grad = jax.grad(lambda p: ops.mean_value(linear_loss(p, noisy)[0]))(table)
    np.testing.assert_allclose(
        whole["layers"]["kernel"], expected_grad["layers"]["kernel"], atol=1e-6, rtol=1e-5
    )


def test_padding_changes_neither_loss_nor_gradient(table):
    noisy = random_noisy(4, 6)
    wider = jax.tree.map(lambda x: jnp.pad(x, ((0, 2), (0, 3))), noisy)
    wider = wider.replace(rate=jnp.where(wider.rate == 0, 1e-3, wider.rate))
    first, first_loss, _ = state.gradients(linear_loss, table, pieces_of(noisy, 1))
    second, second_loss, _ = state.gradients(linear_loss, table, pieces_of(wider, 2))
    np.testing.assert_allclose(
        first["layers"]["kernel"], second["layers"]["kernel"], atol=1e-6, rtol=1e-5
    )
    assert float(first_loss.count) == float(second_loss.count)
