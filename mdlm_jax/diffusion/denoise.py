"""The reverse process: blocks of masked tokens, unmasked in parallel, in one `lax.while_loop`.

Every row works on its own block: a row that has finished one commits it to the cache and goes on to the
next while its neighbours are still unmasking, so no row waits for another. Within a block the cache is
frozen; the pass that finds a block clean is the one that writes it (SDAR, spec sdar.md 5).
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from mdlm_jax import context as ctx
from mdlm_jax import ops, sampling
from mdlm_jax.structs import Context, Generation


@struct.dataclass
class Canvas:
    """State of the loop. `b` is the block length."""

    context: Context
    start: jax.Array  # i32[B]   first position of the row's block
    masked: jax.Array  # bool[B, b]
    step: jax.Array  # i32[B]    denoising steps spent on this block
    active: jax.Array  # bool[B]
    stopped: jax.Array  # bool[B]
    logprobs: jax.Array  # f32[B, C]
    order: jax.Array  # i32[B, C]
    forwards: jax.Array  # i32[B]
    commits: jax.Array  # i32[B]


def rank(score_BW: jax.Array, masked_BW: jax.Array) -> jax.Array:
    """Place of each masked token by falling score, 0 = best; ties go to the lower index."""
    falling_BW = jnp.argsort(jnp.where(masked_BW, -score_BW, jnp.inf), axis=1, stable=True)
    return jnp.argsort(falling_BW, axis=1, stable=True)


def top_k(score_BW: jax.Array, masked_BW: jax.Array, k_B: jax.Array) -> jax.Array:
    """The k masked tokens with the best scores, bool[B, W]."""
    return masked_BW & (rank(score_BW, masked_BW) < k_B[:, None])


def low_confidence_static(view, masked_BW, k_B, threshold):
    """The k most confident masked tokens."""
    return top_k(view.confidence, masked_BW, k_B)


def low_confidence_dynamic(view, masked_BW, k_B, threshold):
    """All masked tokens above the threshold if there are k of them, else the k most confident."""
    sure_BW = masked_BW & (view.confidence > threshold)
    enough_B = sure_BW.sum(1) >= k_B
    return jnp.where(enough_B[:, None], sure_BW, top_k(view.confidence, masked_BW, k_B))


def sequential(view, masked_BW, k_B, threshold):
    """The k left-most masked tokens."""
    return masked_BW & (jnp.cumsum(masked_BW, 1) <= k_B[:, None])


def random(view, masked_BW, k_B, threshold):
    """k masked tokens, uniformly."""
    return top_k(view.lottery, masked_BW, k_B)


def entropy_bounded(view, masked_BW, k_B, threshold):
    """The masked tokens of lowest entropy while their entropies sum to less than the threshold (nats)."""
    rank_BW = rank(-view.entropy, masked_BW)
    ahead_BWW = masked_BW[:, None, :] & (rank_BW[:, None, :] <= rank_BW[:, :, None])
    total_BW = jnp.where(ahead_BWW, view.entropy[:, None, :], 0.0).sum(-1)
    return masked_BW & ((total_BW < threshold) | (rank_BW == 0))


STRATEGIES = {
    "low_confidence_dynamic": low_confidence_dynamic,
    "low_confidence_static": low_confidence_static,
    "sequential": sequential,
    "random": random,
    "entropy_bounded": entropy_bounded,
}


@struct.dataclass
class View:
    """What a strategy may look at. All [B, b]."""

    ids: jax.Array  # i32
    confidence: jax.Array  # f32
    logprobs: jax.Array  # f32
    entropy: jax.Array  # f32  nats
    lottery: jax.Array  # f32  uniform


def schedule(step_B: jax.Array, *, block: int, steps: int) -> jax.Array:
    """Tokens due at a step: block // steps, the remainder to the first steps, never less than one."""
    return jnp.maximum(block // steps + (step_B < block % steps), 1)


def look(keys_B: jax.Array, logits_BbV: jax.Array, temperature: jax.Array) -> View:
    """Samples every position of the canvas and measures how sure the model is of it."""
    keys_2B = jax.vmap(jax.random.split, out_axes=1)(keys_B)
    ids, confidence, logprobs = sampling.choose(keys_2B[0], logits_BbV, temperature=temperature)
    entropy = ops.entropy(sampling.scale(logits_BbV, temperature=temperature))
    lottery = jax.vmap(lambda key: jax.random.uniform(key, ids.shape[1:]))(keys_2B[1])
    return View(ids, confidence, logprobs, entropy, lottery)


def after_stop(tokens_BW: jax.Array, written_BW: jax.Array, stop_ids: jax.Array) -> jax.Array:
    """Places behind the first stop token that stands in a fully written prefix, bool[B, W].

    `written_BW` marks places that are settled and belong to the answer or stand before it.
    """
    settled_BW = jnp.cumprod(written_BW, axis=1).astype(bool)
    stop_BW = settled_BW & jnp.isin(tokens_BW, stop_ids)
    return jnp.cumsum(stop_BW, axis=1) - stop_BW > 0


def generate(
    step_fn: Callable,
    params: dict,
    keys_B: jax.Array,
    context: Context,
    active_B: jax.Array,
    *,
    strategy: str,
    block: int,
    steps: int,
    threshold: float,
    temperature: float,
    max_tokens: int,
    stop_ids: tuple[int, ...],
    mask_id: int,
    pad_id: int,
) -> tuple[Generation, Context]:
    """Writes an answer of at most `max_tokens` behind each active row's context.

    `step_fn` returns logits f32[B, b, V] and fresh keys and values for a block. A context that ends
    inside a block keeps its tokens there; they are tracked by position and never change. Behind the
    first stop token the block is filled with `pad_id`, so that a later turn starts at a block border.
    A row without a stop token after `max_tokens`, or without room for another block, ends unstopped.
    """
    size = context.tokens.shape[1] // block * block
    prompt_B = context.length
    limit_B = jnp.minimum(prompt_B + max_tokens, size)
    stops = jnp.asarray(stop_ids, jnp.int32)
    pick = STRATEGIES[strategy]

    def places(start_B):
        return start_B[:, None] + jnp.arange(block)

    def fresh_mask(start_B):
        positions_Bb = places(start_B)
        return (positions_Bb >= prompt_B[:, None]) & (positions_Bb < limit_B[:, None])

    def unmask(state: Canvas, logits_BbV, canvas_Bb, dirty_B) -> Canvas:
        """Settles the tokens that the strategy picks in the rows whose block is not clean."""
        positions_Bb = places(state.start)
        keys = jax.vmap(jax.random.fold_in)(keys_B, state.start * (steps + block) + state.step)
        view = look(keys, logits_BbV, temperature)
        due_B = schedule(state.step, block=block, steps=steps)
        picked_Bb = pick(view, state.masked, due_B, threshold) & dirty_B[:, None]
        canvas_Bb = jnp.where(picked_Bb, view.ids, canvas_Bb)
        forwards_B = state.forwards + dirty_B
        masked_Bb = state.masked & ~picked_Bb
        answer_Bb = jnp.where(positions_Bb >= prompt_B[:, None], canvas_Bb, pad_id)
        tail_Bb = after_stop(answer_Bb, ~masked_Bb, stops) & dirty_B[:, None]
        tokens = ctx.put(
            state.context.tokens,
            jnp.where(tail_Bb, pad_id, canvas_Bb),
            positions_Bb,
            picked_Bb | tail_Bb,
        )
        return state.replace(
            context=state.context.replace(tokens=tokens),
            masked=masked_Bb & ~tail_Bb,
            step=state.step + dirty_B,
            logprobs=ctx.put(state.logprobs, view.logprobs, positions_Bb, picked_Bb),
            order=ctx.put(
                state.order, jnp.broadcast_to(forwards_B[:, None], picked_Bb.shape), positions_Bb, picked_Bb
            ),
            forwards=forwards_B,
        )

    def commit(state: Canvas, fresh, canvas_Bb, clean_B) -> Canvas:
        """Writes the blocks that were clean in this pass and moves their rows on."""
        positions_Bb = places(state.start)
        keep_Bb = jnp.broadcast_to(clean_B[:, None], positions_Bb.shape)
        answer_Bb = positions_Bb >= prompt_B[:, None]
        stopped_B = clean_B & (answer_Bb & jnp.isin(canvas_Bb, stops)).any(1)
        start_B = state.start + block * clean_B
        ended_B = clean_B & (stopped_B | (start_B >= limit_B))
        context = state.context.replace(
            tokens=ctx.put(state.context.tokens, canvas_Bb, positions_Bb, keep_Bb),
            cache=ctx.write(state.context.cache, fresh, positions_Bb, keep_Bb),
            cached=jnp.where(clean_B, start_B, state.context.cached),
            length=jnp.where(clean_B, start_B, state.context.length),
        )
        return state.replace(
            context=context,
            start=start_B,
            masked=jnp.where(clean_B[:, None], fresh_mask(start_B), state.masked),
            step=jnp.where(clean_B, 0, state.step),
            active=state.active & ~ended_B,
            stopped=state.stopped | stopped_B,
            commits=state.commits + clean_B,
        )

    def one_pass(state: Canvas) -> Canvas:
        canvas_Bb, positions_Bb = ctx.window(state.context, state.start, block)
        canvas_Bb = jnp.where(positions_Bb < limit_B[:, None], canvas_Bb, pad_id)
        ids_Bb = jnp.where(state.masked, mask_id, canvas_Bb)
        live_Bb = jnp.broadcast_to(state.active[:, None], ids_Bb.shape)
        logits_BbV, fresh = step_fn(
            params, ids_Bb, positions_Bb, live_Bb, state.context.cache, state.start
        )
        clean_B = state.active & ~state.masked.any(1)
        state = unmask(state, logits_BbV, canvas_Bb, state.active & ~clean_B)
        return commit(state, fresh, canvas_Bb, clean_B)

    start_B = prompt_B // block * block
    zeros_B = jnp.zeros_like(prompt_B)
    active_B = active_B & (limit_B > prompt_B)
    state = Canvas(
        context=context,
        start=start_B,
        masked=fresh_mask(start_B),
        step=zeros_B,
        active=active_B,
        stopped=jnp.zeros_like(active_B),
        logprobs=jnp.zeros(context.tokens.shape, jnp.float32),
        order=jnp.zeros(context.tokens.shape, jnp.int32),
        forwards=zeros_B,
        commits=zeros_B,
    )
    state = jax.lax.while_loop(lambda s: s.active.any(), one_pass, state)
    return _collect(state, prompt_B, active_B, stops, max_tokens), state.context


def _collect(state: Canvas, prompt_B, active_B, stops, width: int) -> Generation:
    """Cuts the answers out of the buffers, up to and including the first stop token."""
    tokens_BW, places_BW = ctx.window(state.context, prompt_B, width)
    written_BW = active_B[:, None] & (places_BW < state.context.length[:, None])
    written_BW &= ~after_stop(tokens_BW, written_BW, stops)
    cut = partial(jnp.take_along_axis, indices=jnp.minimum(places_BW, state.order.shape[1] - 1), axis=1)
    return Generation(
        tokens=jnp.where(written_BW, tokens_BW, 0),
        length=written_BW.sum(1),
        sampled=written_BW,
        logprobs=jnp.where(written_BW, cut(state.logprobs), 0.0),
        order=jnp.where(written_BW, cut(state.order), 0),
        stopped=state.stopped,
        forwards=state.forwards,
        commits=state.commits,
    )
