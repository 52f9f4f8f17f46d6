"""The mixture of experts against a loop over tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import TINY, TinyModel, sharp_params

from mdlm_jax.models.experts import Experts, grouped_dot

SPARSE = dataclasses.replace(
    TINY,
    feed_forwards=("experts", "experts"),
    num_experts=5,
    num_experts_per_tok=2,
    moe_intermediate_size=7,
)


def by_hand(params: dict, x_TD: np.ndarray, top: int, normalise: bool) -> np.ndarray:
    out = np.zeros_like(x_TD)
    for t, x in enumerate(x_TD):
        logits = x @ params["gate"]
        probs = np.exp(logits - logits.max())
        probs /= probs.sum()
        chosen = np.argsort(-probs, kind="stable")[:top]
        scale = probs[chosen].sum() if normalise else 1.0
        for e in chosen:
            gate, up = x @ params["gate_proj"][e], x @ params["up_proj"][e]
            hidden = gate / (1 + np.exp(-gate)) * up
            out[t] += probs[e] / scale * (hidden @ params["down_proj"][e])
    return out


@pytest.mark.parametrize("normalise", [True, False])
def test_experts_by_hand(normalise: bool):
    config = dataclasses.replace(SPARSE, norm_topk_prob=normalise)
    stack = sharp_params(3, config)["layers"]["0"]["mlp"]
    params = jax.tree.map(lambda p: np.asarray(p[0], np.float64), stack)
    x = np.random.default_rng(4).normal(size=(3, 11, config.hidden_size)).astype(np.float32)
    own = jax.tree.map(lambda p: p[0], stack)
    found = jax.jit(Experts(config).apply)({"params": own}, jnp.asarray(x))
    expected = by_hand(params, x.reshape(-1, config.hidden_size).astype(np.float64), 2, normalise)
    np.testing.assert_allclose(found.reshape(expected.shape), expected, atol=1e-3, rtol=1e-3)


def test_a_token_s_experts_do_not_depend_on_its_batch_mates():
    params, rows = sharp_params(6, SPARSE), jnp.arange(3 * 7).reshape(3, 7) % SPARSE.vocab_size
    model, length = TinyModel(1, SPARSE), jnp.array([7, 5, 3])
    together = model.logits(params, rows, length)
    changed = rows.at[1:].set(2)
    np.testing.assert_allclose(model.logits(params, changed, length)[0], together[0], atol=1e-4)


def test_gradients_reach_the_experts_that_were_used():
    params = sharp_params(7, SPARSE)
    rows = jnp.arange(2 * 6).reshape(2, 6)

    def loss(params):
        return jnp.square(TinyModel(1, SPARSE).logits(params, rows, jnp.array([6, 6]))).mean()

    grads = jax.jit(jax.grad(loss))(params)["layers"]["0"]["mlp"]
    assert all(np.isfinite(g).all() and np.any(g) for g in jax.tree.leaves(grads))


# Sizes with idle experts, one expert for all, single rows, and more rows than a tile holds.
@pytest.mark.parametrize("sizes", [(0, 4, 0, 1), (0, 0, 7, 0), (1,), (300, 0, 2), (2, 3, 4)])
def test_grouped_products_are_those_of_a_loop(sizes: tuple[int, ...]):
    draw = np.random.default_rng(2)
    rows = draw.normal(size=(sum(sizes), 6)).astype(np.float32)
    kernels = draw.normal(size=(len(sizes), 6, 5)).astype(np.float32)
    owners = np.repeat(np.arange(len(sizes)), sizes)
    expected = np.einsum("sd,sdf->sf", rows, kernels[owners])
    inputs = jnp.asarray(rows), jnp.asarray(kernels), jnp.asarray(sizes)
    np.testing.assert_allclose(jax.jit(grouped_dot)(*inputs), expected, atol=1e-5)

    def loss(rows, kernels):
        return jnp.square(grouped_dot(rows, kernels, inputs[2])).sum()

    found = jax.jit(jax.grad(loss, (0, 1)))(*inputs[:2])
    back = 2 * expected
    np.testing.assert_allclose(found[0], np.einsum("sf,sdf->sd", back, kernels[owners]), atol=1e-3)
    by_expert = [rows[owners == e].T @ back[owners == e] for e in range(len(sizes))]
    np.testing.assert_allclose(found[1], np.stack(by_expert), atol=1e-2)


def test_only_a_token_s_own_experts_are_computed():
    """Counted by the compiler: twice the useful products at most, where all would be 16 times."""
    rows, experts, width, inner = 64, 16, 32, 24
    shapes = [(rows, width), (experts, width, inner)]
    floats = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    sizes = jax.ShapeDtypeStruct((experts,), jnp.int32)
    compiled = jax.jit(grouped_dot).lower(*floats, sizes).compile()
    assert compiled.cost_analysis()["flops"] < 2.2 * 2 * rows * width * inner
