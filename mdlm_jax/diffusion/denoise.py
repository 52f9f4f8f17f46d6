"""The reverse process: blocks of masked tokens, unmasked in parallel, in one `lax.while_loop`.

Every row works on its own block: a row that has finished one commits it to the cache and goes on
to the next while its neighbours are still unmasking, so no row waits for another. Within a block
the cache is frozen; the pass that finds a block clean is the one that writes it. This is SDAR's
decoder (specs/sdar.md 5) and, with `plan.causal`, WeDLM's second one (specs/wedlm.md 4).
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from mdlm_jax import context as ctx
from mdlm_jax import ops
from mdlm_jax.diffusion import strategies
from mdlm_jax.diffusion.strategies import Plan, View
from mdlm_jax.structs import Cache, Context, Generation


@struct.dataclass
class Canvas:
    """State of the loop. `b` is the block length; an answer lies in [prompt, limit)."""

    context: Context
    prompt: jax.Array  # i32[B]  where the answer begins
    limit: jax.Array  # i32[B]   where it ends at the latest
    end: jax.Array  # i32[B]     where denoising ends at the latest, at or behind the limit
    start: jax.Array  # i32[B]   first position of the row's block
    masked: jax.Array  # bool[B, b]
    step: jax.Array  # i32[B]    denoising steps spent on this block
    active: jax.Array  # bool[B]
    stopped: jax.Array  # bool[B]
    logprobs: jax.Array  # f32[B, C]
    order: jax.Array  # i32[B, C]
    forwards: jax.Array  # i32[B]
    commits: jax.Array  # i32[B]


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

    With `plan.whole_blocks` the last block is denoised to its end instead, as the public engines
    do. With `plan.causal` a context ends where its answer ends.
    """

    def one_pass(state: Canvas) -> Canvas:
        canvas_Bb, positions_Bb = ctx.window(state.context, state.start, plan.block)
        canvas_Bb = jnp.where(positions_Bb < state.end[:, None], canvas_Bb, plan.pad_id)
        ids_Bb = jnp.where(state.masked, plan.mask_id, canvas_Bb)
        logits_BbV, fresh = forward(step_fn, params, state, ids_Bb, positions_Bb, plan)
        dirty_B = state.active & state.masked.any(1)
        clean_B = state.active & ~dirty_B
        view = strategies.look(_step_keys(keys_B, state, plan), logits_BbV, plan)
        state = unmask(state, view, canvas_Bb, dirty_B, plan)
        return commit(state, fresh, canvas_Bb, clean_B, plan)

    state = start(context, active_B, plan)
    state = jax.lax.while_loop(lambda s: s.active.any(), one_pass, state)
    return collect(state, active_B, plan), state.context


def start(context: Context, active_B: jax.Array, plan: Plan) -> Canvas:
    """The loop's first state: the block that holds the end of the prompt, its rest masked."""
    prompt_B, size, b = context.length, context.tokens.shape[1], plan.block
    first_B = prompt_B if plan.causal else prompt_B // b * b
    size = size if plan.causal else size // b * b
    limit_B = ctx.limit(prompt_B, size, max_tokens=plan.max_tokens, budget=plan.budget)
    whole_B = jnp.minimum(first_B - (first_B - limit_B) // b * b, size)  # the last block's end
    zeros_B = jnp.zeros_like(prompt_B)
    state = Canvas(
        context=context,
        prompt=prompt_B,
        limit=whole_B if plan.rounded_limit else limit_B,
        end=whole_B if plan.whole_blocks or plan.rounded_limit else limit_B,
        start=first_B,
        masked=jnp.zeros((prompt_B.shape[0], b), bool),
        step=zeros_B,
        active=active_B & (limit_B > prompt_B),
        stopped=jnp.zeros_like(active_B),
        logprobs=jnp.zeros(context.tokens.shape, jnp.float32),
        order=jnp.zeros(context.tokens.shape, jnp.int32),
        forwards=zeros_B,
        commits=zeros_B,
    )
    return state.replace(masked=_open(state, _positions(state, plan)))


def forward(
    step_fn: Callable, params: dict, state: Canvas, ids_Bb, positions_Bb, plan: Plan
) -> tuple[jax.Array, Cache]:
    """One pass over each row's block: logits f32[B, b, V] by place, fresh keys and values by slot.

    A causal model sees by slot: it is fed what is observed, then the masks, and nothing from
    behind the end. A clean block has its places in order, so what is committed is in order too.
    """
    live_Bb = jnp.broadcast_to(state.active[:, None], ids_Bb.shape)
    old = state.context.cache
    if not plan.causal:
        return step_fn(params, ids_Bb, positions_Bb, live_Bb, old, state.start)
    live_Bb &= positions_Bb < state.end[:, None]
    slots_Bb = jnp.argsort(state.masked, axis=1, stable=True)
    turn = partial(jnp.take_along_axis, indices=slots_Bb, axis=1)
    inputs = (turn(ids_Bb), turn(positions_Bb), turn(live_Bb))
    logits_BbV, fresh = step_fn(params, *inputs, old, state.start)
    places_Bb = jnp.argsort(slots_Bb, axis=1)
    return jnp.take_along_axis(logits_BbV, places_Bb[..., None], axis=1), fresh


def unmask(state: Canvas, view: View, canvas_Bb, dirty_B, plan: Plan) -> Canvas:
    """Settles the tokens that the strategy picks, in the rows whose block still has a mask."""
    positions_Bb = _positions(state, plan)
    due = strategies.SCHEDULES[plan.schedule]
    due_B = due(state.step, block=plan.block, steps=plan.steps)
    picked_Bb = strategies.STRATEGIES[plan.strategy](view, state.masked, due_B, plan)
    picked_Bb &= dirty_B[:, None]
    masked_Bb = state.masked & ~picked_Bb
    canvas_Bb = jnp.where(picked_Bb, view.ids, canvas_Bb)
    tail_Bb = jnp.zeros_like(masked_Bb)
    if not plan.whole_blocks:
        # A stop token ends the answer once nothing before it is open; what is behind it is dropped.
        settled_Bb = jnp.cumprod(~masked_Bb, axis=1).astype(bool)
        stop_Bb = settled_Bb & _stops(state, canvas_Bb, positions_Bb, plan)
        tail_Bb = ops.behind_first(stop_Bb) & dirty_B[:, None]
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
    stop_Bb = keep_Bb & _stops(state, canvas_Bb, positions_Bb, plan)
    stopped_B = stop_Bb.any(1)
    moved = state.replace(start=state.start + plan.block * clean_B)
    length_B = moved.start
    if plan.causal:
        keep_Bb &= (positions_Bb < state.limit[:, None]) & ~ops.behind_first(stop_Bb)
        length_B = state.start + keep_Bb.sum(1)
    old = state.context
    context = old.replace(
        tokens=ctx.put(old.tokens, canvas_Bb, positions_Bb, keep_Bb),
        cache=ctx.write(old.cache, fresh, positions_Bb, keep_Bb),
        cached=jnp.where(clean_B, length_B, old.cached),
        length=jnp.where(clean_B, length_B, old.length),
    )
    next_Bb = _open(moved, _positions(moved, plan))
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
    width = plan.max_tokens
    if plan.whole_blocks or plan.rounded_limit:
        width += plan.block - 1
    tokens_BW, places_BW = ctx.window(state.context, state.prompt, width)
    reached_BW = places_BW < jnp.minimum(state.start, state.end)[:, None]
    reached_BW &= active_B[:, None]
    stop_BW = reached_BW & _stops(state, tokens_BW, places_BW, plan)
    answer_BW = reached_BW & (places_BW < state.limit[:, None]) & ~ops.behind_first(stop_BW)
    shown_BW = reached_BW if plan.whole_blocks else answer_BW
    return Generation(
        tokens=jnp.where(shown_BW, tokens_BW, 0),
        length=answer_BW.sum(1),
        sampled=shown_BW,
        logprobs=jnp.where(shown_BW, ctx.at(state.logprobs, places_BW), 0.0),
        order=jnp.where(shown_BW, ctx.at(state.order, places_BW), 0),
        stopped=state.stopped,
        forwards=state.forwards,
        commits=state.commits,
        fed=(state.forwards + state.commits) * plan.block,
    )


def _positions(state: Canvas, plan: Plan) -> jax.Array:
    """Positions of each row's block, i32[B, b]."""
    return state.start[:, None] + jnp.arange(plan.block)


def _open(state: Canvas, positions_BW: jax.Array) -> jax.Array:
    """Places that are to be denoised."""
    return (positions_BW >= state.prompt[:, None]) & (positions_BW < state.end[:, None])


def _stops(state: Canvas, tokens_BW, positions_BW, plan: Plan) -> jax.Array:
    """Stop tokens of the answer. In the prompt, or behind an answer's limit, they do not count."""
    in_answer_BW = positions_BW >= state.prompt[:, None]
    in_answer_BW &= positions_BW < state.limit[:, None]
    return in_answer_BW & ops.one_of(tokens_BW, plan.stop_ids)


def _step_keys(keys_B: jax.Array, state: Canvas, plan: Plan) -> jax.Array:
    """A key per row that depends on its own block and step only; a block takes at most b steps."""
    return jax.vmap(jax.random.fold_in)(keys_B, state.start * plan.block + state.step)
