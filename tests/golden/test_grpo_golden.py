"""Our loss and advantages against TRL's (tests/golden/grpo/README.md defines every array)."""

import functools
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mdlm_jax.ops import mean_value
from mdlm_jax.rl.advantage import group_advantage
from mdlm_jax.rl.loss import LOSS_TYPES, PolicyBatch, grpo_loss
from mdlm_jax.structs import Mean

FOLDER = Path(os.environ.get("MDLM_JAX_GOLDEN", Path(__file__).parent)) / "grpo"
if not FOLDER.exists():
    pytest.skip(f"no golden folder {FOLDER}", allow_module_level=True)

GOLDEN = dict(np.load(FOLDER / "golden.npz"))
TINY = dict(np.load(FOLDER / "tiny_qwen3.npz"))
CONFIGS = [json.loads(str(text)) for text in GOLDEN["case_config"]]

# Case options whose code comes with a later issue.
LATER = ("top_entropy_quantile", "entropy_coef", "off_policy_threshold", "tis")
OLD = {"same": "logps_new", "diff": "logps_old", "near": "logps_old_near"}


def later(config: dict) -> str | None:
    """Why a case is not yet covered; None when it is."""
    missing = [key for key in LATER if config.get(key)]
    if config["loss_type"] not in LOSS_TYPES:
        missing.append(config["loss_type"])
    return ", ".join(missing) or None


STATIC = ("loss_type", "importance_sampling_level", "beta", "kl_bias_correction", "delta")


@functools.partial(jax.jit, static_argnames=(*STATIC, "max_completion_length"))
def loss_and_grad(logprobs, old, mask, advantages, ref, **options):
    """(Mean, metrics, d total / d logprobs); compiled once per set of static options."""

    def total(logprobs):
        mean, metrics = grpo_loss(logprobs, PolicyBatch(mask, advantages, old, ref), **options)
        return mean.total, (mean, metrics)

    (_, (mean, metrics)), grad = jax.value_and_grad(total, has_aux=True)(logprobs)
    return mean, metrics, grad


def run_case(config: dict, rows: slice = slice(None)):
    """`loss_and_grad` of a golden case, or of some rows of it."""
    return loss_and_grad(
        GOLDEN["logps_new"][rows],
        GOLDEN[OLD[config["old"]]][rows],
        GOLDEN["loss_mask"][rows],
        GOLDEN[f"adv_{config['adv']}"][rows],
        GOLDEN["logps_ref"][rows],
        loss_type=config["loss_type"],
        epsilon=config["eps_low"],
        epsilon_high=config["eps_high"],
        importance_sampling_level=config["is_level"],
        beta=config["beta"],
        kl_bias_correction=config["bias_corr_kl"],
        delta=config.get("delta"),
        max_completion_length=int(GOLDEN["max_completion_length"]),
    )


def window(config: dict, mean: Mean) -> tuple[float, float]:
    """TRL's divisor and its scaling for gradient accumulation, which our Mean leaves to the sum."""
    accum = config.get("grad_accum", 1)
    if config["loss_type"] != "dapo":
        return float(mean.count), 1 / accum
    return config.get("num_items", float(mean.count)), config.get("steps_per_generation", 1) / accum


@pytest.mark.parametrize("index", range(len(CONFIGS)), ids=[c["name"] for c in CONFIGS])
def test_loss_gradient_and_metrics(index):
    config = CONFIGS[index]
    if reason := later(config):
        pytest.skip(f"not yet covered: {reason}")
    mean, metrics, grad = run_case(config)
    count, factor = window(config, mean)

    golden = GOLDEN["case_loss"][index]
    assert abs(float(mean.total) / count * factor - golden) <= 2e-5 * (1e-3 + abs(golden))
    golden = GOLDEN["case_grad"][index]
    assert np.abs(grad / count * factor - golden).max() <= 2e-6 * np.abs(golden).max()
    for name, golden in zip(GOLDEN["metric_names"], GOLDEN["case_metrics"][index], strict=True):
        if name in metrics and not np.isnan(golden):
            np.testing.assert_allclose(mean_value(metrics[name]), golden, atol=1e-6, err_msg=name)


def test_every_plain_case_is_covered():
    assert not [config["name"] for config in CONFIGS[:288] if later(config)]


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_micro_batches_add_up(loss_type):
    """Cut into one micro-batch per prompt, the Means sum to TRL's accumulated loss and gradient."""
    config = {"loss_type": loss_type, "is_level": "token", "old": "diff", "adv": "group"}
    config |= {"eps_low": 0.2, "eps_high": 0.28, "beta": 0.04, "bias_corr_kl": False}
    group, rows = int(GOLDEN["num_generations"]), len(GOLDEN["rewards"])
    means, grads = [], []
    for start in range(0, rows, group):
        mean, _, grad = run_case(config, slice(start, start + group))
        means.append(mean)
        grads.append(grad)
    whole = sum(means[1:], start=means[0])

    golden = GOLDEN[f"accum_{loss_type}_micro_loss"].sum()
    assert abs(float(mean_value(whole)) - golden) <= 2e-5 * (1e-3 + abs(golden))
    golden = GOLDEN[f"accum_{loss_type}_grad"]
    grad = np.concatenate(grads) / whole.count
    assert np.abs(grad - golden).max() <= 2e-6 * np.abs(golden).max()
    if loss_type != "bnpo":
        golden = GOLDEN[f"accum_{loss_type}_full_loss"]
        assert abs(float(mean_value(whole)) - golden) <= 2e-5 * (1e-3 + abs(golden))


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("nan", ["", "_nan"])
def test_advantages(scale, nan):
    group = int(GOLDEN["num_generations"])
    advantage, metrics = group_advantage(
        jnp.asarray(GOLDEN[f"rewards{nan}"]), group=group, scale=scale
    )
    error = np.abs(advantage - GOLDEN[f"adv{nan}_{scale}"]).reshape(-1, group).max(axis=1)
    noisy = np.arange(len(error)) == 4  # rewards 1e-5 apart: float32 noise in the mean is amplified
    assert (error <= np.where(noisy, 1e-3, 5e-6)).all(), error
    for ours, golden in {
        "frac_reward_zero_std": f"frac_reward_zero_std{nan}_{scale}",
        "reward": f"reward_mean{nan}",
        "reward_std": f"reward_std{nan}",
    }.items():
        np.testing.assert_allclose(metrics[ours], GOLDEN[golden], atol=1e-6, err_msg=ours)


@pytest.mark.parametrize("temperature", ["1", "0.7"])
@pytest.mark.parametrize(
    "tag", ["grpo_token", "bnpo_token", "dr_grpo_token", "dapo_token", "grpo_sequence"]
)
def test_loss_on_log_probs_of_a_tiny_model(temperature, tag):
    loss_type, level = tag.rsplit("_", 1)
    key = f"T{temperature}/{tag}"

    mean, metrics, grad = loss_and_grad(
        TINY[f"logps_new/T{temperature}"],
        TINY[f"logps_old/T{temperature}"],
        TINY["loss_mask"],
        TINY["advantages"],
        TINY[f"logps_ref/T{temperature}"],
        loss_type=loss_type,
        epsilon=0.2,
        epsilon_high=0.28,
        importance_sampling_level=level,
        beta=0.04,
        kl_bias_correction=False,
        delta=None,
        max_completion_length=int(TINY["max_completion_length"]),
    )
    np.testing.assert_allclose(mean_value(mean), TINY[f"loss/{key}"], atol=5e-6)
    golden = TINY[f"dlogp/{key}"]
    assert np.abs(grad / mean.count - golden).max() <= 1e-5 * np.abs(golden).max()
    np.testing.assert_allclose(mean_value(metrics["kl"]), TINY[f"kl/{key}"], atol=1e-6)
    for side in ("low", "high"):
        np.testing.assert_allclose(
            mean_value(metrics[f"clip_ratio/{side}_mean"]),
            TINY[f"clip_{side}_mean/{key}"],
            atol=1e-6,
        )
