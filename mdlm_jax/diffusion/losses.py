"""Training losses of masked diffusion world models."""

from collections.abc import Callable

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


def semi_ar_loss(logits_BMV: jax.Array, noisy: Noisy) -> Mean:
    """sum over masked trained i of CE(logits_i, x_i) / M, mean over the rows that train a token.

    dLLM-RL's SFT loss, "semi-ar" and "trace" (spec sdar.md 4b): no weights, and the divisor is the
    padded length M of the answers.
    """
    nll_BM = -ops.token_logprobs(logits_BMV, noisy.target)
    now_BM = noisy.masked & (noisy.eligible > 0)
    total = jnp.where(now_BM, nll_BM, 0.0).sum()
    return Mean(total, now_BM.any(1).sum() * jnp.float32(now_BM.shape[1]))


# Weight of a masked token by its masking rate.
WEIGHTS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "weighted": lambda rate_BM: 1.0 / (rate_BM + 1e-8),
    "uniform": jnp.ones_like,
}


def mlm_loss(logits_BMV: jax.Array, noisy: Noisy, *, weighting: str) -> Mean:
    """sum over masked i of w_i CE(logits_i, x_i), over the sum of the w_i; 0 without a mask.

    WeDLM's, as its fine-tuning code has it (spec wedlm.md 3): the weights are normalised over all
    that is trained together, and w = 1 / (p + 1e-8) or 1.
    """
    nll_BM = -ops.token_logprobs(logits_BMV, noisy.target)
    weight_BM = jnp.where(noisy.masked, WEIGHTS[weighting](noisy.rate), 0.0)
    return Mean((weight_BM * nll_BM).sum(), weight_BM.sum())


def wedlm_loss(mlm: Mean, ar: Mean, *, ar_weight: float) -> Mean:
    """(L_mlm + a L_ar) / (1 + a), both terms kept apart: a Mean of arrays [2].

    `ar` is the next-token loss of the clean copy (spec wedlm.md 3).
    """
    share = jnp.array([1.0, ar_weight]) / (1.0 + ar_weight)
    return Mean(share * jnp.stack([mlm.total, ar.total]), jnp.stack([mlm.count, ar.count]))
