"""Our filters and sampler against transformers' logits processors (tests/golden/sampling)."""

import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mdlm_jax import ops, sampling

FOLDER = Path(os.environ.get("MDLM_JAX_GOLDEN", Path(__file__).parent)) / "sampling"
if not FOLDER.exists():
    pytest.skip(f"no golden folder {FOLDER}", allow_module_level=True)

GOLDEN = dict(np.load(FOLDER / "sampling.npz"))
CASES = [json.loads(str(text)) for text in GOLDEN["cases"]]
DRAWS = 100_000


def filtered(case: dict) -> jax.Array:
    """The case's parameters, applied in transformers' order."""
    logits = jnp.asarray(GOLDEN[case["logits"]])
    penalty = case.get("repetition_penalty") or 1.0
    logits = sampling.repetition_penalty(logits, jnp.asarray(GOLDEN[case["context"]]), penalty)
    logits = sampling.scale(logits, temperature=case.get("temperature") or 1.0)
    keep = {"min_keep": case.get("min_tokens_to_keep", 1)}
    logits = sampling.top_k_filter(logits, case.get("top_k") or 0, **keep)
    logits = sampling.top_p_filter(logits, case.get("top_p") or 1.0, **keep)
    return sampling.min_p_filter(logits, case.get("min_p") or 0.0, **keep)


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_filters(case):
    ours, golden = np.asarray(filtered(case)), GOLDEN[f"{case['name']}/filtered_logits"]
    kept = GOLDEN[f"{case['name']}/kept"]
    np.testing.assert_array_equal(np.isfinite(ours), kept)
    np.testing.assert_allclose(ours[kept], golden[kept], rtol=1e-4)
    np.testing.assert_allclose(jax.nn.softmax(ours), GOLDEN[f"{case['name']}/probs"], atol=1e-5)


@pytest.mark.parametrize("size", ["small", "large"])
def test_logprobs_entropy_and_kept_mass(size):
    """The pipeline T = 0.7, top_k 20, top_p 0.9: filtered = temperature only - log(kept mass)."""
    logits = jnp.asarray(GOLDEN[f"logits_{size}"])
    token = jnp.asarray(GOLDEN[f"{size}/token"])
    plain = sampling.scale(logits, temperature=0.7)
    kept = sampling.filter_logits(logits, temperature=0.7, top_k=20, top_p=0.9)
    mass = jnp.sum(jnp.where(jnp.isfinite(kept), jax.nn.softmax(plain), 0.0), axis=-1)

    for ours, golden in {
        "token_logprob_temperature_only": ops.token_logprobs(plain, token),
        "token_logprob_filtered": ops.token_logprobs(kept, token),
        "entropy_temperature_only": ops.entropy(plain),
        "kept_mass": mass,
    }.items():
        np.testing.assert_allclose(golden, GOLDEN[f"{size}/{ours}"], atol=2e-5, err_msg=ours)


@pytest.mark.parametrize(
    "name", [case["name"] for case in CASES if case.get("pipeline") and "small" in case["name"]]
)
def test_draws_follow_the_golden_distribution(name):
    case = next(case for case in CASES if case["name"] == name)
    logits = filtered(case)[:3]  # f32[3, V]
    keys = jax.random.split(jax.random.key(3), DRAWS)

    @jax.jit
    def frequencies(row):
        rows = jnp.broadcast_to(row, (DRAWS, *row.shape))
        ids, _ = sampling.sample(keys, rows, temperature=1.0)
        return jnp.bincount(ids, length=row.shape[0]) / DRAWS

    for row, probs in zip(logits, GOLDEN[f"{name}/probs"], strict=False):
        drawn = np.asarray(frequencies(row))
        assert not drawn[probs == 0].any(), "a removed token was drawn"
        bound = 4.5 * np.sqrt(probs * (1 - probs) / DRAWS) + 3 / DRAWS
        assert (np.abs(drawn - probs) < bound).all()
