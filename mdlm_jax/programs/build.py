"""Config -> mesh, models and speakers."""

import dataclasses
import pathlib
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from mdlm_jax import check, ops, sampling
from mdlm_jax import context as ctx
from mdlm_jax.autoregressive import decode, score
from mdlm_jax.diffusion import denoise, stream
from mdlm_jax.models import masks, transformer
from mdlm_jax.models.config import ModelConfig
from mdlm_jax.rl import reward, rollout
from mdlm_jax.structs import Context, Generation, Message, Speaker
from mdlm_jax.tokens import batches, tokenizer
from mdlm_jax.tokens.tokenizer import Specials, Tokenizer
from mdlm_jax.train import checkpoint, mesh

VOCAB_MULTIPLE = 64
READ_CHUNK = 8  # tokens of a turn that are read at once; many turns are no longer


@dataclasses.dataclass(frozen=True)
class Model:
    """A Transformer's functions and its shape; no parameters inside."""

    config: ModelConfig
    words: int  # ids of the tokenizer; the model's vocabulary may be padded beyond them
    order_length: int  # block length of the text, and of the mask; 1 = causal
    by_slot: bool = False  # causal in the order of the window, wherever its tokens stand (WeDLM)

    def hidden(self, params: dict, tokens_BW, positions_BW, live_BW, cache=None, cached_B=None):
        """Hidden states and fresh keys and values of one clean segment per row."""
        order_BW = masks.order(positions_BW, block_length=self.order_length)
        if self.by_slot:
            order_BW = jnp.broadcast_to(jnp.arange(tokens_BW.shape[1]), tokens_BW.shape)
        sight = masks.clean(live_BW, order_BW)
        module = transformer.Transformer(self.config)
        return module.apply({"params": params}, tokens_BW, positions_BW, sight, cache, cached_B)

    def train_hidden(self, params: dict, tokens_BW, positions_BW, sight: masks.Sight) -> jax.Array:
        """Hidden states under a training mask."""
        module = transformer.Transformer(self.config)
        return module.apply({"params": params}, tokens_BW, positions_BW, sight)[0]

    def unembed(self, params: dict, hidden: jax.Array) -> jax.Array:
        """Logits f32[..., V]."""
        module = transformer.Transformer(self.config)
        return module.apply({"params": params}, hidden, method="unembed")


def model(shape: ConfigDict, *, vocab_size: int, order_length: int, by_slot: bool = False) -> Model:
    """The model of `config.world.model` or `config.policy.model`.

    Its vocabulary is rounded up, so that it can be split over the tensor axis of any usual mesh.
    """
    padded = -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    return Model(ModelConfig(vocab_size=padded, **shape), vocab_size, order_length, by_slot)


def world_model(config: ConfigDict, vocab_size: int) -> Model:
    """The world's model: block-causal for diffusion, causal for the autoregressive baseline."""
    return model(
        config.world.model,
        vocab_size=vocab_size,
        order_length=config.world.block_length if config.world.kind == "diffusion" else 1,
        by_slot=is_streamed(config),
    )


def is_streamed(config: ConfigDict) -> bool:
    """Whether the world writes by a sliding window, as WeDLM does, and not by blocks."""
    return config.world.kind == "diffusion" and config.world.objective == "wedlm"


def policy_model(config: ConfigDict, vocab_size: int) -> Model:
    """The policy's model."""
    return model(config.policy.model, vocab_size=vocab_size, order_length=1)


def make_mesh(config: ConfigDict) -> jax.sharding.Mesh:
    """The mesh of `config.mesh`, as a user's error if it can't be made."""
    with check.user_errors():
        return mesh.make(**config.mesh)


def trained_world(config: ConfigDict) -> str:
    """Folder of the trained world under the workdir."""
    return f"world_{config.world.kind}"


def load_world(
    workdir: pathlib.Path, config: ConfigDict, model: Model, on: jax.sharding.Mesh
) -> dict:
    """The trained world's parameters, where a rollout wants them."""
    folder = workdir / trained_world(config) / "params"
    return load_params(folder, model, on, made_by="python -m mdlm_jax sft --what=world")


def load_tokenizer(workdir: pathlib.Path) -> Tokenizer:
    """The tokenizer that `sft --what=world` trained."""
    with check.user_errors():
        return tokenizer.load(workdir / "tokenizer.json")


def abstract_params(model: Model, on: jax.sharding.Mesh, *, layout: str = "train") -> dict:
    """Shapes, dtypes and shardings of a model's parameters in one of the two layouts."""
    shapes = jax.eval_shape(lambda: transformer.init(jax.random.key(0), model.config))
    with check.user_errors():
        shardings = LAYOUTS[layout](on, transformer.axes(shapes), shapes)
    place = lambda s, at: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=at)  # noqa: E731
    return jax.tree.map(place, shapes, shardings)


# Training splits parameters; a rollout wants them whole on every device.
LAYOUTS = {
    "train": mesh.param_shardings,
    "rollout": lambda on, axes, shapes: jax.tree.map(lambda _: mesh.replicated(on), shapes),
}


def init_params(key: jax.Array, model: Model, on: jax.sharding.Mesh) -> dict:
    """Random parameters in the training layout."""
    shardings = jax.tree.map(lambda s: s.sharding, abstract_params(model, on))
    return jax.jit(partial(transformer.init, config=model.config), out_shardings=shardings)(key)


def load_params(
    folder: pathlib.Path,
    model: Model,
    on: jax.sharding.Mesh,
    *,
    made_by: str,
    layout: str = "rollout",
) -> dict:
    """Saved parameters in one of the two layouts."""
    with check.user_errors():
        return checkpoint.load_params(
            folder, abstract_params(model, on, layout=layout), made_by=made_by
        )


def rollout_shardings(model: Model, on: jax.sharding.Mesh) -> dict:
    """Where a rollout wants a model's parameters."""
    return jax.tree.map(lambda s: s.sharding, abstract_params(model, on, layout="rollout"))


# ---- speakers --------------------------------------------------------------------------------


def step_fn(model: Model, forbidden: tuple[int, ...]) -> Callable:
    """A forward pass that returns logits, without the tokens that must never be chosen."""
    forbidden = (*forbidden, *range(model.words, model.config.vocab_size))

    def step(params, tokens_BW, positions_BW, live_BW, cache, cached_B):
        hidden, fresh = model.hidden(params, tokens_BW, positions_BW, live_BW, cache, cached_B)
        return sampling.forbid(model.unembed(params, hidden), forbidden), fresh

    return step


def speaker(
    model: Model, write: Callable, *, pending: int, settled: Callable, slot: int, pad_id: int
) -> Speaker:
    """Puts a way of writing together with the reading that fits it.

    Turns are filled up to whole slots as they are read; prompts come filled from the host.
    """
    read_fn = partial(ctx.read, model.hidden, pending=pending, settled=settled)
    chunk = max(READ_CHUNK, model.order_length)

    def read(params: dict, context: Context, message: Message) -> Context:
        filled = ctx.fill(message, slot=slot, pad_id=pad_id)
        return read_fn(params, context, filled, chunk=chunk)

    def begin(params: dict, prompts: Message, context: Context, group: int) -> Context:
        return ctx.begin(partial(read_fn, params), prompts, context, group=group)

    return Speaker(begin=begin, read=read, write=write)


def diffusion_speaker(
    model: Model, special: Specials, *, stop_ids: tuple[int, ...], world: ConfigDict
) -> Speaker:
    """Writes by unmasking blocks in parallel."""
    block = model.order_length
    write = partial(
        denoise.generate,
        step_fn(model, forbidden_while_unmasking(special, stop_ids)),
        plan=denoise.Plan(
            strategy=world.strategy,
            block=block,
            steps=world.denoising_steps,
            threshold=world.threshold,
            temperature=world.temperature,
            max_tokens=world.max_tokens,
            stop_ids=stop_ids,
            mask_id=special.mask,
            pad_id=special.pad,
        ),
    )
    return speaker(
        model,
        write,
        pending=block - 1,
        settled=lambda n_B: n_B // block * block,
        slot=world.slot,
        pad_id=special.pad,
    )


def stream_speaker(
    model: Model, special: Specials, *, stop_ids: tuple[int, ...], world: ConfigDict
) -> Speaker:
    """Writes by a window that slides as its first places are filled."""
    block = model.order_length
    step = step_fn(model, forbidden_while_unmasking(special, stop_ids))
    plan = stream.Plan(
        window=world.stream.window,
        max_tokens=world.max_tokens,
        mask_id=special.mask,
        threshold=world.stream.threshold,
        penalty=world.stream.penalty,
        temperature=world.temperature,
        stop_ids=stop_ids,
    )

    def write(params: dict, keys_B, context: Context, active_B) -> tuple[Generation, Context]:
        said, context = stream.generate(step, params, keys_B, context, active_B, plan=plan)
        # In training, too, a turn is filled up to a block border. It is read with the next one.
        return said, ctx.align(context, block=block, pad_id=special.pad)

    return speaker(
        model,
        write,
        pending=block - 1,
        settled=lambda n_B: n_B,
        slot=world.slot,
        pad_id=special.pad,
    )


def forbidden_while_unmasking(special: Specials, stop_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Special tokens that a diffusion world never writes.

    Padding is not among them: behind the stop token it is what the model was taught to write.
    """
    return tuple(i for i in forbidden_ids(special, stop_ids) if i != special.pad)


def autoregressive_speaker(
    model: Model,
    special: Specials,
    *,
    stop_ids: tuple[int, ...],
    temperature: float,
    max_tokens: int,
    slot: int = 1,
) -> Speaker:
    """Writes one token at a time."""
    write = partial(
        decode.generate,
        step_fn(model, forbidden_ids(special, stop_ids)),
        temperature=temperature,
        max_tokens=max_tokens,
        stop_ids=stop_ids,
    )
    return speaker(
        model,
        write,
        pending=1,
        settled=lambda n_B: jnp.maximum(n_B - 1, 0),
        slot=slot,
        pad_id=special.pad,
    )


def forbidden_ids(special: Specials, stop_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Special tokens that an autoregressive speaker never writes: all but its own stops."""
    return tuple(i for i in dataclasses.astuple(special) if i not in stop_ids)


def world_speaker(config: ConfigDict, model: Model, special: Specials) -> Speaker:
    """The world, whichever kind it is."""
    world = config.world
    if world.kind == "diffusion":
        make = stream_speaker if is_streamed(config) else diffusion_speaker
        return make(model, special, stop_ids=special.statuses, world=world)
    return autoregressive_speaker(
        model,
        special,
        stop_ids=special.statuses,
        temperature=world.temperature,
        max_tokens=world.max_tokens,
        slot=world.slot,
    )


def policy_speaker(
    config: ConfigDict, model: Model, special: Specials, *, temperature: float
) -> Speaker:
    """The agent."""
    return autoregressive_speaker(
        model,
        special,
        stop_ids=(special.end,),
        temperature=temperature,
        max_tokens=config.policy.max_tokens,
    )


def judge(special: Specials) -> Callable:
    """Success from the world's status token."""
    return partial(reward.status_judge, solved_id=special.solved, failed_id=special.failed)


def memory(rows: int, *, size: int, model: Model, on: jax.sharding.Mesh) -> Context:
    """An empty context, its rows split over the mesh."""
    shapes = jax.eval_shape(lambda: ctx.empty(rows, size, model.config.cache_shape, jnp.float32))
    at = jax.tree.map(lambda s: mesh.row_axis(on, 1 if s.ndim >= 4 else 0), shapes)
    make = jax.jit(
        lambda: ctx.empty(rows, size, model.config.cache_shape, jnp.float32), out_shardings=at
    )
    return make()


def action_logprobs(model: Model, special: Specials) -> Callable:
    """(params, tokens_BL, length_B, temperature) -> log-probs and entropies f32[B, L].

    As the policy samples: with the same forbidden tokens, so that the first update's ratios are
    one.
    """
    step = step_fn(model, forbidden_ids(special, (special.end,)))

    def logprobs(params: dict, tokens_BL: jax.Array, length_B: jax.Array, temperature: float):
        positions_BL = jnp.broadcast_to(jnp.arange(tokens_BL.shape[1]), tokens_BL.shape)
        live_BL = ops.length_mask(length_B, tokens_BL.shape[1])
        logits_BLV, _ = step(params, tokens_BL, positions_BL, live_BL, None, None)
        logits_BLV = sampling.scale(logits_BLV, temperature=temperature)
        entropy_BL = jnp.pad(ops.entropy(logits_BLV[:, :-1]), ((0, 0), (1, 0)))
        return score.next_token_logprobs(logits_BLV, tokens_BL), entropy_BL

    return logprobs


def messages(texts_ids: list[list[int]], on: jax.sharding.Mesh, *, width: int) -> Message:
    """Texts on the device, their rows split over the mesh where they divide."""
    tokens, length = batches.message(texts_ids, width=width)
    at = mesh.rows(on) if len(texts_ids) % mesh.row_shards(on) == 0 else mesh.replicated(on)
    return jax.device_put(Message(tokens, length), at)


def row_keys(key: jax.Array, rows: int, on: jax.sharding.Mesh) -> jax.Array:
    """One key per row, split over the mesh."""
    return jax.device_put(jax.random.split(key, rows), mesh.rows(on))


def rows_sharding(on: jax.sharding.Mesh) -> jax.sharding.NamedSharding:
    """Where the rows of a batch lie."""
    return mesh.rows(on)


def play_fn(
    config: ConfigDict,
    policy: Model,
    world: Model,
    special: Specials,
    *,
    group: int,
    turns: int,
    temperature: float,
) -> Callable:
    """The jitted rollout: (policy params, world params, keys, Tasks, Memory) -> (Rollout, Memory).

    The memory is donated. `temperature` is the policy's.
    """
    loop = partial(
        rollout.rollout,
        policy_speaker(config, policy, special, temperature=temperature),
        world_speaker(config, world, special),
        judge(special),
        group=group,
        turns=turns,
    )
    return jax.jit(loop, donate_argnums=(4,))
