"""One prompt, one checkpoint, one answer: by blocks, by a stream, or token by token."""

import pathlib
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from mdlm_jax import check, sampling
from mdlm_jax import context as ctx
from mdlm_jax.autoregressive import decode
from mdlm_jax.diffusion import denoise, strategies, stream
from mdlm_jax.metrics import page, pictures
from mdlm_jax.models import hub, vocabulary
from mdlm_jax.programs import build
from mdlm_jax.structs import Context, Generation, Message
from mdlm_jax.tokens import chat

DEFAULT_BLOCK = 4  # of SDAR's chat models, where the config does not say
DECODER_OF = {"sdar": "block", "sdar_moe": "block", "wedlm": "stream"}


class Writer(NamedTuple):
    """A way of writing: how a prompt is read for it, and the loop itself."""

    model: build.Model
    pending: int  # tokens that may wait uncached, see `context.read`
    settled: Callable  # length_B -> how many of them may be cached
    write: Callable  # (params, keys, context, active) -> (Generation, Context)


class Facts(NamedTuple):
    """What the decoders need to know of a checkpoint and its tokenizer."""

    words: int
    mask_id: int
    pad_id: int
    stop_ids: tuple[int, ...]


def run(config: ConfigDict) -> None:
    """Prints what the checkpoint answers, and what that took."""
    with check.user_errors():
        checkpoint = hub.read(hub.locate(config.model))
        tokenizer = chat.load(checkpoint.folder, vocab_size=checkpoint.config.vocab_size)
        ids = prompt_ids(config, tokenizer)
        params = hub.load(checkpoint, dtype=jnp.dtype(config.dtype))
    kind = config.decoder
    if kind == "auto":
        kind = DECODER_OF.get(checkpoint.model_type, "autoregressive")
    params, shape, facts = facts_of(checkpoint, params, tokenizer)
    writer = WRITERS[kind](config, checkpoint, shape, facts)
    said, seconds, compiling = answer(config, writer, params, ids)
    length = int(said.length[0])
    tokens = said.tokens[0, :length].tolist()
    print(chat.text(tokenizer, tokens))
    print(summary(kind, said, seconds, compiling), flush=True)
    if config.trace:
        trace(config, kind, writer, tokenizer, len(ids), said)


def prompt_ids(config: ConfigDict, tokenizer) -> list[int]:
    """The prompt's ids, by the chat template or as plain text."""
    if not config.chat:
        return tokenizer.encode(config.system + config.prompt)
    messages = [{"role": "system", "content": config.system}] if config.system else []
    return chat.prompt_ids(tokenizer, [*messages, {"role": "user", "content": config.prompt}])


def facts_of(checkpoint: hub.Checkpoint, params: dict, tokenizer) -> tuple:
    """Parameters and shape with a mask row, and the ids that decoding needs."""
    mask_id, shape = checkpoint.mask_id, checkpoint.config
    if mask_id is None:
        mask_id = tokenizer.mask_token_id
    if mask_id is None:
        params, shape, mask_id = vocabulary.with_mask(params, shape, words=len(tokenizer))
    stops = set(checkpoint.stop_ids)
    if tokenizer.eos_token_id is not None:
        stops.add(tokenizer.eos_token_id)
    if not stops:
        raise check.UserError(f"{checkpoint.folder}: neither config nor tokenizer names an end")
    pad = tokenizer.pad_token_id
    stop_ids = tuple(sorted(stops))
    return (
        params,
        shape,
        Facts(len(tokenizer), mask_id, stop_ids[0] if pad is None else pad, stop_ids),
    )


# ---- ways of writing -----------------------------------------------------------------------------


def block_writer(config: ConfigDict, checkpoint: hub.Checkpoint, shape, facts: Facts) -> Writer:
    """SDAR's: blocks of masks, unmasked in parallel."""
    length = config.block.length or checkpoint.block_length or DEFAULT_BLOCK
    plan = strategies.Plan(
        strategy=config.block.strategy,
        block=length,
        max_tokens=config.max_tokens,
        mask_id=facts.mask_id,
        pad_id=facts.pad_id,
        steps=config.block.steps or length,
        threshold=config.block.threshold,
        temperature=config.temperature,
        stop_ids=facts.stop_ids,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
    ).replace(**strategies.PRESETS[config.block.preset])
    model = build.Model(shape, facts.words, order_length=length)
    write = partial(denoise.generate, build.step_fn(model, ()), plan=plan)
    return Writer(model, length - 1, lambda n_B: n_B // length * length, write)


def stream_writer(config: ConfigDict, checkpoint: hub.Checkpoint, shape, facts: Facts) -> Writer:
    """WeDLM's: a window that slides as its first places are filled."""
    del checkpoint
    plan = stream.Plan(
        window=config.stream.window,
        max_tokens=config.max_tokens,
        mask_id=facts.mask_id,
        threshold=config.stream.threshold,
        penalty=config.stream.penalty,
        temperature=config.temperature,
        stop_ids=facts.stop_ids,
        top_k=config.top_k,
        top_p=config.top_p,
        forbid_mask=True,
    )
    model = build.Model(shape, facts.words, order_length=1, by_slot=True)
    return Writer(
        model, 0, lambda n_B: n_B, partial(stream.generate, build.step_fn(model, ()), plan=plan)
    )


def autoregressive_writer(
    config: ConfigDict, checkpoint: hub.Checkpoint, shape, facts: Facts
) -> Writer:
    """A policy's: one token after the other."""
    del checkpoint
    model = build.Model(shape, facts.words, order_length=1)
    write = partial(
        decode.generate,
        build.step_fn(model, (facts.mask_id,)),
        temperature=config.temperature,
        max_tokens=config.max_tokens,
        stop_ids=facts.stop_ids,
        filters=sampling.Filters(
            top_k=config.top_k,
            top_p=config.top_p,
            min_p=config.min_p,
            repetition_penalty=config.repetition_penalty,
        ),
    )
    return Writer(model, 1, lambda n_B: jnp.maximum(n_B - 1, 0), write)


WRITERS = {
    "block": block_writer,
    "stream": stream_writer,
    "autoregressive": autoregressive_writer,
}


def answer(
    config: ConfigDict, writer: Writer, params: dict, ids: list[int]
) -> tuple[Generation, float, float]:
    """What is written behind the prompt, the seconds it took, and those of compiling before."""
    message = Message(jnp.asarray([ids], jnp.int32), jnp.asarray([len(ids)], jnp.int32))
    size = len(ids) + config.max_tokens
    size += -size % max(writer.model.order_length, 1)
    shape, dtype = writer.model.config.cache_shape, jnp.dtype(config.dtype)

    def whole(params: dict, keys_B: jax.Array, message: Message) -> tuple[Generation, Context]:
        context = ctx.empty(1, size, shape, dtype)
        rule = {"pending": writer.pending, "settled": writer.settled}
        context = ctx.read(writer.model.hidden, params, context, message, **rule)
        return writer.write(params, keys_B, context, jnp.ones(1, bool))[0]

    keys = jax.random.split(jax.random.key(config.seed), 1)
    begun = time.perf_counter()
    compiled = jax.jit(whole).lower(params, keys, message).compile()
    ready = time.perf_counter()
    said = jax.device_get(compiled(params, keys, message))
    return said, time.perf_counter() - ready, ready - begun


def summary(kind: str, said: Generation, seconds: float, compiling: float) -> str:
    """One line: how long, how many passes, how fast."""
    length, forwards, commits = (int(x[0]) for x in (said.length, said.forwards, said.commits))
    passes = forwards + commits
    ended = "stopped by itself" if said.stopped[0] else "cut at max_tokens"
    return (
        f"[{kind}: {length} tokens, {ended}; {forwards} forward passes and {commits} commits, "
        f"{length / max(passes, 1):.2f} tokens per pass; {seconds:.2f} s, "
        f"{length / seconds:.1f} tokens/s; {compiling:.1f} s of compiling before]"
    )


# ---- the picture ---------------------------------------------------------------------------------


def trace(
    config: ConfigDict, kind: str, writer: Writer, tokenizer, prompt: int, said: Generation
) -> None:
    """Writes the page with the order of unmasking."""
    length = int(said.length[0])
    chosen = np.asarray(said.order[0, :length])
    written = np.flatnonzero(chosen > 0)
    pieces = [tokenizer.decode([int(said.tokens[0, i])]) for i in written]
    # Blocks lie at multiples of their length in the whole text; the rest begins with the answer.
    block = config.stream.window if kind == "stream" else writer.model.order_length
    svg = pictures.unmasking_order(
        pieces,
        chosen[written].tolist(),
        block_length=block,
        block_offset=prompt % block if kind == "block" else 0,
    )
    caption = "Each box is a token in reading order; its number is the pass that chose it."
    body = page.section("Order of unmasking", page.figure(svg, caption))
    path = pathlib.Path(config.trace)
    path.write_text(page.page(f"{config.model}: order of unmasking", body))
    print(f"picture -> {path}", flush=True)
