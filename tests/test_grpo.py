"""Pieces of an update are cut to their rows; nothing but padding is lost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mdlm_jax.programs import grpo
from mdlm_jax.rl import loss
from mdlm_jax.structs import Mean


def a_piece(lengths: list[int], size: int) -> grpo.Piece:
    rows = len(lengths)
    inside = np.arange(size) < np.array(lengths)[:, None]
    numbers = np.random.default_rng(0).normal(size=(rows, size)).astype(np.float32)
    return grpo.Piece(
        tokens=jnp.array(inside * np.arange(1, size + 1), jnp.int32),
        length=jnp.array(lengths, jnp.int32),
        batch=loss.PolicyBatch(
            mask=jnp.array(inside),
            advantages=jnp.arange(1.0, rows + 1),
            old_logprobs=jnp.array(numbers),
        ),
    )


def a_loss(params: jax.Array, piece: grpo.Piece):
    """Knows its width, so that a test sees what it was given."""
    batch = piece.batch
    values = params * piece.tokens * batch.advantages[:, None] + batch.old_logprobs
    total = Mean((values * batch.mask).sum(), batch.mask.sum().astype(jnp.float32))
    return total, {"width": Mean(jnp.float32(piece.tokens.shape[1]), jnp.float32(1))}


@pytest.mark.parametrize(
    ("lengths", "width"), [([1, 2, 3], 3), ([3, 4], 6), ([9, 2], 9), ([10, 3], 11), ([0, 0], 3)]
)
def test_a_piece_is_cut_to_the_shortest_length_that_holds_its_rows(lengths, width):
    piece = a_piece(lengths, size=11)
    (whole, _), (cut, metrics) = (
        jax.jit(f)(jnp.float32(0.5), piece) for f in (a_loss, grpo.cut(a_loss))
    )
    assert metrics["width"].total == width
    np.testing.assert_allclose(cut.total, whole.total, rtol=1e-6)
    assert cut.count == whole.count


def test_gradients_of_a_cut_piece_are_those_of_the_whole():
    piece = a_piece([2, 5], size=8)
    whole, cut = (
        jax.grad(lambda p, f=f: f(p, piece)[0].total)(jnp.float32(0.5))
        for f in (a_loss, grpo.cut(a_loss))
    )
    np.testing.assert_allclose(cut, whole, rtol=1e-6)
    assert abs(whole) > 1
