"""One model, several ways to the same logits."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import TINY, TinyModel, message, sharp_params

from mdlm_jax import context as ctx
from mdlm_jax.models import attention, masks, rope, transformer


@pytest.fixture(scope="module")
def params():
    return sharp_params(1)


@pytest.fixture(scope="module")
def rows_BL():
    return jnp.asarray(np.random.default_rng(2).integers(0, TINY.vocab_size, (3, 17)))


@pytest.mark.parametrize("block", [1, 4, 8])
def test_reading_in_pieces_gives_the_logits_of_reading_at_once(params, rows_BL, block):
    model = TinyModel(block)
    length_B = jnp.array([17, 12, 9])
    expected = model.logits(params, rows_BL, length_B)
    context = model.memory(3, 20)
    done = np.zeros(3, int)
    for sizes in ([5, 3, 9], [1, 0, 0], [6, 8, 0], [5, 1, 0]):
        pieces = [
            rows_BL[b, n : n + s].tolist() for b, (n, s) in enumerate(zip(done, sizes, strict=True))
        ]
        done += sizes
        context = model.read(params, context, message(*pieces, width=9))
    np.testing.assert_array_equal(context.length, length_B)
    np.testing.assert_array_equal(context.tokens[0, :17], rows_BL[0])
    tokens, positions = ctx.window(context, context.cached, max(block, 2))
    live = positions < context.length[:, None]
    logits, _ = jax.jit(model.step)(params, tokens, positions, live, context.cache, context.cached)
    for row in range(3):
        places = np.asarray(positions[row])[np.asarray(live[row])]
        np.testing.assert_allclose(logits[row][live[row]], expected[row, places], atol=2e-4)


@jax.jit
def logits_of(params, tokens_BL, position_BL, sight):
    module = transformer.Transformer(TINY)
    hidden, _ = module.apply({"params": params}, tokens_BL, position_BL, sight)
    return module.apply({"params": params}, hidden, method="unembed")


@pytest.mark.parametrize("block", [1, 4])
def test_packed_segments_give_the_logits_of_rows_of_their_own(params, rows_BL, block):
    model, lengths = TinyModel(block), [6, 9]
    apart = model.logits(params, rows_BL[:2], jnp.array(lengths))
    tokens = jnp.concatenate([rows_BL[0, :6], rows_BL[1, :9], jnp.full(4, 11)])[None]
    position = jnp.concatenate([jnp.arange(6), jnp.arange(9), jnp.zeros(4, int)])[None]
    segment = jnp.array([[1] * 6 + [2] * 9 + [0] * 4])
    order = masks.order(position, block_length=block)
    sight = masks.Sight(segment, order, jnp.zeros(segment.shape, bool))
    packed = logits_of(params, tokens, position, sight)
    np.testing.assert_allclose(packed[0, :6], apart[0, :6], atol=2e-4)
    np.testing.assert_allclose(packed[0, 6:15], apart[1, :9], atol=2e-4)
    assert np.isfinite(packed).all()


@pytest.mark.parametrize("block", [1, 4])
def test_padding_never_changes_the_logits_of_real_tokens(params, rows_BL, block):
    model, length_B = TinyModel(block), jnp.array([17, 12, 9])
    first = model.logits(params, rows_BL, length_B)
    is_real = jnp.arange(17) < length_B[:, None]
    second = model.logits(params, jnp.where(is_real, rows_BL, 3), length_B)
    np.testing.assert_array_equal(first[is_real], second[is_real])


def test_a_row_does_not_depend_on_its_batch_mates(params, rows_BL):
    model, length_B = TinyModel(4), jnp.array([17, 12, 9])
    first = model.logits(params, rows_BL, length_B)
    second = model.logits(params, rows_BL[::-1].at[2].set(5), length_B[::-1])
    np.testing.assert_array_equal(first[1], second[1])
    np.testing.assert_array_equal(first[2], second[0])


def attention_case(seed: int, *, rows: int, width: int, sizes: list[int]) -> tuple:
    """Queries of 6 heads of width 4, and sources of 2 key heads with random sight."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    sources = [
        (normal(rows, size, 2, 4), normal(rows, size, 2, 4), rng.random((rows, width, size)) < 0.7)
        for size in sizes
    ]
    return normal(rows, width, 6, 4), sources


def test_the_row_by_row_path_equals_the_general_one_in_value_and_gradient():
    q, sources = attention_case(3, rows=3, width=5, sizes=[7, 5])

    def total(attend, q, key, value):
        pieces = [(key, value, sources[0][2]), sources[1]]
        return (jnp.sin(attend(q, pieces).reshape(3, 5, 24))).sum()

    arguments = (q, *sources[0][:2])
    both = (attention.attend, attention._attend_rows)
    graded = [jax.jit(jax.value_and_grad(partial(total, f), (0, 1, 2))) for f in both]
    (value, grads), (expected, expected_grads) = (f(*arguments) for f in graded)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(grad, expected_grad, atol=1e-5)


@pytest.mark.parametrize("ahead", [0, 2])
def test_keys_that_a_promise_rules_out_change_nothing(monkeypatch, ahead: int):
    """Five ordered places in pieces of two, then two that see everything."""
    monkeypatch.setattr(attention, "PIECE", 2)
    q, [(key, value, allowed)] = attention_case(5, rows=3, width=7, sizes=[7])
    near = np.arange(7) <= np.arange(7)[:, None] + ahead
    allowed = allowed & (near | (np.arange(7) >= 5)[:, None])
    sources = [(key, value, allowed)]

    def total(q, key, value, **promise):
        return jnp.sin(attention.attend(q, [(key, value, allowed)], **promise)).sum()

    whole = jax.jit(jax.value_and_grad(total, (0, 1, 2)))
    part = jax.jit(jax.value_and_grad(partial(total, prefix=5, ahead=ahead), (0, 1, 2)))
    (expected, expected_grads), (found, grads) = (f(q, key, value) for f in (whole, part))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(grad, expected_grad, atol=1e-5)
    np.testing.assert_allclose(
        jax.jit(partial(attention.attend, prefix=5, ahead=ahead))(q, sources),
        jax.jit(attention.attend)(q, sources),
        atol=1e-5,
    )


def test_attention_is_softmax_over_all_sources_with_shared_key_heads():
    q, sources = attention_case(4, rows=2, width=3, sizes=[5, 3])
    mixed = np.asarray(jax.jit(attention.attend)(q, sources)).reshape(2, 3, 6, 4)
    key, value, allowed = (
        np.concatenate(part, axis=i)
        for part, i in zip(zip(*sources, strict=True), (1, 1, 2), strict=True)
    )
    for row, place, head in np.ndindex(2, 3, 6):
        seen = np.flatnonzero(allowed[row, place])
        scores = key[row, seen, head // 3] @ np.asarray(q[row, place, head]) / 2
        weights = np.exp(scores - scores.max())
        expected = weights / weights.sum() @ value[row, seen, head // 3]
        np.testing.assert_allclose(mixed[row, place, head], expected, atol=1e-5)


def test_a_query_that_sees_nothing_is_finite():
    q, [(key, value, _)] = attention_case(4, rows=2, width=3, sizes=[4])
    assert np.isfinite(
        jax.jit(attention.attend)(q, [(key, value, jnp.zeros((2, 3, 4), bool))])
    ).all()


def test_rotation_keeps_lengths_and_depends_on_the_distance_only():
    x, y = np.random.default_rng(7).normal(size=(2, 8)).astype(np.float32)
    turned = jnp.array([[0, 3, 13, 8, 18]])
    angles = rope.angles(turned, turned >= 0, width=8, theta=100.0, scaling=None)
    rotated = jax.jit(rope.rotate)
    x_5, y_5 = (
        np.asarray(rotated(np.broadcast_to(v, (1, 5, 1, 8)), *angles))[0, :, 0] for v in (x, y)
    )
    np.testing.assert_allclose(x_5[1] @ y_5[3], x_5[2] @ y_5[4], rtol=1e-4)
    np.testing.assert_allclose(np.linalg.norm(x_5, axis=1), np.linalg.norm(x), rtol=1e-5)
    np.testing.assert_allclose(x_5[0], x)


def test_every_parameter_has_logical_axes_of_its_own_rank():
    config = dataclasses.replace(TINY, tie_word_embeddings=False)
    shapes = jax.eval_shape(lambda: transformer.init(jax.random.key(0), config))
    is_names = lambda leaf: isinstance(leaf, tuple)  # noqa: E731
    axes = jax.tree.leaves(transformer.axes(shapes), is_leaf=is_names)
    leaves = jax.tree.leaves(shapes)
    assert len(axes) == len(leaves)
    for names, leaf in zip(axes, leaves, strict=True):
        assert len(names) == len(leaf.shape)


def test_an_untied_head_has_weights_of_its_own():
    config = dataclasses.replace(TINY, tie_word_embeddings=False)
    params = sharp_params(0, config)
    assert params["lm_head"]["kernel"].shape == (TINY.hidden_size, TINY.vocab_size)
    ids = jax.ShapeDtypeStruct((2, 3), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)
    logits = jax.eval_shape(TinyModel(1, config).logits, params, *ids)
    assert logits.shape == (2, 3, TINY.vocab_size)
    assert logits.dtype == jnp.float32
