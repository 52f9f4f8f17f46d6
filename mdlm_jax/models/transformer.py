"""One decoder for every family, in Qwen3's form: pre-norm, RMSNorm, GQA, qk-norm, RoPE, SwiGLU.

Causal or bidirectional is a matter of the mask that is passed in, not of the model. Layers are
stacked with `nn.scan`; parameters are plain nested dicts; the cache is an ordinary argument, read
only.
"""

import dataclasses
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from mdlm_jax.models import masks
from mdlm_jax.structs import Cache

# Layers start by adding little to the residual stream, so that a token is still itself at the top.
QUIET = 0.1
NEVER = -1e30  # finite, so that a query that sees nothing stays free of NaN


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder, in Hugging Face's field names."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    attention_bias: bool = False

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """(layers, kv heads, head width): what one cached token takes."""
        return self.num_hidden_layers, self.num_key_value_heads, self.head_dim


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in float32."""

    eps: float

    @nn.compact
    def __call__(self, x):
        weight = self.param("weight", nn.initializers.ones, (x.shape[-1],))
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * scale).astype(x.dtype) * weight


def rotate(x_BWHK: jax.Array, positions_BW: jax.Array, *, theta: float) -> jax.Array:
    """RoPE, half-split: dimension i turns with i + K/2 by the angle position * theta^(-2i/K)."""
    half = x_BWHK.shape[-1] // 2
    frequency_k = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_BW1k = positions_BW[:, :, None, None] * frequency_k
    cos, sin = jnp.cos(angle_BW1k), jnp.sin(angle_BW1k)
    left, right = jnp.split(x_BWHK.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return turned.astype(x_BWHK.dtype)


def attend(q_BWHK: jax.Array, sources: list[tuple[jax.Array, jax.Array, jax.Array]]) -> jax.Array:
    """Softmax attention over several (key [B,C,J,K], value, allowed bool[B,W,C]) sources at once.

    Sources stay apart until the scores: a cache is never copied to be joined with fresh keys.
    """
    B, W, H, K = q_BWHK.shape
    if W > 1 and jax.default_backend() == "cpu":
        # One row at a time, recomputed in the backward pass: its scores stay in a core's cache,
        # which is 3.5 times faster than scores f32[B, H, W, C] in memory (576 places, 4 heads, 2
        # cores).
        return jax.lax.map(_attend_row, (q_BWHK, sources)).reshape(B, W, H * K)
    return _attend_rows(q_BWHK, sources).reshape(B, W, H * K)


@jax.checkpoint
def _attend_row(row: tuple[jax.Array, list[tuple]]) -> jax.Array:
    """`_attend_rows` of one row, without the leading axis."""
    q_1WHK, sources = jax.tree.map(lambda x: x[None], row)
    return _attend_rows(q_1WHK, sources)[0]


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


class Linear(nn.Module):
    """x @ kernel (+ bias), over the last axis."""

    features: int
    bias: bool = False
    gain: float = 1.0  # of the initial output

    @nn.compact
    def __call__(self, x):
        shape = (x.shape[-1], self.features)
        normal = nn.initializers.variance_scaling(self.gain**2, "fan_in", "truncated_normal")
        kernel = self.param("kernel", normal, shape)
        # Two axes, not three: on XLA's CPU back end the weight gradient is twice as fast.
        flat = x.reshape(-1, x.shape[-1]) @ kernel.astype(x.dtype)
        if self.bias:
            bias = self.param("bias", nn.initializers.zeros, (self.features,))
            flat = flat + bias.astype(x.dtype)
        return flat.reshape(*x.shape[:-1], self.features)


class Attention(nn.Module):
    """Self-attention of a fresh window over itself and, if given, one layer of the cache."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BWD, positions_BW, allowed_BWW, layer_cache, cached_BWC):
        c = self.config
        B, W, _ = x_BWD.shape
        norm = partial(RMSNorm, c.rms_norm_eps)
        turn = partial(rotate, positions_BW=positions_BW, theta=c.rope_theta)
        q_BWE = Linear(c.num_attention_heads * c.head_dim, c.attention_bias, name="q_proj")(x_BWD)
        k_BWE = Linear(c.num_key_value_heads * c.head_dim, c.attention_bias, name="k_proj")(x_BWD)
        v_BWE = Linear(c.num_key_value_heads * c.head_dim, c.attention_bias, name="v_proj")(x_BWD)
        q_BWHK = turn(norm(name="q_norm")(q_BWE.reshape(B, W, -1, c.head_dim)))
        k_BWJK = turn(norm(name="k_norm")(k_BWE.reshape(B, W, -1, c.head_dim)))
        fresh = Cache(k_BWJK, v_BWE.reshape(B, W, -1, c.head_dim))
        sources = [(fresh.key, fresh.value, allowed_BWW)]
        if layer_cache is not None:
            sources.insert(0, (layer_cache.key, layer_cache.value, cached_BWC))
        out_BWD = Linear(c.hidden_size, c.attention_bias, QUIET, name="o_proj")(
            attend(q_BWHK, sources)
        )
        return out_BWD, fresh


class Layer(nn.Module):
    """x += attention(norm(x)); x += mlp(norm(x)). Returns the layer's fresh keys and values too."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BWD, layer_cache, positions_BW, allowed_BWW, cached_BWC):
        c = self.config
        norm = partial(RMSNorm, c.rms_norm_eps)
        mixed_BWD, fresh = Attention(c, name="self_attn")(
            norm(name="input_layernorm")(x_BWD), positions_BW, allowed_BWW, layer_cache, cached_BWC
        )
        x_BWD = x_BWD + mixed_BWD
        y_BWD = norm(name="post_attention_layernorm")(x_BWD)
        gate_BWF = Linear(c.intermediate_size, name="gate_proj")(y_BWD)
        up_BWF = Linear(c.intermediate_size, name="up_proj")(y_BWD)
        down_BWD = Linear(c.hidden_size, gain=QUIET, name="down_proj")(nn.silu(gate_BWF) * up_BWF)
        return x_BWD + down_BWD, fresh


class Transformer(nn.Module):
    """ids -> hidden states; `unembed` turns those into logits, only where they are wanted."""

    config: ModelConfig

    def setup(self):
        c = self.config
        self.embed_tokens = nn.Embed(c.vocab_size, c.hidden_size)
        self.layers = nn.scan(
            Layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast, nn.broadcast, nn.broadcast),
            length=c.num_hidden_layers,
        )(c)
        self.norm = RMSNorm(c.rms_norm_eps)
        if not c.tie_word_embeddings:
            self.lm_head = Linear(c.vocab_size)

    def __call__(
        self,
        tokens_BW: jax.Array,
        positions_BW: jax.Array,
        sight: masks.Sight,
        cache: Cache | None = None,
        cached_B: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache]:
        """Hidden states f[B, W, D] after the last norm; fresh keys and values [N, B, W, J, K]."""
        allowed_BWW = masks.visible(sight, sight)
        cached_BWC = None
        if cache is not None:
            inside_BC = jnp.arange(cache.key.shape[2]) < cached_B[:, None]
            cached_BWC = jnp.broadcast_to(
                inside_BC[:, None], (*tokens_BW.shape, inside_BC.shape[1])
            )
        x_BWD = self.embed_tokens(tokens_BW)
        x_BWD, fresh = self.layers(x_BWD, cache, positions_BW, allowed_BWW, cached_BWC)
        return self.norm(x_BWD), fresh

    def unembed(self, hidden: jax.Array) -> jax.Array:
        """Logits f32[..., V]."""
        if self.config.tie_word_embeddings:
            return self.embed_tokens.attend(hidden).astype(jnp.float32)
        return self.lm_head(hidden).astype(jnp.float32)

    def initialise(self, tokens_BW: jax.Array) -> jax.Array:
        """Touches every parameter; only for `init`."""
        positions_BW = jnp.broadcast_to(jnp.arange(tokens_BW.shape[1]), tokens_BW.shape)
        sight = masks.clean(jnp.ones(tokens_BW.shape, bool), positions_BW)
        return self.unembed(self(tokens_BW, positions_BW, sight)[0])


def init(key: jax.Array, config: ModelConfig) -> dict:
    """Random parameters."""
    model = Transformer(config)
    return model.init(key, jnp.zeros((1, 2), jnp.int32), method="initialise")["params"]


# Logical axes of each parameter by its name; a leading "layers" axis is added under the scan.
AXES = {
    "embedding": ("vocab", "embed"),
    "q_proj": ("embed", "heads"),
    "k_proj": ("embed", "heads"),
    "v_proj": ("embed", "heads"),
    "o_proj": ("heads", "embed"),
    "gate_proj": ("embed", "mlp"),
    "up_proj": ("embed", "mlp"),
    "down_proj": ("mlp", "embed"),
    "lm_head": ("embed", "vocab"),
    "weight": (None,),
}


def axes(params: dict) -> dict:
    """The same tree with a tuple of logical axis names for each parameter."""

    def name(path, leaf):
        keys = [part.key for part in path]
        names = AXES[keys[-2] if keys[-1] in ("kernel", "bias") else keys[-1]]
        names = names[1:] if keys[-1] == "bias" else names
        return ("layers", *names) if "layers" in keys else names

    return jax.tree_util.tree_map_with_path(name, params)
