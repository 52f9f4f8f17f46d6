"""Group-relative advantages by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mdlm_jax.rl.advantage import SCALES, group_advantage

NAN = jnp.nan


def test_a_group_is_centred_and_divided_by_its_deviation():
    advantages, metrics = group_advantage(jnp.array([0.0, 1.0, 4.0, 6.0]), group=2)
    # Two rewards are std / sqrt(2) away from their mean.
    np.testing.assert_allclose(advantages, np.sqrt(0.5) * np.array([-1, 1, -1, 1]), rtol=1e-3)
    np.testing.assert_allclose(metrics["reward"], 2.75)
    np.testing.assert_allclose(metrics["reward_std"], np.std([0, 1, 4, 6], ddof=1), rtol=1e-6)
    assert metrics["frac_reward_zero_std"] == 0


def test_the_other_scales():
    rewards = jnp.array([0.0, 1.0, 4.0, 6.0])
    plain, _ = group_advantage(rewards, group=2, scale="none")
    np.testing.assert_allclose(plain, [-0.5, 0.5, -1.0, 1.0])
    batch, _ = group_advantage(rewards, group=2, scale="batch")
    np.testing.assert_allclose(batch, plain / (np.std(rewards, ddof=1) + 1e-4), rtol=1e-6)


@pytest.mark.parametrize("scale", SCALES)
def test_equal_rewards_give_exactly_0_whatever_their_value(scale):
    rewards = jnp.concatenate([jnp.full(8, 0.1), jnp.full(8, 1 / 3) + 1e-8 * jnp.arange(8)])
    advantages, metrics = group_advantage(rewards, group=8, scale=scale)
    np.testing.assert_array_equal(advantages, np.zeros(16))
    assert metrics["frac_reward_zero_std"] == (0 if scale == "batch" else 1)


@pytest.mark.parametrize("scale", SCALES)
def test_invalid_rows_count_nowhere(scale):
    rewards = jnp.array([0.0, 1.0, 2.0, 99.0, 3.0, 5.0, NAN, 7.0])
    valid = jnp.array([1, 1, 1, 0, 1, 1, 1, 1])
    advantages, metrics = group_advantage(rewards, group=4, scale=scale, valid_B=valid)
    without, _ = group_advantage(jnp.array([0.0, 1.0, 2.0, 3.0, 5.0, 7.0]), group=3, scale=scale)
    np.testing.assert_allclose(advantages[jnp.array([0, 1, 2, 4, 5, 7])], without, rtol=1e-6)
    np.testing.assert_array_equal(advantages[jnp.array([3, 6])], [0, 0])
    np.testing.assert_allclose(metrics["reward"], 3.0)


def test_the_only_scorable_row_of_a_group_gets_0():
    rewards = jnp.array([NAN, 5.0, NAN, NAN, 0.0, 1.0])
    advantages, metrics = group_advantage(rewards, group=2)
    np.testing.assert_array_equal(advantages[:4], np.zeros(4))
    assert advantages[5] > 0.5
    np.testing.assert_allclose(metrics["frac_reward_no_std"], 2 / 3, rtol=1e-6)
    assert metrics["frac_reward_zero_std"] == 0


def test_no_scorable_row_at_all_is_finite():
    advantages, metrics = group_advantage(jnp.full(4, NAN), group=2)
    np.testing.assert_array_equal(advantages, np.zeros(4))
    assert np.isfinite(list(metrics.values())).all()


def test_it_runs_inside_a_jitted_function():
    rewards = jnp.arange(6.0)
    inside, _ = jax.jit(lambda rewards: group_advantage(rewards, group=3))(rewards)
    np.testing.assert_allclose(inside, group_advantage(rewards, group=3)[0], rtol=1e-6)


def test_impossible_groups_are_refused():
    with pytest.raises(ValueError, match="at least 2"):
        group_advantage(jnp.ones(4), group=1)
    with pytest.raises(ValueError, match="do not divide"):
        group_advantage(jnp.ones(5), group=2)
