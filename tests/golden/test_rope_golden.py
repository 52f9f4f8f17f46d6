"""Rotary embeddings in every variant of the hub, against transformers' tables."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from mdlm_jax.models import families, rope


@pytest.mark.golden("rope_variants")
def test_tables(golden: Path):
    arrays = np.load(golden / "golden.npz")
    variants = json.loads((golden / "golden.json").read_text())
    for name, variant in variants.items():
        theta, scaling = families.rope_parameters(variant)
        width = variant["head_dim"]
        lengths = {
            key.split("__T")[1].split("__")[0] for key in arrays if key.startswith(f"{name}__")
        }
        assert lengths
        for text in lengths:
            length = int(text)
            positions = jnp.arange(length)[None]
            # A short row beside it must not change the long one.
            positions = jnp.concatenate([positions, positions * 0])
            live = jnp.ones(positions.shape, bool)
            cos, sin = rope.angles(positions, live, width=width, theta=theta, scaling=scaling)
            both = lambda x: np.concatenate([x[0, :, 0]] * 2, axis=-1)  # noqa: E731
            found, factor = rope.frequencies(width, theta, scaling, jnp.array([length]))
            frequency = arrays[f"{name}__T{text}__inv_freq"]
            np.testing.assert_allclose(found[0], frequency, rtol=1e-5, err_msg=name)
            np.testing.assert_allclose(factor, variant["attention_scaling"], rtol=1e-6)
            np.testing.assert_allclose(
                both(cos), arrays[f"{name}__T{text}__cos"], atol=2e-5, err_msg=name
            )
            np.testing.assert_allclose(
                both(sin), arrays[f"{name}__T{text}__sin"], atol=2e-5, err_msg=name
            )
