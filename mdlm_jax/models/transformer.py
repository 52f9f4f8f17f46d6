"""One decoder for every family, in Qwen3's form: pre-norm, RMSNorm, GQA, qk-norm, RoPE, SwiGLU.

Causal or bidirectional is a matter of the mask that is passed in, not of the model. Layers are stacked
with `nn.scan`; parameters are plain nested dicts; the cache is an ordinary argument, read only.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

from mdlm_jax.models import masks
from mdlm_jax.structs import Cache

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

    Sources stay apart until the scores, so that a cache is never copied to be joined with fresh keys.
    """
    B, W, H, K = q_BWHK.shape
    J = sources[0][0].shape[2]
    q_BWJGK = q_BWHK.reshape(B, W, J, H // J, K) * K**-0.5
    scores = [
        jnp.where(
            allowed_BWC[:, None, None],
            jnp.einsum("bwjgk,bcjk->bjgwc", q_BWJGK, key, preferred_element_type=jnp.float32),
            NEVER,
        )
        for key, _, allowed_BWC in sources
    ]
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(q_BWHK.dtype)
    edges = [sum(s.shape[-1] for s in scores[: i + 1]) for i in range(len(scores) - 1)]
    parts = jnp.split(weights, edges, axis=-1)
    mixed = sum(
        jnp.einsum("bjgwc,bcjk->bwjgk", part, value)
        for part, (_, value, _) in zip(parts, sources, strict=True)
    )
    return mixed.reshape(B, W, H * K)


class Attention(nn.Module):
    """Self-attention of a fresh window over itself and, if given, one layer of the cache."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BWD, positions_BW, allowed_BWW, layer_cache, cached_BWC):
        c = self.config
        dense = lambda heads, name: nn.Dense(heads * c.head_dim, use_bias=False, name=name)  # noqa: E731
        heads = lambda y: y.reshape(*y.shape[:2], -1, c.head_dim)  # noqa: E731
        norm = lambda name: RMSNorm(c.rms_norm_eps, name=name)  # noqa: E731
        q_BWHK = norm("q_norm")(heads(dense(c.num_attention_heads, "q_proj")(x_BWD)))
        k_BWJK = norm("k_norm")(heads(dense(c.num_key_value_heads, "k_proj")(x_BWD)))
        v_BWJK = heads(dense(c.num_key_value_heads, "v_proj")(x_BWD))
        q_BWHK = rotate(q_BWHK, positions_BW, theta=c.rope_theta)
        k_BWJK = rotate(k_BWJK, positions_BW, theta=c.rope_theta)
        sources = [(k_BWJK, v_BWJK, allowed_BWW)]
        if layer_cache is not None:
            sources.insert(0, (layer_cache.key, layer_cache.value, cached_BWC))
        mixed_BWE = attend(q_BWHK, sources)
        out_BWD = nn.Dense(c.hidden_size, use_bias=False, name="o_proj")(mixed_BWE)
        return out_BWD, Cache(k_BWJK, v_BWJK)


class Layer(nn.Module):
    """x += attention(norm(x)); x += mlp(norm(x)). Returns the layer's fresh keys and values too."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BWD, layer_cache, positions_BW, allowed_BWW, cached_BWC):
        c = self.config
        norm = lambda name: RMSNorm(c.rms_norm_eps, name=name)  # noqa: E731
        mixed_BWD, fresh = Attention(c, name="self_attn")(
            norm("input_layernorm")(x_BWD), positions_BW, allowed_BWW, layer_cache, cached_BWC
        )
        x_BWD = x_BWD + mixed_BWD
        y_BWD = norm("post_attention_layernorm")(x_BWD)
        gate = nn.Dense(c.intermediate_size, use_bias=False, name="gate_proj")(y_BWD)
        up = nn.Dense(c.intermediate_size, use_bias=False, name="up_proj")(y_BWD)
        down = nn.Dense(c.hidden_size, use_bias=False, name="down_proj")(nn.silu(gate) * up)
        return x_BWD + down, fresh


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
            self.lm_head = nn.Dense(c.vocab_size, use_bias=False)

    def __call__(
        self,
        tokens_BW: jax.Array,
        positions_BW: jax.Array,
        sight: masks.Sight,
        cache: Cache | None = None,
        cached_B: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache]:
        """Hidden states f[B, W, D] after the final norm, and fresh keys and values [N, B, W, J, K]."""
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
        names = AXES[keys[-2] if keys[-1] == "kernel" else keys[-1]]
        return ("layers", *names) if "layers" in keys else names

    return jax.tree_util.tree_map_with_path(name, params)
