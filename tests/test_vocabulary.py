"""A causal checkpoint becomes a masked diffusion model: a mask row, everything else kept."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from fakes import TINY, TinyModel, sharp_params

from mdlm_jax.models import vocabulary


@pytest.mark.parametrize("tied", [True, False])
def test_a_full_vocabulary_gets_a_row_and_the_rest_is_kept(tied: bool):
    config = dataclasses.replace(TINY, tie_word_embeddings=tied)
    params = sharp_params(1, config)
    words = config.vocab_size
    wider, config_, mask = vocabulary.with_mask(params, config, words=words, multiple=8)
    assert (mask, config_.vocab_size) == (words, 24)
    rows = jnp.arange(2 * 7).reshape(2, 7) % words
    length = jnp.array([7, 4])
    before = TinyModel(1, config).logits(params, rows, length)
    after = TinyModel(1, config_).logits(wider, rows, length)
    np.testing.assert_array_equal(after[..., :words], before)
    table = np.asarray(wider["embed_tokens"]["embedding"])
    np.testing.assert_allclose(table[words], table[:words].mean(0), rtol=1e-5)
    masked = TinyModel(4, config_).logits(wider, rows.at[:, 3].set(mask), length)
    assert np.isfinite(masked).all()


def test_a_spare_row_is_the_mask_s_and_nothing_changes():
    params = sharp_params(1)
    same, config, mask = vocabulary.with_mask(params, TINY, words=TINY.vocab_size - 2)
    assert same is params
    assert config is TINY
    assert mask == TINY.vocab_size - 2
