"""The optimiser and the one update."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mdlm_jax import ops
from mdlm_jax.structs import Mean
from mdlm_jax.train import state


def params():
    return {
        "embed_tokens": {"embedding": jnp.ones((5, 3))},
        "layers": {"norm": {"weight": jnp.ones((2, 3))}, "q_proj": {"kernel": jnp.ones((2, 3, 4))}},
        "norm": {"weight": jnp.ones(3)},
    }


def test_only_matrices_decay_stacked_norm_weights_do_not():
    tx = state.optimizer(0.1, clip_norm=1.0, weight_decay=0.5)
    zeros = jax.tree.map(jnp.zeros_like, params())
    changes, _ = tx.update(zeros, tx.init(params()), params())
    moved = jax.tree.map(lambda x: bool((x != 0).any()), changes)
    assert moved == {
        "embed_tokens": {"embedding": True},
        "layers": {"norm": {"weight": False}, "q_proj": {"kernel": True}},
        "norm": {"weight": False},
    }


def test_the_learning_rate_rises_then_falls_to_a_tenth():
    rate = state.warmup_cosine(2.0, steps=100, warmup=0.1)
    np.testing.assert_allclose([rate(0), rate(5), rate(10), rate(100)], [0, 1, 2, 0.2], atol=1e-6)
    values = [float(rate(step)) for step in range(10, 101, 10)]
    assert values == sorted(values, reverse=True)
    assert np.isfinite(float(state.warmup_cosine(1.0, steps=1, warmup=0.5)(1)))


def squares(weights, piece):
    """Loss (w - x)^2 over the counted x."""
    error = (weights["w"] - piece["x"]) ** 2
    return ops.masked_mean(error, piece["counted"]), {
        "error": ops.masked_mean(error, piece["counted"])
    }


def two_means(weights, piece):
    """squares, and half the mean of w x over other places, with a count of its own."""
    first, metrics = squares(weights, piece)
    second = ops.masked_mean(0.5 * weights["w"] * piece["x"], ~piece["counted"])
    parts = zip((first.total, first.count), (second.total, second.count), strict=True)
    return Mean(*(jnp.stack(part) for part in parts)), metrics


def test_the_means_of_a_loss_are_divided_by_their_own_counts_over_all_pieces():
    x, counted = jnp.array([1.0, 2.0, 4.0, 9.0, 5.0, 3.0]), jnp.arange(6) % 3 > 0
    expected = jax.grad(lambda w: ops.mean_value(two_means(w, {"x": x, "counted": counted})[0]))
    weights = {"w": jnp.array(0.5)}
    for shape in ((1, 6), (2, 3), (3, 2), (6, 1)):  # with uneven counts, or none, in a piece
        pieces = {"x": x.reshape(shape), "counted": counted.reshape(shape)}
        gradients = jax.jit(partial(state.gradients, two_means))
        grads, loss, _ = gradients(weights, pieces)
        np.testing.assert_allclose(grads["w"], expected(weights)["w"], rtol=1e-6)
        np.testing.assert_allclose(
            ops.mean_value(loss), np.mean((0.5 - x[counted]) ** 2) + 0.25 * x[~counted].mean()
        )


def test_counting_first_leaves_no_forward_pass_in_the_program():
    pieces = {"x": jnp.ones((2, 3)), "counted": jnp.ones((2, 3), bool)}

    def costly(weights, piece):
        waves = jnp.cos(weights["w"] * piece["x"])
        means = (ops.masked_mean(waves, piece["counted"]), ops.masked_mean(waves, piece["x"] > 0))
        return jax.tree.map(lambda *x: jnp.stack(x), *means), {}

    arguments = ({"w": jnp.array(0.5)}, pieces)
    program = lambda function: jax.jit(function).lower(*arguments).compile().as_text()  # noqa: E731
    assert "cosine" in program(costly)
    assert "cosine" not in program(partial(state.shares, costly))


def test_an_update_moves_against_the_gradient_of_the_overall_mean():
    pieces = {
        "x": jnp.array([[1.0, 2.0], [4.0, 9.0]]),
        "counted": jnp.array([[True, True], [True, False]]),
    }
    tx = optax.sgd(0.5)
    start = state.create({"w": jnp.array(0.0)}, tx)
    after, metrics = jax.jit(partial(state.update, loss_fn=squares, optimizer=tx))(start, pieces)
    np.testing.assert_allclose(after.params["w"], 7 / 3, rtol=1e-6)  # the mean of 1, 2 and 4
    assert int(after.step) == 1
    np.testing.assert_allclose(ops.mean_value(metrics["loss"]), 7.0, rtol=1e-6)
    np.testing.assert_allclose(ops.mean_value(metrics["grad_norm"]), 14 / 3, rtol=1e-6)
    np.testing.assert_allclose(ops.mean_value(metrics["error"]), 7.0, rtol=1e-6)


def test_a_batch_with_nothing_to_learn_changes_no_parameter():
    pieces = {"x": jnp.ones((2, 3)), "counted": jnp.zeros((2, 3), bool)}
    tx = optax.sgd(0.5)
    after, metrics = state.update(
        state.create({"w": jnp.array(0.0)}, tx), pieces, loss_fn=squares, optimizer=tx
    )
    assert float(after.params["w"]) == 0
    assert float(metrics["loss"].count) == 0


def test_the_gradient_is_clipped_by_its_global_norm():
    tx = optax.chain(state.optimizer(1.0, clip_norm=1e-3, weight_decay=0.0))
    big = jax.tree.map(lambda x: 1e4 * jnp.ones_like(x), params())
    _, small = tx.update(big, tx.init(params()), params())
    moments = [x for x in jax.tree.leaves(small) if getattr(x, "ndim", 0) > 0]
    assert max(float(jnp.abs(x).max()) for x in moments) < 1e-3


def test_a_mean_adds_up():
    total = Mean(jnp.array(3.0), jnp.array(2.0)) + Mean(jnp.array(5.0), jnp.array(6.0))
    assert float(ops.mean_value(total)) == pytest.approx(1.0)
