"""One decoder for every family: pre-norm layers of a mixer and a feed-forward part.

Causal or bidirectional is a matter of the mask that is passed in, not of the model. Neighbouring
layers of one form are stacked with `nn.scan`; parameters are plain nested dicts; the cache is an
ordinary argument, read only.
"""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from mdlm_jax.models import conv, masks, rope
from mdlm_jax.models.attention import Attention
from mdlm_jax.models.blocks import GatedMLP, Linear, RMSNorm
from mdlm_jax.models.config import ModelConfig, Run
from mdlm_jax.models.experts import Experts
from mdlm_jax.structs import Cache

UNLIMITED = 2**30  # a window wider than any context


@struct.dataclass
class View:
    """What all layers share: rotary angles, who sees whom, who precedes whom."""

    turn: tuple[jax.Array, jax.Array]  # cosine and sine, f32[B, W, 1, K/2]
    allowed: jax.Array  # bool[B, W, W]
    cached_allowed: jax.Array | None = None  # bool[B, W, C]
    distance: jax.Array | None = None  # i32[B, W, W]  where there are sliding windows
    cached_distance: jax.Array | None = None  # i32[B, W, C]
    source: tuple[jax.Array, jax.Array] | None = None  # see `conv.sources`
    cache: Cache | None = None
    prefix: int = struct.field(pytree_node=False, default=0)  # see `masks.Sight`
    ahead: int = struct.field(pytree_node=False, default=0)


def look(
    config: ModelConfig,
    positions_BW: jax.Array,
    sight: masks.Sight,
    cache: Cache | None = None,
    cached_B: jax.Array | None = None,
) -> View:
    """The view of a window, over a cache or without one."""
    allowed_BWW = masks.visible(sight, sight)
    turn = rope.angles(
        positions_BW,
        sight.segment > 0,
        width=config.head_dim,
        theta=config.rope_theta,
        scaling=config.rope_scaling,
    )
    view = View(turn, allowed_BWW, cache=cache, prefix=sight.prefix, ahead=sight.ahead)
    places_C = jnp.arange(0 if cache is None else cache.key.shape[3])
    if cache is not None:
        inside_BC = places_C < cached_B[:, None]
        shape_BWC = (*positions_BW.shape, len(places_C))
        view = view.replace(cached_allowed=jnp.broadcast_to(inside_BC[:, None], shape_BWC))
    if "sliding_attention" in config.mixers:
        view = view.replace(
            distance=positions_BW[:, :, None] - positions_BW[:, None, :],
            cached_distance=positions_BW[:, :, None] - places_C,
        )
    if "conv" in config.mixers:
        taps = config.conv_L_cache
        view = view.replace(source=conv.sources(positions_BW, allowed_BWW, cached_B, taps=taps))
    return view


def within(view: View, window: jax.Array | None) -> View:
    """The view of a layer that sees `window` keys only; None = all."""
    if window is None:
        return view
    view = view.replace(allowed=view.allowed & (view.distance < window))
    if view.cache is None:
        return view
    return view.replace(cached_allowed=view.cached_allowed & (view.cached_distance < window))


class Layer(nn.Module):
    """x += mixer(norm(x)); x += feed_forward(norm(x)). Returns what its cache keeps, too."""

    config: ModelConfig
    run: Run

    @nn.compact
    def __call__(self, x_BWD, layer, window, view: View):
        """`layer` counts those of this layer's kind; `view` is the same for all layers."""
        c = self.config
        norm = partial(RMSNorm, c.rms_norm_eps)
        y_BWD = norm(name="input_layernorm")(x_BWD)
        if self.run.mixer == "conv":
            cached = None if view.cache is None else view.cache.conv[layer]
            mixed_BWD, fresh = conv.ShortConv(c, name="conv")(y_BWD, view.source, cached)
        else:
            own = within(view, window)
            mixed_BWD, fresh = Attention(c, name="self_attn")(y_BWD, own, layer)
        x_BWD = x_BWD + mixed_BWD
        y_BWD = norm(name="post_attention_layernorm")(x_BWD)
        if self.run.feed_forward == "experts":
            return x_BWD + Experts(c, name="mlp")(y_BWD), fresh
        return x_BWD + GatedMLP(c.intermediate_size, c.mlp_bias, name="mlp")(y_BWD), fresh


class Layers(nn.Module):
    """All layers, run by run: one scan for each run, so most models have exactly one."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BWD, view: View) -> tuple[jax.Array, Cache]:
        """The last layer's output f[B, W, D] and the fresh cache of all layers."""
        fresh = {"attention": [], "conv": []}
        done = {"attention": 0, "conv": 0}  # layers of each kind so far
        for number, run in enumerate(self.config.runs):
            numbers = done[run.mixer] + jnp.arange(run.length)
            done[run.mixer] += run.length
            stack = nn.scan(
                Layer,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=(0, 0, nn.broadcast),
                length=run.length,
            )(self.config, run, name=str(number))
            x_BWD, kept = stack(x_BWD, numbers, self._windows(run), view)
            fresh[run.mixer].append(kept)
        return x_BWD, _join(fresh)

    def _windows(self, run: Run) -> jax.Array | None:
        """Keys that each layer of the run may see, i32[n]; None where no layer has a limit."""
        kinds = [self.config.mixers[layer] for layer in run.layers]
        if "sliding_attention" not in kinds:
            return None
        wide = [
            self.config.sliding_window if k == "sliding_attention" else UNLIMITED for k in kinds
        ]
        return jnp.asarray(wide, jnp.int32)


class Transformer(nn.Module):
    """ids -> hidden states; `unembed` turns those into logits, only where they are wanted."""

    config: ModelConfig

    def setup(self):
        c = self.config
        self.embed_tokens = nn.Embed(c.vocab_size, c.hidden_size)
        self.layers = Layers(c)
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
        """Hidden states f[B, W, D] after the last norm, and what a cache keeps of the window.

        The fresh cache has W places: keys and values [N, B, J, W, K] of the attention layers, and
        the inputs [N, B, W, D] of the convolutions, if there are any.
        """
        view = look(self.config, positions_BW, sight, cache, cached_B)
        x_BWD, fresh = self.layers(self.embed_tokens(tokens_BW), view)
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


def _join(fresh: dict[str, list]) -> Cache:
    """One cache of all layers, from the runs' parts."""
    join = lambda parts: jax.tree.map(lambda *x: jnp.concatenate(x), *parts)  # noqa: E731
    key, value = join(fresh["attention"])
    return Cache(key, value, join(fresh["conv"]) if fresh["conv"] else None)


def init(key: jax.Array, config: ModelConfig) -> dict:
    """Random parameters."""
    model = Transformer(config)
    return model.init(key, jnp.zeros((1, 2), jnp.int32), method="initialise")["params"]


# Logical axes of each parameter by its name, or its module's name; under the scan a leading
# "layers" axis is added.
AXES = {
    "embedding": ("vocab", "embed"),
    "q_proj": ("embed", "heads"),
    "k_proj": ("embed", "heads"),
    "v_proj": ("embed", "heads"),
    "o_proj": ("heads", "embed"),
    "in_proj": ("embed", "mlp"),
    "conv": (None, "mlp"),
    "out_proj": ("mlp", "embed"),
    "gate_proj": ("embed", "mlp"),
    "up_proj": ("embed", "mlp"),
    "down_proj": ("mlp", "embed"),
    "lm_head": ("embed", "vocab"),
    "gate": ("embed", None),
    "weight": (None,),
}


def axes(params: dict) -> dict:
    """The same tree with a tuple of logical axis names for each parameter."""

    def name(path, leaf):
        keys = [part.key for part in path]
        owner = keys[-2] if keys[-1] in ("kernel", "bias") else keys[-1]
        names = AXES[owner]
        if keys[-1] == "bias":
            names = names[-1:]
        layers = ("layers",) if "layers" in keys else ()
        experts = (None,) * (leaf.ndim - len(names) - len(layers))
        return (*layers, *experts, *names)

    return jax.tree_util.tree_map_with_path(name, params)
