"""Small stand-ins that several tests share: tiny random models, and speakers that follow rules."""

import dataclasses
import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from mdlm_jax import context as ctx
from mdlm_jax.models import masks, transformer
from mdlm_jax.models.config import ModelConfig
from mdlm_jax.structs import Cache, CacheShape, Context, Generation, Message, Speaker

# All sizes differ, so that a mixed-up axis can't pass. Three query heads share a key head.
TINY = ModelConfig(
    vocab_size=23,
    hidden_size=10,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=4,
    intermediate_size=14,
)


@functools.cache
def sharp_params(seed: int, config: ModelConfig = TINY) -> dict:
    """Random parameters, larger than at a training's start: decided choices, strong attention.

    Drawn on the host, which compiles nothing.
    """
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: transformer.init(jax.random.key(0), config))

    def draw(path, shape):
        is_norm = path[-1].key == "weight"
        return jnp.asarray(is_norm + rng.normal(0, 0.7, shape.shape), shape.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


@dataclasses.dataclass(frozen=True)
class TinyModel:
    """A tiny random decoder with the signature of a step function. Block length 1 is causal."""

    block: int
    config: ModelConfig = TINY

    def hidden(self, params, tokens_BW, positions_BW, live_BW, cache=None, cached_B=None):
        """Hidden states and fresh keys and values."""
        sight = masks.clean(live_BW, masks.order(positions_BW, block_length=self.block))
        module = transformer.Transformer(self.config)
        return module.apply({"params": params}, tokens_BW, positions_BW, sight, cache, cached_B)

    def step(self, params, tokens_BW, positions_BW, live_BW, cache=None, cached_B=None):
        """Logits and fresh keys and values."""
        hidden, fresh = self.hidden(params, tokens_BW, positions_BW, live_BW, cache, cached_B)
        module = transformer.Transformer(self.config)
        return module.apply({"params": params}, hidden, method="unembed"), fresh

    @partial(jax.jit, static_argnums=0)
    def logits(self, params, tokens_BL, length_B):
        """Logits f32[B, L, V] of whole rows at once, without a cache."""
        positions_BL = jnp.broadcast_to(jnp.arange(tokens_BL.shape[1]), tokens_BL.shape)
        live_BL = positions_BL < length_B[:, None]
        return self.step(params, tokens_BL, positions_BL, live_BL)[0]

    def settled(self, length_B):
        """How many leading tokens of a context may be cached."""
        whole_B = length_B // self.block * self.block
        return whole_B if self.block > 1 else jnp.maximum(length_B - 1, 0)

    @partial(jax.jit, static_argnums=0)
    def read(self, params, context, message):
        """Reads a message as this kind of model does."""
        pending = max(self.block - 1, 1)
        step_fn, rule = self.hidden, {"pending": pending, "settled": self.settled}
        return ctx.read(step_fn, params, context, message, **rule)

    @partial(jax.jit, static_argnums=(0, 4))
    def begin(self, params, prompts, context, group):
        """Reads the prompts of groups."""
        return ctx.begin(partial(self.read, params), prompts, context, group=group)

    def speaker(self, write) -> Speaker:
        """A speaker that reads with this model and writes with `write`."""
        return Speaker(begin=self.begin, read=self.read, write=partial(write, self.step))

    def memory(self, rows: int, size: int) -> Context:
        """An empty context whose memory still holds what an earlier use left in it."""
        context = ctx.empty(rows, size, self.config.cache_shape, jnp.float32)
        stale = jax.tree.map(lambda x: x + 7.0, context.cache)
        return context.replace(tokens=context.tokens + 5, cache=stale)


@dataclasses.dataclass(frozen=True)
class SlotCausal(TinyModel):
    """A tiny decoder that is causal by slot, whatever the positions; it caches all it has read."""

    block: int = 1

    def hidden(self, params, tokens_BW, positions_BW, live_BW, cache=None, cached_B=None):
        """Hidden states and fresh keys and values."""
        slots_BW = jnp.broadcast_to(jnp.arange(tokens_BW.shape[1]), tokens_BW.shape)
        module, sight = transformer.Transformer(self.config), masks.clean(live_BW, slots_BW)
        return module.apply({"params": params}, tokens_BW, positions_BW, sight, cache, cached_B)

    def settled(self, length_B):
        """All of it: the loop feeds masks, never the last token again."""
        return length_B


def message(*rows: list[int], width: int) -> Message:
    """Ids as a message. Behind its length stand ids that nobody may read."""
    tokens = np.full((len(rows), width), 21, np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    return Message(jnp.asarray(tokens), jnp.asarray([len(ids) for ids in rows], jnp.int32))


def texts(generation: Generation) -> list[list[int]]:
    """What each row wrote."""
    lengths = np.asarray(generation.length)
    tokens = np.asarray(generation.tokens)
    return [row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)]


# ---- a scripted model: what it wants to say, and how sure it is, place by place ------------------


def scripted(params, tokens_BW, positions_BW, live_BW, cache, cached_B):
    """Logits that favour `script[row, position]` by `sure[row, position]`. Needs no cache."""
    del live_BW, cache, cached_B
    want_BW = ctx.at(params["script"], positions_BW)
    sure_BW = ctx.at(params["sure"], positions_BW)
    rows, width = tokens_BW.shape
    empty = jnp.zeros((1, rows, 1, width, 1))
    return jax.nn.one_hot(want_BW, 12) * sure_BW[..., None], Cache(empty, empty)


def script_of(
    scripts: list[list[int]], prompts: list[list[int]], *, rows: int | None = None
) -> np.ndarray:
    """Each row's words behind its prompt, 7 everywhere else: i32[rows, 32]."""
    script = np.full((rows or len(scripts), 32), 7, np.int32)
    for row, (words, prompt) in enumerate(zip(scripts, prompts, strict=True)):
        script[row, len(prompt) : len(prompt) + len(words)] = words
    return script


# ---- a dialogue by rule: the policy says one word, the world repeats it and judges it ------------

PLAYING, SOLVED, END, BABBLE, SYSTEM = 1, 2, 3, 4, 5
ANSWER_WIDTH = 4  # of an observation; the world's answer takes two
ACTION_WIDTH = 3


def _read(params, context: Context, heard: Message) -> Context:
    del params
    return ctx.append(context, heard)


def _begin(params, prompts: Message, context: Context, group: int) -> Context:
    return ctx.begin(partial(_read, params), prompts, context, group=group)


def _write(context: Context, tokens_BW, length_B, stopped_B, logprobs_BW) -> tuple:
    """Appends what a rule has chosen and books it as a generation."""
    width = tokens_BW.shape[1]
    written_BW = jnp.arange(width) < length_B[:, None]
    tokens_BW = jnp.where(written_BW, tokens_BW, 0)
    ones_B = (length_B > 0).astype(jnp.int32)
    said = Generation(
        tokens=tokens_BW,
        length=length_B,
        sampled=written_BW,
        logprobs=jnp.where(written_BW, logprobs_BW, 0.0),
        order=written_BW.astype(jnp.int32),
        stopped=stopped_B & (length_B > 0),
        forwards=ones_B,
        commits=ones_B,
        fed=ones_B,
    )
    return said, ctx.append(context, Message(tokens_BW, length_B))


def _policy_write(script_BT, keys_B, context: Context, active_B):
    """Row b's next word of `script_BT`, then END; a random word where the script says -1.

    The turn is the number of messages that ended in the context so far.
    """
    is_past_BC = jnp.arange(context.tokens.shape[1]) < context.length[:, None]
    turn_B = jnp.sum((context.tokens == END) & is_past_BC, axis=1) - 1
    word_B = jnp.take_along_axis(script_BT, turn_B[:, None], axis=1)[:, 0]
    draw_B = jax.vmap(lambda key: jax.random.randint(key, (), 6, 20))(keys_B)
    word_B = jnp.where(word_B < 0, draw_B, word_B)
    tokens_BW = jnp.stack([word_B, jnp.full_like(word_B, END), word_B], axis=1)
    logprobs_BW = -jnp.stack([word_B, turn_B + 1, word_B], axis=1).astype(jnp.float32)
    length_B = jnp.where(active_B, 2, 0)
    return _write(context, tokens_BW, length_B, active_B, logprobs_BW)


def _world_write(params, keys_B, context: Context, active_B):
    """Repeats the action. Solved if it is the task's goal, the second token of the prompt.

    BABBLE makes the world write all it may, and never stop.
    """
    del params, keys_B
    said_B1 = jnp.maximum(context.length - 2, 0)[:, None]
    word_B = jnp.take_along_axis(context.tokens, said_B1, axis=1)[:, 0]
    status_B = jnp.where(word_B == context.tokens[:, 1], SOLVED, PLAYING)
    babbles_B = word_B == BABBLE
    status_B = jnp.where(babbles_B, BABBLE, status_B)
    tokens_BW = jnp.stack([word_B, status_B, word_B, word_B], axis=1)
    length_B = jnp.where(active_B, jnp.where(babbles_B, ANSWER_WIDTH, 2), 0)
    zeros_BW = jnp.zeros(tokens_BW.shape)
    return _write(context, tokens_BW, length_B, ~babbles_B, zeros_BW)


rule_policy = Speaker(begin=_begin, read=_read, write=_policy_write)
rule_world = Speaker(begin=_begin, read=_read, write=_world_write)


def rule_memory(rows: int, size: int) -> Context:
    """A context for a speaker by rule: its cache is a formality."""
    return ctx.empty(rows, size, CacheShape(1, 1, 1), jnp.float32)
