"""What must hold for every form of the policy loss, and its numbers by hand."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mdlm_jax.ops import mean_value
from mdlm_jax.rl.loss import LOSS_TYPES, RATIOS, PolicyBatch, grpo_loss, k3

FORMS = list(itertools.product(LOSS_TYPES, RATIOS))
OPTIONS = {"epsilon": 0.2, "epsilon_high": 0.28, "max_completion_length": 9}


@pytest.fixture
def batch() -> dict[str, jax.Array]:
    """Four rows of six tokens: gaps inside, one token only, none at all, full."""
    keys = jax.random.split(jax.random.key(0), 4)
    return {
        "new": -jnp.abs(jax.random.normal(keys[0], (4, 6))),
        "old": -jnp.abs(jax.random.normal(keys[1], (4, 6))),
        "ref": -jnp.abs(jax.random.normal(keys[2], (4, 6))),
        "mask": jnp.array(
            [[0, 1, 0, 1, 1, 0], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]]
        ),
        "advantages": jax.random.normal(keys[3], (4,)),
    }


@functools.partial(jax.jit, static_argnums=1)
def compiled(batch: dict[str, jax.Array], options: frozenset):
    given = PolicyBatch(batch["mask"], batch["advantages"], batch["old"], batch["ref"])

    def total(new):
        mean, metrics = grpo_loss(new, given, **dict(options))
        return mean_value(mean), (mean, metrics)

    (_, (mean, metrics)), grad = jax.value_and_grad(total, has_aux=True)(batch["new"])
    return mean, metrics, grad


def evaluate(batch: dict[str, jax.Array], **options):
    """(Mean, metrics, gradient of the mean with respect to the new log-probs)."""
    return compiled(batch, frozenset((OPTIONS | options).items()))


def test_one_token_by_hand():
    """w = e^0.5 is beyond 1.28 and A > 0: the clipped value counts and no gradient flows."""
    batch = {
        "new": jnp.array([[-1.0]]),
        "old": jnp.array([[-1.5]]),
        "ref": jnp.array([[-1.0]]),
        "mask": jnp.ones((1, 1), bool),
        "advantages": jnp.array([2.0]),
    }
    mean, metrics, grad = evaluate(batch, loss_type="dapo")
    np.testing.assert_allclose(mean.total, -1.28 * 2, rtol=1e-6)
    np.testing.assert_array_equal(grad, [[0.0]])
    assert mean_value(metrics["clip_ratio/high_mean"]) == 1
    assert mean_value(metrics["clip_ratio/low_mean"]) == 0

    batch["advantages"] = jnp.array([-2.0])  # the same step is in the wrong direction: not clipped
    mean, _, grad = evaluate(batch, loss_type="dapo")
    np.testing.assert_allclose(mean.total, np.exp(0.5) * 2, rtol=1e-6)
    np.testing.assert_allclose(grad, [[np.exp(0.5) * 2]], rtol=1e-6)
    mean, _, grad = evaluate(batch, loss_type="dapo", delta=1.5)
    np.testing.assert_allclose(mean.total, 1.5 * 2)
    np.testing.assert_array_equal(grad, [[0.0]])


def test_divisors(batch):
    """Row means, tokens, and rows times L_max, from the same token losses."""
    rows = [{name: x[row : row + 1] for name, x in batch.items()} for row in range(4)]
    per_row = [evaluate(row, loss_type="dapo")[0] for row in rows]
    totals = np.array([mean.total for mean in per_row])
    tokens = np.array([mean.count for mean in per_row])
    np.testing.assert_array_equal(tokens, [3, 1, 0, 6])
    expected = {
        "dapo": totals.sum() / 10,
        "grpo": (totals / np.maximum(tokens, 1)).sum() / 4,
        "dr_grpo": totals.sum() / (4 * 9),
        "bnpo": totals.sum() / 10,
    }
    for loss_type, value in expected.items():
        mean, _, _ = evaluate(batch, loss_type=loss_type)
        np.testing.assert_allclose(mean_value(mean), value, rtol=1e-6, err_msg=loss_type)


@pytest.mark.parametrize(("loss_type", "level"), FORMS)
@pytest.mark.parametrize("garbage", [jnp.nan, jnp.inf, -jnp.inf, 1e10, -1e10])
def test_what_is_masked_does_not_matter(batch, loss_type, level, garbage):
    options = {"loss_type": loss_type, "importance_sampling_level": level, "beta": 0.1}
    clean = evaluate(batch, **options)
    dirty = dict(batch)
    for name in ("new", "old", "ref"):
        dirty[name] = jnp.where(batch["mask"] == 1, batch[name], garbage)
    dirty["advantages"] = batch["advantages"].at[2].set(garbage)  # the row without a token
    for a, b in zip(
        jax.tree.leaves(clean), jax.tree.leaves(evaluate(dirty, **options)), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    assert (np.asarray(clean[2])[batch["mask"] == 0] == 0).all()


@pytest.mark.parametrize(("loss_type", "level"), FORMS)
@pytest.mark.parametrize("gap", [100.0, -100.0])
def test_a_gap_of_100_nats_is_finite(batch, loss_type, level, gap):
    wild = batch | {"old": batch["new"] - gap, "ref": batch["new"] + gap}
    options = {"loss_type": loss_type, "importance_sampling_level": level}
    for leaf in jax.tree.leaves(evaluate(wild, beta=0.1, kl_bias_correction=True, **options)):
        assert np.isfinite(leaf).all()


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])  # not bnpo, by its definition
@pytest.mark.parametrize("level", RATIOS)
def test_micro_batches_add_up_to_the_whole(batch, loss_type, level):
    options = {"loss_type": loss_type, "importance_sampling_level": level, "beta": 0.1}
    whole, whole_metrics, _ = evaluate(batch, **options)
    first, first_metrics, _ = evaluate(jax.tree.map(lambda x: x[:1], batch), **options)
    rest, rest_metrics, _ = evaluate(jax.tree.map(lambda x: x[1:], batch), **options)
    np.testing.assert_allclose(mean_value(first + rest), mean_value(whole), rtol=1e-6)
    for name, mean in whole_metrics.items():
        parts = first_metrics[name] + rest_metrics[name]
        np.testing.assert_allclose(mean_value(parts), mean_value(mean), rtol=1e-6, err_msg=name)


def test_on_policy_the_gradient_is_that_of_reinforce(batch):
    same = batch | {"old": batch["new"]}
    _, metrics, grad = evaluate(same, loss_type="dapo")
    expected = -batch["advantages"][:, None] * batch["mask"] / batch["mask"].sum()
    np.testing.assert_allclose(grad, expected, atol=1e-7)
    assert mean_value(metrics["clip_ratio/region_mean"]) == 0


def test_without_old_log_probs_the_policy_is_its_own_old_one(batch):
    given = PolicyBatch(batch["mask"], batch["advantages"])
    ours = jax.grad(lambda new: grpo_loss(new, given, loss_type="dapo", **OPTIONS)[0].total)
    _, _, theirs = evaluate(batch | {"old": batch["new"]}, loss_type="dapo")
    np.testing.assert_allclose(ours(batch["new"]) / batch["mask"].sum(), theirs, atol=1e-7)


def test_one_advantage_per_token_equals_one_per_row_where_they_agree(batch):
    spread = batch | {"advantages": jnp.broadcast_to(batch["advantages"][:, None], (4, 6))}
    for loss_type in LOSS_TYPES:
        ours, _, _ = evaluate(spread, loss_type=loss_type)
        theirs, _, _ = evaluate(batch, loss_type=loss_type)
        np.testing.assert_allclose(ours.total, theirs.total, rtol=1e-6)


def test_kl_follows_the_reference(batch):
    options = {"loss_type": "dapo", "beta": 0.1}
    near, metrics, _ = evaluate(batch | {"ref": batch["new"]}, **options)
    assert mean_value(metrics["kl"]) == 0
    far, metrics, _ = evaluate(batch, **options)
    assert mean_value(metrics["kl"]) > 0
    assert far.total > near.total
    mask = batch["mask"].astype(bool)
    gap = np.asarray(batch["ref"] - batch["new"])
    expected = np.where(mask, np.exp(gap) - gap - 1, 0)
    np.testing.assert_allclose(k3(batch["new"], batch["ref"], mask), expected, atol=1e-6)


def test_missing_inputs_are_named(batch):
    given = PolicyBatch(batch["mask"], batch["advantages"])
    limits = {"epsilon": 0.2, "epsilon_high": 0.2}
    with pytest.raises(ValueError, match="ref_logprobs"):
        grpo_loss(batch["new"], given, loss_type="dapo", beta=0.1, **limits)
    with pytest.raises(ValueError, match="max_completion_length"):
        grpo_loss(batch["new"], given, loss_type="dr_grpo", **limits)
