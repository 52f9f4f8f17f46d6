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
from mdlm_jax.structs import Cache


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


@pytest.mark.parametrize(("block", "chunk"), [(1, 3), (4, 4), (4, 8)])
def test_reading_in_chunks_is_reading_at_once(params, rows_BL, block, chunk):
    """Rows of 15, 2 and 0 new tokens behind a few that were read before."""
    model = TinyModel(block)
    rule = {"pending": max(block - 1, 1), "settled": model.settled}
    read = partial(ctx.read, model.hidden, **rule)
    start = model.read(params, model.memory(3, 20), message([5], [6, 7, 8], [9], width=3))
    new = message(rows_BL[0, :15].tolist(), rows_BL[1, :2].tolist(), [], width=15)
    whole = jax.jit(read)(params, start, new)
    parts = jax.jit(partial(read, chunk=chunk))(params, start, new)
    for name in ("tokens", "length", "cached"):
        np.testing.assert_array_equal(getattr(parts, name), getattr(whole, name))
    known = (np.arange(20) < np.asarray(whole.cached)[:, None])[None, :, None, :, None]
    np.testing.assert_allclose(
        np.where(known, parts.cache.key, 0), np.where(known, whole.cache.key, 0), atol=1e-5
    )


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


def attention_case(seed: int, *, rows: int, width: int, size: int, cached: int) -> tuple:
    """Queries of 6 heads of width 4, a window and layer 1 of a cache, with 2 key heads each."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    sight = lambda size: jnp.asarray(rng.random((rows, width, size)) < 0.7)  # noqa: E731
    fresh = attention.Source(normal(rows, 2, size, 4), normal(rows, 2, size, 4), sight(size))
    cache = Cache(normal(3, rows, 2, cached, 4), normal(3, rows, 2, cached, 4))
    past = attention.Past(cache, jnp.int32(1), sight(cached))
    return normal(rows, width, 6, 4), fresh, past


def test_the_row_by_row_path_equals_the_general_one_in_value_and_gradient():
    q, fresh, past = attention_case(3, rows=3, width=5, size=5, cached=7)

    def general(q, fresh, past):
        return attention._attend_rows(q, [attention._cut(past, slice(None)), fresh])

    def total(attend, q, key, value):
        mixed = attend(q, fresh._replace(key=key, value=value), past)
        return jnp.sin(mixed.reshape(3, 5, 24)).sum()

    graded = [
        jax.jit(jax.value_and_grad(partial(total, f), (0, 1, 2)))
        for f in (attention.attend, general)
    ]
    arguments = (q, fresh.key, fresh.value)
    (value, grads), (expected, expected_grads) = (f(*arguments) for f in graded)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(grad, expected_grad, atol=1e-5)


@pytest.mark.parametrize("ahead", [0, 2])
def test_keys_that_a_promise_rules_out_change_nothing(monkeypatch, ahead: int):
    """Five ordered places in pieces of two, then two that see everything."""
    monkeypatch.setattr(attention, "PIECE", 2)
    q, fresh, _ = attention_case(5, rows=3, width=7, size=7, cached=1)
    near = np.arange(7) <= np.arange(7)[:, None] + ahead
    fresh = fresh._replace(allowed=fresh.allowed & (near | (np.arange(7) >= 5)[:, None]))

    def total(q, key, value, **promise):
        mixed = attention.attend(q, fresh._replace(key=key, value=value), **promise)
        return jnp.sin(mixed).sum(), mixed

    def graded(**promise):
        f = jax.value_and_grad(partial(total, **promise), (0, 1, 2), has_aux=True)
        return jax.jit(f)(q, fresh.key, fresh.value)

    ((_, expected), expected_grads), ((_, mixed), grads) = graded(), graded(prefix=5, ahead=ahead)
    np.testing.assert_allclose(mixed, expected, atol=1e-5)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(grad, expected_grad, atol=1e-5)


def test_attention_is_softmax_over_past_and_window_with_shared_key_heads():
    q, fresh, past = attention_case(4, rows=2, width=3, size=3, cached=5)
    mixed = np.asarray(jax.jit(attention.attend)(q, fresh, past)).reshape(2, 3, 6, 4)
    key = np.concatenate([past.cache.key[1], fresh.key], axis=2)
    value = np.concatenate([past.cache.value[1], fresh.value], axis=2)
    allowed = np.concatenate([past.allowed, fresh.allowed], axis=2)
    for row, place, head in np.ndindex(2, 3, 6):
        seen = np.flatnonzero(allowed[row, place])
        scores = key[row, head // 3, seen] @ np.asarray(q[row, place, head]) / 2
        weights = np.exp(scores - scores.max())
        expected = weights / weights.sum() @ value[row, head // 3, seen]
        np.testing.assert_allclose(mixed[row, place, head], expected, atol=1e-5)


def test_a_query_that_sees_nothing_is_finite():
    q, fresh, _ = attention_case(4, rows=2, width=3, size=4, cached=1)
    blind = fresh._replace(allowed=jnp.zeros((2, 3, 4), bool))
    assert np.isfinite(jax.jit(attention.attend)(q, blind)).all()


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
