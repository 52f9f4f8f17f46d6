"""Training losses of masked diffusion world models."""

import jax
import jax.numpy as jnp

from mdlm_jax import ops
from mdlm_jax.diffusion.corrupt import Noisy
from mdlm_jax.structs import Mean


def sdar_loss(logits_BMV: jax.Array, noisy: Noisy) -> Mean:
    """sum over masked i of CE(logits_i, x_i) / p_sample(i), over the number of trained tokens.

    SDAR's SFT loss (spec sdar.md 4a). Logits are not shifted: position i predicts token i. The
    divisor counts trained tokens whether masked or not; kept apart so that micro-batches add up
    exactly.
    """
    nll_BM = -ops.token_logprobs(logits_BMV, noisy.target)
    weighted_BM = jnp.where(noisy.masked, nll_BM / noisy.rate, 0.0)
    return Mean(weighted_BM.sum(), noisy.eligible.sum())
