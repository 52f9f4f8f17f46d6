"""`bench decode`: the same random weights and the same tokens out, here and in torch."""

import json
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from mdlm_jax import check
from mdlm_jax import context as ctx
from mdlm_jax.autoregressive import decode
from mdlm_jax.diffusion import denoise
from mdlm_jax.models import hub, transformer
from mdlm_jax.programs import build
from mdlm_jax.structs import Generation, Message

HEAD = (
    "model  decoder         batch     ours    torch    ratio  tokens/forward  same tokens  compile"
)
# Logits of a random model are nearly flat, and near ties fall either way; trained ones are not.
LOGIT_SCALE = 6.0


class Answer(NamedTuple):
    """What one side wrote: i32[B, tokens] behind the prompt, and its forward passes per row."""

    tokens: np.ndarray
    forwards: float


def run(plan: ConfigDict) -> None:
    """Prints one line per model, decoder and batch: both sides' medians and their ratio."""
    peer = torch_peer()
    print(HEAD, flush=True)
    for name in plan.models:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = write(pathlib.Path(folder), plan.shapes[name])
            ours = hub.load(checkpoint, dtype=jnp.float32)
            theirs = peer.Peer(folder)
            label = f"{sum(x.size for x in jax.tree.leaves(ours)) / 1e6:.0f}M"
            for kind, batch in ((k, b) for k in DECODERS for b in plan.batches):
                prompt = prompts(batch, plan.prompt, checkpoint.config.vocab_size)
                here = partial(DECODERS[kind](checkpoint, plan, batch), ours, prompt)
                there = partial(getattr(theirs, kind), prompt, plan, specials(checkpoint)[1])
                print(line(label, kind, batch, *race(here, there, plan.repeats)), flush=True)


def torch_peer():
    """The other side. Raises UserError where torch is not installed."""
    try:
        from mdlm_jax.programs import bench_peer
    except ImportError as error:
        raise check.UserError(
            f"bench decode compares with torch ({error}): pip install -e '.[peers]'"
        ) from error
    return bench_peer


def write(folder: pathlib.Path, shape: ConfigDict) -> hub.Checkpoint:
    """A random checkpoint that is sure of some tokens and never says its two last ones."""
    raw = shape.to_dict() | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(raw))
    checkpoint = hub.read(folder)
    params = jax.jit(partial(transformer.init, config=checkpoint.config))(jax.random.key(0))
    head_DV = params["lm_head"]["kernel"]
    spread = LOGIT_SCALE / (head_DV.std() * head_DV.shape[0] ** 0.5)
    params["lm_head"]["kernel"] = (head_DV * spread).at[:, jnp.array(specials(checkpoint))].set(0)
    hub.export(folder, params, checkpoint.config, like=checkpoint)
    return checkpoint


def specials(checkpoint: hub.Checkpoint) -> tuple[int, int]:
    """The ids that stop and that mask: the last ones, whose logits are 0."""
    return checkpoint.config.vocab_size - 1, checkpoint.config.vocab_size - 2


def prompts(batch: int, length: int, vocab: int) -> np.ndarray:
    """Random prompts, i32[B, L]."""
    return np.random.default_rng(0).integers(0, vocab - 2, (batch, length), np.int32)


def race(ours: Callable, theirs: Callable, repeats: int) -> tuple[list[float], ...]:
    """Times both sides in turn, so that a machine that slows down slows both."""
    compiling, first = timed(ours)
    _, other = timed(theirs)
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for side, answer in zip(seconds, (ours, theirs), strict=True):
            side.append(timed(answer)[0])
    return *seconds, first, other, compiling


def timed(answer: Callable) -> tuple[float, Answer]:
    """Seconds, and what was answered."""
    begun = time.perf_counter()
    said = Answer(*answer())
    return time.perf_counter() - begun, said


def line(name, kind, batch, ours, theirs, first: Answer, other: Answer, compiling: float) -> str:
    """One row of the table."""
    here, there = statistics.median(ours), statistics.median(theirs)
    width = min(first.tokens.shape[1], other.tokens.shape[1])
    same = np.mean(first.tokens[:, :width] == other.tokens[:, :width])
    return (
        f"{name:<7}{kind:<16}{batch:>5}{here:>8.2f}s{there:>8.2f}s{there / here:>8.2f}x"
        f"{width / first.forwards:>8.2f}/{width / other.forwards:<7.2f}{same:>12.0%}"
        f"{compiling:>8.1f}s"
    )


# ---- our side ------------------------------------------------------------------------------------


def autoregressive(checkpoint: hub.Checkpoint, plan: ConfigDict, batch: int) -> Callable:
    """Token by token. The last place is the stop token's; what is compared lies before it."""
    stop, mask = specials(checkpoint)
    model = build.Model(checkpoint.config, checkpoint.config.vocab_size, order_length=1)
    write = partial(
        decode.generate,
        build.step_fn(model, (mask,)),
        temperature=0.0,
        max_tokens=plan.tokens,
        stop_ids=(stop,),
    )
    reading = {"pending": 1, "settled": lambda n_B: jnp.maximum(n_B - 1, 0)}
    return answering(model, write, reading, plan, batch, free=plan.tokens - 1)


def block(checkpoint: hub.Checkpoint, plan: ConfigDict, batch: int) -> Callable:
    """By blocks, as SDAR."""
    stop, mask = specials(checkpoint)
    length = plan.block
    model = build.Model(checkpoint.config, checkpoint.config.vocab_size, order_length=length)
    how = denoise.Plan(
        strategy="low_confidence_dynamic",
        block=length,
        steps=length,
        threshold=plan.threshold,
        temperature=0.0,
        max_tokens=plan.tokens,
        stop_ids=(stop,),
        mask_id=mask,
        pad_id=stop,
    )
    write = partial(denoise.generate, build.step_fn(model, ()), plan=how)
    reading = {"pending": length - 1, "settled": lambda n_B: n_B // length * length}
    return answering(model, write, reading, plan, batch, free=plan.tokens)


DECODERS = {"autoregressive": autoregressive, "block": block}


def answering(model, write, reading: dict, plan: ConfigDict, batch: int, *, free: int) -> Callable:
    """(params, prompts) -> Answer: reading and writing in one compiled call."""
    size = plan.prompt + plan.tokens
    size += -size % model.order_length

    @jax.jit
    def whole(params: dict, message: Message) -> Generation:
        context = ctx.empty(batch, size, model.config.cache_shape, jnp.float32)
        context = ctx.read(model.hidden, params, context, message, **reading)
        keys_B = jax.random.split(jax.random.key(0), batch)
        return write(params, keys_B, context, jnp.ones(batch, bool))[0]

    def answer(params: dict, prompt: np.ndarray) -> Answer:
        message = Message(jnp.asarray(prompt), jnp.full(batch, prompt.shape[1], jnp.int32))
        said = jax.device_get(whole(params, message))
        return Answer(said.tokens[:, :free], float(np.mean(said.forwards + said.commits)))

    return answer
