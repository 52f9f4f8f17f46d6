"""The reverse process: blocks of masked tokens, unmasked in parallel, in one `lax.while_loop`.

Every row works on its own block: a row that has finished one commits it to the cache and goes on
to the next while its neighbours are still unmasking, so no row waits for another. Within a block
the cache is frozen; the pass that finds a block clean is the one that writes it (SDAR, spec
sdar.md 5).
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from mdlm_jax import context as ctx
from mdlm_jax import ops, sampling
from mdlm_jax.structs import Cache, Context, Generation


@dataclasses.dataclass(frozen=True)
class Plan:
    """How answers are written: everything that does not change while a program runs."""

    strategy: str  # a key of STRATEGIES
    block: int  # b, tokens denoised together
    steps: int  # denoising steps per block, at most
    threshold: float  # confidence (dynamic) or nats (entropy bounded)
    temperature: float  # 0 = greedy
    max_tokens: int  # of an answer
    stop_ids: tuple[int, ...]  # the first of these ends an answer
    mask_id: int
    pad_id: int  # fills the block behind the answer


@struct.dataclass
class Canvas:
    """State of the loop. `b` is the block length; an answer lies in [prompt, limit)."""

    context: Context
    prompt: jax.Array  # i32[B]  where the answer begins
    limit: jax.Array  # i32[B]   where it ends at the latest
    start: jax.Array  # i32[B]   first position of the row's block
    masked: jax.Array  # bool[B, b]
    step: jax.Array  # i32[B]    denoising steps spent on this block
    active: jax.Array  # bool[B]
    stopped: jax.Array  # bool[B]
    logprobs: jax.Array  # f32[B, C]
    order: jax.Array  # i32[B, C]
    forwards: jax.Array  # i32[B]
    commits: jax.Array  # i32[B]


@struct.dataclass
class View:
    """What a strategy may look at. All [B, b]."""

    ids: jax.Array  # i32
    confidence: jax.Array  # f32
    logprobs: jax.Array  # f32
    entropy: jax.Array  # f32  nats
    lottery: jax.Array  # f32  uniform


# ---- strategies: (View, masked bool[B, b], k i32[B], threshold) -> tokens to settle, bool[B, b] --


def rank(score_Bb: jax.Array, masked_Bb: jax.Array) -> jax.Array:
    """Place of each masked token by falling score, 0 = best; ties go to the lower index.

    NaN (a diverged model) counts as the worst score, so that each pass still settles a token and
    the loop ends.
    """
    cost_Bb = jnp.nan_to_num(-score_Bb, nan=jnp.finfo(jnp.float32).max)
    falling_Bb = jnp.argsort(jnp.where(masked_Bb, cost_Bb, jnp.inf), axis=1, stable=True)
    return jnp.argsort(falling_Bb, axis=1, stable=True)


def top_k(score_Bb: jax.Array, masked_Bb: jax.Array, k_B: jax.Array) -> jax.Array:
    """The k masked tokens with the best scores, bool[B, b]."""
    return masked_Bb & (rank(score_Bb, masked_Bb) < k_B[:, None])


def low_confidence_static(view: View, masked_Bb, k_B, threshold) -> jax.Array:
    """The k most confident masked tokens."""
    return top_k(view.confidence, masked_Bb, k_B)


def low_confidence_dynamic(view: View, masked_Bb, k_B, threshold) -> jax.Array:
    """All masked tokens above the threshold if there are k of them, else the k most confident."""
    sure_Bb = masked_Bb & (view.confidence > threshold)
    enough_B = sure_Bb.sum(1) >= k_B
    return jnp.where(enough_B[:, None], sure_Bb, top_k(view.confidence, masked_Bb, k_B))


def sequential(view: View, masked_Bb, k_B, threshold) -> jax.Array:
    """The k left-most masked tokens."""
    return masked_Bb & (jnp.cumsum(masked_Bb, 1) <= k_B[:, None])


def random(view: View, masked_Bb, k_B, threshold) -> jax.Array:
    """k masked tokens, uniformly."""
    return top_k(view.lottery, masked_Bb, k_B)


def entropy_bounded(view: View, masked_Bb, k_B, threshold) -> jax.Array:
    """The masked tokens of lowest entropy while their entropies sum to less than the threshold."""
    rank_Bb = rank(-view.entropy, masked_Bb)
    ahead_Bbb = masked_Bb[:, None, :] & (rank_Bb[:, None, :] <= rank_Bb[:, :, None])
    total_Bb = jnp.where(ahead_Bbb, view.entropy[:, None, :], 0.0).sum(-1)
    return masked_Bb & ((total_Bb < threshold) | (rank_Bb == 0))


STRATEGIES = {
    "low_confidence_dynamic": low_confidence_dynamic,
    "low_confidence_static": low_confidence_static,
    "sequential": sequential,
    "random": random,
    "entropy_bounded": entropy_bounded,
}


def schedule(step_B: jax.Array, *, block: int, steps: int) -> jax.Array:
    """Tokens due at a step: block // steps, the remainder to the first steps, at least one."""
    return jnp.maximum(block // steps + (step_B < block % steps), 1)


# ---- the loop ----------------------------------------------------------------------------------


def generate(
    step_fn: Callable,
    params: dict,
    keys_B: jax.Array,
    context: Context,
    active_B: jax.Array,
    *,
    plan: Plan,
) -> tuple[Generation, Context]:
    """Writes an answer of at most `plan.max_tokens` behind each active row's context.

    `step_fn` returns logits f32[B, b, V] and fresh keys and values for a block. A context that ends
    inside a block keeps its tokens there; they are tracked by position and never change, whatever
    their ids. Behind the first stop token the block is filled with `pad_id`, so that a later turn
    starts at a block border; so are, from the start, the places that an answer may not reach. A row
    without a stop token after `max_tokens`, or without room for another block, ends unstopped.
    """

    def one_pass(state: Canvas) -> Canvas:
        canvas_Bb, positions_Bb = ctx.window(state.context, state.start, plan.block)
        canvas_Bb = jnp.where(positions_Bb < state.limit[:, None], canvas_Bb, plan.pad_id)
        ids_Bb = jnp.where(state.masked, plan.mask_id, canvas_Bb)
        live_Bb = jnp.broadcast_to(state.active[:, None], ids_Bb.shape)
        logits_BbV, fresh = step_fn(
            params, ids_Bb, positions_Bb, live_Bb, state.context.cache, state.start
        )
        dirty_B = state.active & state.masked.any(1)
        clean_B = state.active & ~dirty_B
        view = look(_step_keys(keys_B, state, plan), logits_BbV, plan)
        state = unmask(state, view, canvas_Bb, dirty_B, plan)
        return commit(state, fresh, canvas_Bb, clean_B, plan)

    state = start(context, active_B, plan)
    state = jax.lax.while_loop(lambda s: s.active.any(), one_pass, state)
    return collect(state, active_B, plan), state.context


def start(context: Context, active_B: jax.Array, plan: Plan) -> Canvas:
    """The loop's first state: the block that holds the end of the prompt, its rest masked."""
    prompt_B = context.length
    size = context.tokens.shape[1] // plan.block * plan.block
    limit_B = jnp.minimum(prompt_B + plan.max_tokens, size)
    zeros_B = jnp.zeros_like(prompt_B)
    state = Canvas(
        context=context,
        prompt=prompt_B,
        limit=limit_B,
        start=prompt_B // plan.block * plan.block,
        masked=jnp.zeros((prompt_B.shape[0], plan.block), bool),
        step=zeros_B,
        active=active_B & (limit_B > prompt_B),
        stopped=jnp.zeros_like(active_B),
        logprobs=jnp.zeros(context.tokens.shape, jnp.float32),
        order=jnp.zeros(context.tokens.shape, jnp.int32),
        forwards=zeros_B,
        commits=zeros_B,
    )
    return state.replace(masked=_in_answer(state, _positions(state, plan)))


def look(keys_B: jax.Array, logits_BbV: jax.Array, plan: Plan) -> View:
    """Samples every position of the canvas and measures how sure the model is of it."""
    is_mask_V = jnp.arange(logits_BbV.shape[-1]) == plan.mask_id
    logits_BbV = jnp.where(is_mask_V, -jnp.inf, logits_BbV)
    keys_2B = jax.vmap(jax.random.split, out_axes=1)(keys_B)
    ids_Bb, confidence_Bb, logprobs_Bb = sampling.choose(
        keys_2B[0], logits_BbV, temperature=plan.temperature
    )
    entropy_Bb = ops.entropy(sampling.scale(logits_BbV, temperature=plan.temperature))
    lottery_Bb = jax.vmap(lambda key: jax.random.uniform(key, ids_Bb.shape[1:]))(keys_2B[1])
    return View(ids_Bb, confidence_Bb, logprobs_Bb, entropy_Bb, lottery_Bb)


def unmask(state: Canvas, view: View, canvas_Bb, dirty_B, plan: Plan) -> Canvas:
    """Settles the tokens that the strategy picks, in the rows whose block still has a mask."""
    positions_Bb = _positions(state, plan)
    due_B = schedule(state.step, block=plan.block, steps=plan.steps)
    picked_Bb = STRATEGIES[plan.strategy](view, state.masked, due_B, plan.threshold)
    picked_Bb &= dirty_B[:, None]
    masked_Bb = state.masked & ~picked_Bb
    canvas_Bb = jnp.where(picked_Bb, view.ids, canvas_Bb)
    # A stop token ends the answer once nothing before it is open; what is behind it is dropped.
    settled_Bb = jnp.cumprod(~masked_Bb, axis=1).astype(bool)
    stop_Bb = settled_Bb & _stops(state, canvas_Bb, positions_Bb, plan)
    tail_Bb = behind_first(stop_Bb) & dirty_B[:, None]
    canvas_Bb = jnp.where(tail_Bb, plan.pad_id, canvas_Bb)
    forwards_B = state.forwards + dirty_B
    order_Bb = jnp.broadcast_to(forwards_B[:, None], positions_Bb.shape)
    tokens_BC = ctx.put(state.context.tokens, canvas_Bb, positions_Bb, picked_Bb | tail_Bb)
    return state.replace(
        context=state.context.replace(tokens=tokens_BC),
        masked=masked_Bb & ~tail_Bb,
        step=state.step + dirty_B,
        logprobs=ctx.put(state.logprobs, view.logprobs, positions_Bb, picked_Bb),
        order=ctx.put(state.order, order_Bb, positions_Bb, picked_Bb),
        forwards=forwards_B,
    )


def commit(state: Canvas, fresh: Cache, canvas_Bb, clean_B, plan: Plan) -> Canvas:
    """Caches the blocks that this pass has seen without a mask, and moves their rows on."""
    positions_Bb = _positions(state, plan)
    keep_Bb = jnp.broadcast_to(clean_B[:, None], positions_Bb.shape)
    stopped_B = clean_B & _stops(state, canvas_Bb, positions_Bb, plan).any(1)
    old = state.context
    moved = state.replace(start=state.start + plan.block * clean_B)
    context = old.replace(
        tokens=ctx.put(old.tokens, canvas_Bb, positions_Bb, keep_Bb),
        cache=ctx.write(old.cache, fresh, positions_Bb, keep_Bb),
        cached=jnp.where(clean_B, moved.start, old.cached),
        length=jnp.where(clean_B, moved.start, old.length),
    )
    next_Bb = _in_answer(moved, _positions(moved, plan))
    ended_B = stopped_B | (clean_B & (moved.start >= state.limit))
    return moved.replace(
        context=context,
        masked=jnp.where(clean_B[:, None], next_Bb, state.masked),
        step=jnp.where(clean_B, 0, state.step),
        active=state.active & ~ended_B,
        stopped=state.stopped | stopped_B,
        commits=state.commits + clean_B,
    )


def collect(state: Canvas, active_B: jax.Array, plan: Plan) -> Generation:
    """Cuts the answers out of the buffers, up to and including the first stop token."""
    tokens_BW, places_BW = ctx.window(state.context, state.prompt, plan.max_tokens)
    written_BW = active_B[:, None] & (places_BW < state.context.length[:, None])
    written_BW &= ~behind_first(written_BW & _stops(state, tokens_BW, places_BW, plan))
    inside_BW = jnp.minimum(places_BW, state.order.shape[1] - 1)
    cut = partial(jnp.take_along_axis, indices=inside_BW, axis=1)
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


def behind_first(found_BW: jax.Array) -> jax.Array:
    """Places behind the first true one of each row, bool[B, W]."""
    return jnp.cumsum(found_BW, axis=1) - found_BW > 0


def _positions(state: Canvas, plan: Plan) -> jax.Array:
    """Positions of each row's block, i32[B, b]."""
    return state.start[:, None] + jnp.arange(plan.block)


def _in_answer(state: Canvas, positions_BW: jax.Array) -> jax.Array:
    return (positions_BW >= state.prompt[:, None]) & (positions_BW < state.limit[:, None])


def _stops(state: Canvas, tokens_BW, positions_BW, plan: Plan) -> jax.Array:
    """Stop tokens of the answer. In the prompt, or behind an answer's limit, they do not count."""
    is_stop_BW = jnp.isin(tokens_BW, jnp.asarray(plan.stop_ids, jnp.int32))
    return is_stop_BW & _in_answer(state, positions_BW)


def _step_keys(keys_B: jax.Array, state: Canvas, plan: Plan) -> jax.Array:
    """A key per row that depends on its own block and step only; a block takes at most b steps."""
    return jax.vmap(jax.random.fold_in)(keys_B, state.start * plan.block + state.step)
