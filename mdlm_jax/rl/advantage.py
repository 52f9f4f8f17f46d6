"""Rewards -> group-relative advantages."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

EPS = 1e-4  # added to the standard deviation, as TRL does
ZERO_STD = 1e-6  # a smaller spread is float noise: eight rewards of 0.1 do not average to 0.1f

# Each: (std within the group f32[P, 1], std within the batch f32[]) -> divisor, broadcast to [P, G]
SCALES: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "group": lambda group_std, batch_std: group_std + EPS,
    "batch": lambda group_std, batch_std: batch_std + EPS,
    "none": lambda group_std, batch_std: jnp.ones_like(group_std),
}


def group_advantage(
    reward_B: jax.Array, *, group: int, scale: str = "group", valid_B: jax.Array | None = None
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """How much better each rollout did than the others of its prompt (GRPO, Shao et al. 2024).

        A = (r - mean_g) / (std_g + 1e-4)      "group"
        A = (r - mean_g) / (std_batch + 1e-4)  "batch"
        A =  r - mean_g                        "none" (Dr. GRPO)

    Standard deviations have ddof 1. Rows that cannot be scored (a NaN reward or not valid: the
    world model failed) are left out of every mean and get 0; so does the only scorable row of a
    group, and every row of a group whose rewards are equal.

    Args:
        reward_B: f32[B], B = prompts x group, the rows of a prompt side by side.
        group: G >= 2, rollouts per prompt.
        scale: a key of `SCALES`.
        valid_B: bool[B]; None = all.

    Returns:
        advantages: f32[B].
        metrics: f32[] each, under TRL's names. `frac_reward_zero_std` is the share of rows whose
            rewards have no spread (in their group; in the batch for "batch"), and thus no signal;
            `frac_reward_no_std` the share of rows with fewer than two scorable rows there.
    """
    if group < 2:
        raise ValueError(f"group = {group}: an advantage needs at least 2 rollouts per prompt")
    if reward_B.shape[0] % group:
        raise ValueError(f"{reward_B.shape[0]} rows do not divide into groups of {group}")
    scored_B = jnp.isfinite(reward_B)
    if valid_B is not None:
        scored_B &= valid_B.astype(bool)
    reward_PG = jnp.where(scored_B, reward_B, 0.0).astype(jnp.float32).reshape(-1, group)
    scored_PG = scored_B.reshape(-1, group)

    mean_P1, std_P1, count_P1 = _moments(reward_PG, scored_PG, axis=1)
    mean, batch_std, count = _moments(reward_PG, scored_PG, axis=None)
    advantage_PG = (reward_PG - mean_P1) / SCALES[scale](std_P1, batch_std)
    advantage_PG = jnp.where(scored_PG & (std_P1 > ZERO_STD), advantage_PG, 0.0)

    std, scored = (batch_std, count) if scale == "batch" else (std_P1, count_P1)
    return advantage_PG.reshape(-1), {
        "reward": mean[0, 0],
        "reward_std": batch_std[0, 0],
        "frac_reward_zero_std": jnp.mean((scored > 1) & (std <= ZERO_STD), dtype=jnp.float32),
        "frac_reward_no_std": jnp.mean(scored < 2, dtype=jnp.float32),
    }


def _moments(
    values: jax.Array, mask: jax.Array, *, axis: int | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Mean, standard deviation (ddof 1, 0 for fewer than two) and count where `mask`; axes kept."""
    count = jnp.sum(mask, axis=axis, keepdims=True)
    mean = jnp.sum(jnp.where(mask, values, 0.0), axis=axis, keepdims=True) / jnp.maximum(count, 1)
    squares = jnp.where(mask, (values - mean) ** 2, 0.0)
    variance = jnp.sum(squares, axis=axis, keepdims=True) / jnp.maximum(count - 1, 1)
    return mean, jnp.sqrt(variance), count
