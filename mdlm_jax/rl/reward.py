"""Rewards from the world's own status, never from what the agent said."""

import jax
import jax.numpy as jnp
from flax import struct

from mdlm_jax.structs import Generation


@struct.dataclass
class Verdict:
    """What one observation means for the episode. All [B]."""

    success: jax.Array  # bool
    ended: jax.Array  # bool
    reward: jax.Array  # f32


def status_judge(observation: Generation, *, solved_id: int, failed_id: int) -> Verdict:
    """Reads the status token that ends an environment turn; reward 1 for solved, else 0."""
    last_B1 = jnp.maximum(observation.length - 1, 0)[:, None]
    status_B = jnp.take_along_axis(observation.tokens, last_B1, axis=1)[:, 0]
    solved_B = observation.stopped & (status_B == solved_id)
    failed_B = observation.stopped & (status_B == failed_id)
    return Verdict(solved_B, solved_B | failed_B, solved_B.astype(jnp.float32))


def discounted(reward_B: jax.Array, turns_B: jax.Array, *, discount: float) -> jax.Array:
    """What comes with an episode's last turn counts discount**(turns - 1): sooner is better."""
    return reward_B * discount ** jnp.maximum(turns_B - 1, 0)
