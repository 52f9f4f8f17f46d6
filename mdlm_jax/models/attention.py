"""Attention of a fresh window over itself and a cache that is only read."""

import itertools
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from mdlm_jax.models import rope
from mdlm_jax.models.blocks import QUIET, Linear, RMSNorm
from mdlm_jax.models.config import ModelConfig

NEVER = -1e30  # finite, so that a query that sees nothing stays free of NaN
PIECE = 128  # queries that look at the same stretch of keys


def attend(
    q_BWHK: jax.Array,
    sources: list[tuple[jax.Array, jax.Array, jax.Array]],
    *,
    prefix: int = 0,
    ahead: int = 0,
) -> jax.Array:
    """Softmax attention over several (key [B,C,J,K], value, allowed bool[B,W,C]) sources at once.

    Sources stay apart until the scores: a cache is never copied to be joined with fresh keys. With
    the promise of `masks.Sight`, keys that no query can see are not looked at; that needs a single
    source.
    """
    B, W, H, K = q_BWHK.shape
    if W > 1 and jax.default_backend() == "cpu":
        # One row at a time, recomputed in the backward pass: its scores stay in a core's cache,
        # which is 3.5 times faster than scores f32[B, H, W, C] in memory (576 places, 4 heads, 2
        # cores).
        row = jax.checkpoint(partial(_attend_row, prefix=prefix, ahead=ahead))
        return jax.lax.map(row, (q_BWHK, sources)).reshape(B, W, H * K)
    return _attend_rows(q_BWHK, sources).reshape(B, W, H * K)


def _attend_row(row: tuple[jax.Array, list[tuple]], *, prefix: int, ahead: int) -> jax.Array:
    """`_attend_rows` of one row, without the leading axis, in pieces of the prefix and the rest."""
    q_1WHK, sources = jax.tree.map(lambda x: x[None], row)
    borders = [*range(0, prefix, PIECE), prefix, q_1WHK.shape[1]]
    pieces = []
    for start, end in itertools.pairwise(borders):
        if start == end:
            continue
        seen = end + ahead if end <= prefix else None
        cut = [
            (k[:, :seen], v[:, :seen], allowed[:, start:end, :seen]) for k, v, allowed in sources
        ]
        pieces.append(_attend_rows(q_1WHK[:, start:end], cut)[0])
    return jnp.concatenate(pieces)


def _attend_rows(q_BWHK: jax.Array, sources: list[tuple]) -> jax.Array:
    """softmax(q k / sqrt(K)) v, the softmax in float32 over all sources together: f[B, W, H, K]."""
    B, W, H, K = q_BWHK.shape
    J = sources[0][0].shape[2]
    # Queries that share a key head are laid side by side: plain matrix products, no repeated keys.
    q_BJQK = (q_BWHK * K**-0.5).reshape(B, W, J, H // J, K).transpose(0, 2, 3, 1, 4)
    q_BJQK = q_BJQK.reshape(B, J, -1, K)

    def scores(key_BCJK, allowed_BWC):
        raw = jnp.einsum("bjqk,bcjk->bjqc", q_BJQK, key_BCJK, preferred_element_type=jnp.float32)
        raw = raw.reshape(B, J, H // J, W, -1)
        return jnp.where(allowed_BWC[:, None, None], raw, NEVER)

    scores_s = [scores(key, allowed) for key, _, allowed in sources]
    top = jnp.max(jnp.stack([s.max(-1, keepdims=True) for s in scores_s]), axis=0)
    top = jax.lax.stop_gradient(top)
    exp_s = [jnp.exp(s - top) for s in scores_s]
    total = sum(e.sum(-1, keepdims=True) for e in exp_s)
    mixed = sum(
        jnp.einsum("bjgwc,bcjk->bjgwk", e.astype(value.dtype), value)
        for e, (_, value, _) in zip(exp_s, sources, strict=True)
    )
    mixed_BJGWK = mixed / total.astype(mixed.dtype)
    return mixed_BJGWK.transpose(0, 3, 1, 2, 4).reshape(B, W, H, K)


class Attention(nn.Module):
    """Self-attention of a fresh window over itself and, if given, one layer of the cache."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BWD, view, cached):
        """Mixed values f[B, W, D] and the fresh (key, value), f[B, W, J, K] each.

        `view` is a `transformer.View`; `cached` a (key, value), f[B, C, J, K] each, or None.
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
        sources, prefix = [(k_BWJK, v_BWJK, view.allowed)], view.prefix
        if cached is not None:
            sources, prefix = [(*cached, view.cached_allowed), *sources], 0
        out = Linear(c.hidden_size, c.attention_out_bias, QUIET, name="o_proj")
        mixed_BWE = attend(q_BWHK, sources, prefix=prefix, ahead=view.ahead)
        return out(mixed_BWE), (k_BWJK, v_BWJK)

    def _project(self, x_BWD, name: str, heads: int) -> jax.Array:
        c = self.config
        flat = Linear(heads * c.head_dim, c.attention_bias, name=f"{name}_proj")(x_BWD)
        return flat.reshape(*x_BWD.shape[:2], heads, c.head_dim)
