"""Attention of a fresh window over itself and a cache that is only read."""

import itertools
from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from mdlm_jax.models import rope
from mdlm_jax.models.blocks import QUIET, Linear, RMSNorm
from mdlm_jax.models.config import ModelConfig
from mdlm_jax.structs import Cache

NEVER = -1e30  # finite, so that a query that sees nothing stays free of NaN
PIECE = 128  # queries that look at the same stretch of keys


class Source(NamedTuple):
    """Keys and values of one window, and which query may see which of them."""

    key: jax.Array  # f[B, J, C, K]
    value: jax.Array  # f[B, J, C, K]
    allowed: jax.Array  # bool[B, W, C]


class Past(NamedTuple):
    """One layer of a cache, which is not cut out of it before it is read."""

    cache: Cache
    layer: jax.Array  # i32[]
    allowed: jax.Array  # bool[B, W, C]


def attend(
    q_BWHK: jax.Array,
    fresh: Source,
    past: Past | None = None,
    *,
    prefix: int = 0,
    ahead: int = 0,
) -> jax.Array:
    """Softmax attention over a cached past and a fresh window at once, f[B, W, H * K].

    The two stay apart until the scores: a cache is never copied to be joined with fresh keys. With
    the promise of `masks.Sight` and without a past, keys that no query can see are not looked at.
    """
    B, W, H, K = q_BWHK.shape
    if _on_one_cpu():
        # One row at a time: its scores and its part of the cache stay in a core's own cache. In
        # training, where it is recomputed in the backward pass, that is 3.5 times faster than
        # scores f32[B, H, W, C] in memory (576 places, 4 heads, 2 cores); over a large cache,
        # 3 times faster than to cut the layer out of it.
        row = jax.checkpoint(partial(_attend_row, past=past, prefix=prefix, ahead=ahead))
        mixed = jax.lax.map(row, (jnp.arange(B), q_BWHK, fresh))
    else:
        sources = [fresh] if past is None else [_cut(past, slice(None)), fresh]
        mixed = _attend_rows(q_BWHK, sources)
    return mixed.reshape(B, W, H * K)


def _on_one_cpu() -> bool:
    """Whether rows can be taken one by one: spread over devices, each would have to be fetched."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.default_backend() == "cpu" and (mesh.empty or mesh.size == 1)


def _cut(past: Past, rows: slice | jax.Array) -> Source:
    key, value = (x[past.layer, rows] for x in (past.cache.key, past.cache.value))
    return Source(key, value, past.allowed[rows])


def _attend_row(
    numbered: tuple[jax.Array, jax.Array, Source], *, past: Past | None, prefix: int, ahead: int
) -> jax.Array:
    """`_attend_rows` of one row, without the leading axis, in pieces of the prefix and the rest."""
    number, *row = numbered
    q_1WHK, fresh = jax.tree.map(lambda x: x[None], tuple(row))
    if past is not None:
        known = jax.tree.map(lambda x: x[None], _cut(past, number))
        return _attend_rows(q_1WHK, [known, fresh])[0]
    borders = [*range(0, prefix, PIECE), prefix, q_1WHK.shape[1]]
    pieces = []
    for start, end in itertools.pairwise(borders):
        if start == end:
            continue
        seen = end + ahead if end <= prefix else None
        near = Source(
            fresh.key[:, :, :seen], fresh.value[:, :, :seen], fresh.allowed[:, start:end, :seen]
        )
        pieces.append(_attend_rows(q_1WHK[:, start:end], [near])[0])
    return jnp.concatenate(pieces)


def _attend_rows(q_BWHK: jax.Array, sources: list[Source]) -> jax.Array:
    """softmax(q k / sqrt(K)) v, the softmax in float32 over all sources together: f[B, W, H, K]."""
    B, W, H, K = q_BWHK.shape
    J = sources[0].key.shape[1]
    # Queries that share a key head are laid side by side: plain matrix products, no repeated keys.
    q_BJQK = (q_BWHK * K**-0.5).reshape(B, W, J, H // J, K).transpose(0, 2, 3, 1, 4)
    q_BJQK = q_BJQK.reshape(B, J, -1, K)

    def scores(source):
        raw = jnp.einsum("bjqk,bjck->bjqc", q_BJQK, source.key, preferred_element_type=jnp.float32)
        raw = raw.reshape(B, J, H // J, W, -1)
        return jnp.where(source.allowed[:, None, None], raw, NEVER)

    scores_s = [scores(source) for source in sources]
    top = jnp.max(jnp.stack([s.max(-1, keepdims=True) for s in scores_s]), axis=0)
    top = jax.lax.stop_gradient(top)
    exp_s = [jnp.exp(s - top) for s in scores_s]
    total = sum(e.sum(-1, keepdims=True) for e in exp_s)
    mixed = sum(
        jnp.einsum("bjgwc,bjck->bjgwk", e.astype(source.value.dtype), source.value)
        for e, source in zip(exp_s, sources, strict=True)
    )
    mixed_BJGWK = mixed / total.astype(mixed.dtype)
    return mixed_BJGWK.transpose(0, 3, 1, 2, 4).reshape(B, W, H, K)


class Attention(nn.Module):
    """Self-attention of a fresh window over itself and, if there is one, a layer of the cache."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BWD, view, layer):
        """Mixed values f[B, W, D] and the fresh (key, value), f[B, J, W, K] each.

        `view` is a `transformer.View`; `layer` i32[] counts the attention layers.
        """
        c = self.config
        project = partial(self._project, x_BWD)
        q_BWHK = project("q", c.num_attention_heads)
        k_BWJK = project("k", c.num_key_value_heads)
        v_BWJK = project("v", c.num_key_value_heads)
        if c.qk_norm:
            q_BWHK = RMSNorm(c.rms_norm_eps, name="q_norm")(q_BWHK)
            k_BWJK = RMSNorm(c.rms_norm_eps, name="k_norm")(k_BWJK)
        q_BWHK, k_BWJK = rope.rotate(q_BWHK, *view.turn), rope.rotate(k_BWJK, *view.turn)
        k_BJWK, v_BJWK = (x.transpose(0, 2, 1, 3) for x in (k_BWJK, v_BWJK))
        past = None
        if view.cache is not None:
            past = Past(view.cache, layer, view.cached_allowed)
        mixed_BWE = attend(
            q_BWHK, Source(k_BJWK, v_BJWK, view.allowed), past, prefix=view.prefix, ahead=view.ahead
        )
        out = Linear(c.hidden_size, c.attention_out_bias, QUIET, name="o_proj")
        return out(mixed_BWE), (k_BJWK, v_BJWK)

    def _project(self, x_BWD, name: str, heads: int) -> jax.Array:
        c = self.config
        flat = Linear(heads * c.head_dim, c.attention_bias, name=f"{name}_proj")(x_BWD)
        return flat.reshape(*x_BWD.shape[:2], heads, c.head_dim)
