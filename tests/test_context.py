"""The books of a context: what was appended, what is cached, what idle rows keep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import TINY, TinyModel, message, sharp_params

from mdlm_jax import context as ctx
from mdlm_jax.structs import Cache


@pytest.fixture(scope="module")
def params():
    return sharp_params(0)


def fill(context):
    return context.replace(length=jnp.array([2, 6]), cached=jnp.array([1, 6]))


def test_append_writes_behind_each_row_and_cuts_what_does_not_fit():
    context = fill(ctx.empty(2, 8, TINY.cache_shape, jnp.float32))
    after = ctx.append(context, message([9, 8], [7, 7, 7], width=4))
    np.testing.assert_array_equal(after.tokens[0], [0, 0, 9, 8, 0, 0, 0, 0])
    np.testing.assert_array_equal(after.tokens[1], [0, 0, 0, 0, 0, 0, 7, 7])
    np.testing.assert_array_equal(after.length, [4, 8])
    np.testing.assert_array_equal(ctx.room(after), [4, 0])


def test_align_fills_up_to_a_block_border_and_reads_nothing():
    context = ctx.empty(3, 12, TINY.cache_shape, jnp.float32)
    context = context.replace(length=jnp.array([5, 8, 11]), cached=jnp.array([5, 8, 11]))
    after = ctx.align(context, block=4, pad_id=9)
    np.testing.assert_array_equal(after.length, [8, 8, 12])
    np.testing.assert_array_equal(after.cached, context.cached)
    np.testing.assert_array_equal(after.tokens[0], [0] * 5 + [9] * 3 + [0] * 4)
    np.testing.assert_array_equal(after.tokens[1:].sum(1), [0, 9])


def test_a_window_past_the_end_reads_the_last_place():
    context = ctx.empty(2, 5, TINY.cache_shape, jnp.float32)
    context = context.replace(tokens=jnp.arange(10).reshape(2, 5))
    tokens, positions = ctx.window(context, jnp.array([0, 3]), 3)
    np.testing.assert_array_equal(tokens, [[0, 1, 2], [8, 9, 9]])
    np.testing.assert_array_equal(positions, [[0, 1, 2], [3, 4, 5]])


def test_put_and_write_drop_what_is_not_kept_or_lies_outside():
    positions = jnp.array([[3, 4, 5], [0, 1, 2]])
    keep = jnp.array([[True, True, True], [False, True, False]])
    values = jnp.array([[7, 8, 9], [4, 5, 6]])
    put = ctx.put(jnp.zeros((2, 5), jnp.int32), values, positions, keep)
    np.testing.assert_array_equal(put, [[0, 0, 0, 7, 8], [0, 5, 0, 0, 0]])
    old = jnp.zeros((4, 2, 1, 5, 1))
    fresh = jnp.broadcast_to(values[None, :, None, :, None], (4, 2, 1, 3, 1)).astype(jnp.float32)
    new = ctx.write(Cache(old, old), Cache(fresh, -fresh), positions, keep)
    np.testing.assert_array_equal(new.key[3, :, 0, :, 0], put)
    np.testing.assert_array_equal(new.value[0, :, 0, :, 0], -put)


@pytest.mark.parametrize("block", [1, 4])
def test_an_idle_row_keeps_its_books_and_its_cache(params, block):
    model = TinyModel(block)
    context = model.memory(2, 16)
    before = model.read(params, context, message([3, 4, 5, 6, 7], [8, 9, 3, 4, 5, 6], width=6))
    after = model.read(params, before, message([3, 4], [], width=3))
    same = lambda x: x[:, 1] if x.ndim == 5 else x[1]  # noqa: E731
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(same(old), same(new))
    np.testing.assert_array_equal(after.length, [7, 6])
    np.testing.assert_array_equal(after.cached, [6, 5] if block == 1 else [4, 4])


@pytest.mark.parametrize("block", [1, 4])
def test_what_is_settled_is_cached_and_nothing_else(params, block):
    model = TinyModel(block)
    stale = model.memory(2, 16)
    after = model.read(params, stale, message([3, 4, 5, 6, 7], [8, 9, 10], width=6))
    written = np.asarray((after.cache.key != stale.cache.key).all(axis=(0, 2, 4)))
    np.testing.assert_array_equal(written, np.arange(16) < np.asarray(after.cached)[:, None])


def test_begin_gives_each_prompt_to_its_group_and_forgets_the_past(params):
    model = TinyModel(4)
    prompts = message([3, 4, 5, 6, 7], [8, 9, 3], width=6)
    started = model.begin(params, prompts, model.memory(6, 13), 3)
    np.testing.assert_array_equal(started.length, [5, 5, 5, 3, 3, 3])
    np.testing.assert_array_equal(started.cached, [4, 4, 4, 0, 0, 0])
    np.testing.assert_array_equal(started.tokens[2, :5], [3, 4, 5, 6, 7])
    np.testing.assert_array_equal(started.tokens[3, :3], [8, 9, 3])
    alone = model.read(params, model.memory(2, 13), prompts)
    expected = np.repeat(np.asarray(alone.cache.key)[:, :, :, :4], 3, axis=1)[:, :3]
    np.testing.assert_allclose(started.cache.key[:, :3, :, :4], expected, atol=1e-5)
