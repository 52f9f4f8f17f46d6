"""The one shift between logits and tokens."""

import jax.numpy as jnp
import numpy as np

from mdlm_jax import ops
from mdlm_jax.autoregressive import score
from mdlm_jax.structs import TokenBatch

LOGITS = np.random.default_rng(0).normal(size=(2, 4, 5)).astype(np.float32)
TOKENS = np.array([[1, 4, 0, 2], [3, 3, 1, 0]])


def test_a_token_is_scored_by_the_logits_before_it():
    found = score.next_token_logprobs(jnp.asarray(LOGITS), jnp.asarray(TOKENS))
    assert not np.asarray(found[:, 0]).any()
    for row, place in np.ndindex(2, 3):
        logits = LOGITS[row, place]
        expected = logits[TOKENS[row, place + 1]] - np.log(np.exp(logits).sum())
        np.testing.assert_allclose(found[row, place + 1], expected, rtol=1e-5)


def test_the_loss_counts_trained_tokens_that_have_a_past():
    mask = np.array([[1, 1, 0, 1], [1, 0, 1, 0]], bool)
    position = np.array([[0, 1, 0, 1], [0, 1, 2, 0]])  # row 0 holds two segments
    batch = TokenBatch(*(jnp.asarray(x) for x in (TOKENS, TOKENS * 0 + 1, position, mask, TOKENS)))
    loss = score.next_token_loss(jnp.asarray(LOGITS), batch)
    logprobs = np.asarray(score.next_token_logprobs(jnp.asarray(LOGITS), jnp.asarray(TOKENS)))
    expected = -(logprobs[0, 1] + logprobs[0, 3] + logprobs[1, 2])
    np.testing.assert_allclose(loss.total, expected, rtol=1e-5)
    assert float(loss.count) == 3
    np.testing.assert_allclose(ops.mean_value(loss), expected / 3, rtol=1e-5)
