"""The mixture of experts against a loop over tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import TINY, TinyModel, sharp_params

from mdlm_jax.models.experts import Experts

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
