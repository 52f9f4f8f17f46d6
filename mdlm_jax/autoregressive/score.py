"""Log-probabilities of given tokens, and the next-token loss."""

import jax
import jax.numpy as jnp

from mdlm_jax import ops
from mdlm_jax.structs import Mean, TokenBatch


def next_token_logprobs(logits_BLV: jax.Array, tokens_BL: jax.Array) -> jax.Array:
    """log p(token t | tokens before t), from the logits at t - 1; 0 at t = 0: f32[B, L]."""
    logprobs_BL = ops.token_logprobs(logits_BLV[:, :-1], tokens_BL[:, 1:])
    return jnp.pad(logprobs_BL, ((0, 0), (1, 0)))


def next_token_loss(logits_BLV: jax.Array, batch: TokenBatch) -> Mean:
    """Mean negative log-likelihood of the trained tokens; a segment's first token has no past."""
    counted_BL = batch.loss_mask & (batch.position > 0)
    logprobs_BL = next_token_logprobs(logits_BLV, batch.tokens)
    return ops.masked_mean(-logprobs_BL, counted_BL)
