"""Success is what the world's own last token says, and nothing else."""

import jax.numpy as jnp
import numpy as np

from mdlm_jax.rl import reward
from mdlm_jax.structs import Generation

PLAYING, SOLVED, FAILED = 4, 5, 6


def test_the_status_is_the_last_token_of_a_finished_observation():
    tokens = np.array(
        [
            [9, SOLVED, 0],  # solved
            [SOLVED, 9, PLAYING],  # only mentions it
            [9, 9, SOLVED],  # was cut: no status was given
            [FAILED, 0, 0],
            [SOLVED, SOLVED, SOLVED],  # an idle row in old memory
        ]
    )
    fields = dict.fromkeys(Generation.__dataclass_fields__)
    said = Generation(**fields).replace(
        tokens=jnp.asarray(tokens),
        length=jnp.array([2, 3, 3, 1, 0]),
        stopped=jnp.array([True, True, False, True, False]),
    )
    verdict = reward.status_judge(said, solved_id=SOLVED, failed_id=FAILED)
    np.testing.assert_array_equal(verdict.success, [True, False, False, False, False])
    np.testing.assert_array_equal(verdict.ended, [True, False, False, True, False])
    np.testing.assert_array_equal(verdict.reward, [1, 0, 0, 0, 0])


def test_a_reward_counts_less_with_every_turn_before_it():
    rewards, turns = jnp.array([1.0, 1.0, 0.0, 0.0]), jnp.array([1, 3, 3, 0])
    told = reward.discounted(rewards, turns, discount=0.5)
    np.testing.assert_allclose(told, [1.0, 0.25, 0.0, 0.0])
    np.testing.assert_array_equal(reward.discounted(rewards, turns, discount=1.0), rewards)
