"""The clipped policy loss of GRPO and its relatives, with TRL's names and meanings.

A loss is a `Mean`: micro-batches add their parts up, and one division is done at the end of the
optimizer step, so how a batch is cut never changes an update (`bnpo` excepted, by its definition).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from mdlm_jax.ops import masked_mean, pairwise_sum
from mdlm_jax.structs import Mean

MAX_LOG_RATIO = 20.0  # exp(20) is the last ratio that matters; beyond it float32 overflows


@struct.dataclass
class PolicyBatch:
    """What a rollout says about the tokens whose log-probs are trained. No gradient flows into it.

    Nothing under a false mask is ever read: NaN there is fine.
    """

    mask: jax.Array  # bool[B, L]  tokens that the policy wrote
    advantages: jax.Array  # f32[B] per rollout or f32[B, L] per token
    old_logprobs: jax.Array | None = None  # f32[B, L]  when sampled; None = those of right now
    ref_logprobs: jax.Array | None = None  # f32[B, L]  under the reference policy


def grpo_loss(
    logprobs_BL: jax.Array,
    batch: PolicyBatch,
    *,
    loss_type: str,
    epsilon: float,
    epsilon_high: float,
    importance_sampling_level: str = "token",
    beta: float = 0.0,
    kl_bias_correction: bool = False,
    delta: float | None = None,
    max_completion_length: int | None = None,
) -> tuple[Mean, dict[str, Mean]]:
    """Policy loss of the sampled tokens (Shao et al. 2024; clip-higher and "dapo": Yu et al. 2025).

        w    = pi(token) / pi_old(token)
        loss = -min(min(w, delta) A, clip(w, 1 - epsilon, 1 + epsilon_high) A) + beta KL(pi || ref)

    Args:
        logprobs_BL: f32[B, L] of the given tokens under the policy that is trained.
        batch: mask, advantages and the log-probs of the other policies.
        loss_type: a key of `LOSS_TYPES`.
        epsilon, epsilon_high: how far w may fall below 1 and rise above it before it is clipped.
        importance_sampling_level: a key of `RATIOS`; "sequence" makes it GSPO (Zheng et al. 2025).
        beta: weight of the KL term; 0 needs no reference.
        kl_bias_correction: multiply the KL by w (TRL's default; the papers do not).
        delta: upper bound of w where the advantage is negative ("two-sided clip"); None = no bound.
        max_completion_length: L_max of "dr_grpo".

    Returns:
        loss: its parts. Differentiate `total`; divide by `count` when all micro-batches are in.
        metrics: `clip_ratio/*` and, with beta, `kl`, each as its parts.
    """
    mask_BL = batch.mask.astype(bool)
    old_BL = logprobs_BL if batch.old_logprobs is None else batch.old_logprobs
    ratio = jnp.exp(RATIOS[importance_sampling_level](logprobs_BL, old_BL, mask_BL))
    advantages = batch.advantages[:, None] if batch.advantages.ndim == 1 else batch.advantages
    # A row without a token may carry any advantage, and 0 * NaN is NaN in the backward pass.
    advantages_BL = jnp.where(mask_BL, advantages, 0.0)
    bounded = ratio if delta is None else jnp.minimum(ratio, delta)
    clipped = jnp.clip(ratio, 1.0 - epsilon, 1.0 + epsilon_high)
    loss_BL = -jnp.minimum(bounded * advantages_BL, clipped * advantages_BL)

    metrics = _clip_metrics(bounded, advantages, mask_BL, epsilon, epsilon_high)
    if beta != 0.0:
        if batch.ref_logprobs is None:
            raise ValueError("beta is not 0: the batch needs ref_logprobs")
        kl_BL = k3(logprobs_BL, batch.ref_logprobs, mask_BL)
        kl_BL = kl_BL * ratio if kl_bias_correction else kl_BL
        loss_BL = loss_BL + beta * kl_BL
        metrics["kl"] = masked_mean(kl_BL, mask_BL)

    loss_BL = jnp.where(mask_BL, loss_BL, 0.0)
    loss = LOSS_TYPES[loss_type](loss_BL, mask_BL, max_completion_length)
    return loss, jax.lax.stop_gradient(metrics)


# --- Log-ratio between two policies: (new f32[B, L], old f32[B, L], mask) -> f32[B, L or 1]


def log_ratio(new_BL: jax.Array, old_BL: jax.Array, mask_BL: jax.Array) -> jax.Array:
    """log(pi_new / pi_old) per token, within +-20 and 0 outside the mask, f32[B, L].

    The mask comes before any exp: inf * 0 would be NaN.
    """
    difference_BL = jnp.where(mask_BL, new_BL - jax.lax.stop_gradient(old_BL), 0.0)
    return jnp.clip(difference_BL, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_log_ratio(new_BL: jax.Array, old_BL: jax.Array, mask_BL: jax.Array) -> jax.Array:
    """Mean of the tokens' log-ratios, one for the whole row, f32[B, 1] (GSPO's s_i)."""
    tokens_B1 = jnp.maximum(jnp.sum(mask_BL, axis=1, keepdims=True), 1)
    return jnp.sum(log_ratio(new_BL, old_BL, mask_BL), axis=1, keepdims=True) / tokens_B1


RATIOS: dict[str, Callable[[jax.Array, jax.Array, jax.Array], jax.Array]] = {
    "token": log_ratio,
    "sequence": sequence_log_ratio,
}


def k3(logprobs_BL: jax.Array, ref_logprobs_BL: jax.Array, mask_BL: jax.Array) -> jax.Array:
    """Estimate of KL(pi || ref) per token, never negative: e^d - d - 1, d = log(ref / pi).

    Schulman, "Approximating KL divergence" (2020).
    """
    gap_BL = jnp.where(mask_BL, jax.lax.stop_gradient(ref_logprobs_BL) - logprobs_BL, 0.0)
    gap_BL = jnp.clip(gap_BL, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return jnp.expm1(gap_BL) - gap_BL


def _total(loss_BL: jax.Array) -> jax.Array:
    """Sum over all tokens, f32[]."""
    return pairwise_sum(pairwise_sum(loss_BL, axis=1), axis=0)


# --- What a token's loss is divided by: (loss f32[B, L], 0 outside the mask; mask; L_max) -> Mean


def dapo(loss_BL: jax.Array, mask_BL: jax.Array, max_length: int | None) -> Mean:
    """Every token of the optimizer step weighs the same."""
    return Mean(_total(loss_BL), jnp.sum(mask_BL, dtype=jnp.float32))


def grpo(loss_BL: jax.Array, mask_BL: jax.Array, max_length: int | None) -> Mean:
    """Every row weighs the same; a row without a token counts and adds 0."""
    tokens_B = jnp.maximum(jnp.sum(mask_BL, axis=1), 1)
    rows = jnp.float32(loss_BL.shape[0])
    return Mean(pairwise_sum(pairwise_sum(loss_BL, axis=1) / tokens_B, axis=0), rows)


def dr_grpo(loss_BL: jax.Array, mask_BL: jax.Array, max_length: int | None) -> Mean:
    """Divided by the constant B * L_max, so that length earns no weight (Liu et al. 2025)."""
    if max_length is None:
        raise ValueError('loss_type "dr_grpo" divides by max_completion_length: give it')
    return Mean(_total(loss_BL), jnp.float32(loss_BL.shape[0] * max_length))


def bnpo(loss_BL: jax.Array, mask_BL: jax.Array, max_length: int | None) -> Mean:
    """Token mean of each micro-batch; the mean of those means depends on the cut, as in TRL."""
    tokens = jnp.maximum(jnp.sum(mask_BL), 1)
    return Mean(_total(loss_BL) / tokens, jnp.float32(1.0))


LOSS_TYPES: dict[str, Callable[[jax.Array, jax.Array, int | None], Mean]] = {
    "dapo": dapo,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "bnpo": bnpo,
}


def _clip_metrics(
    ratio: jax.Array,
    advantages: jax.Array,
    mask_BL: jax.Array,
    epsilon: float,
    epsilon_high: float,
) -> dict[str, Mean]:
    """Share of tokens whose gradient the clip cut off: too low, too high, either.

    A ratio per row, f32[B, 1], is counted once per row, whatever its length.
    """
    low = (ratio < 1.0 - epsilon) & (advantages < 0)  # bool[B, L] or bool[B, 1]
    high = (ratio > 1.0 + epsilon_high) & (advantages > 0)
    counted = mask_BL if low.shape == mask_BL.shape else jnp.ones(low.shape, bool)
    return {
        "clip_ratio/low_mean": masked_mean(low, counted),
        "clip_ratio/high_mean": masked_mean(high, counted),
        "clip_ratio/region_mean": masked_mean(low | high, counted),
    }
