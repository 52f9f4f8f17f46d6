"""Streaming parallel decoding (WeDLM, specs/wedlm.md 4), in one `lax.while_loop`.

A window of W places lies behind the text. Each pass feeds its observed tokens, then its masks, to
a model that is causal by slot, each token with its own position: so every mask sees all that is
known. Masks that the model is sure of are filled, and never change again. The filled tokens that
lead the window see only what precedes them in the text, so they are final: the next pass commits
them, and the window moves on by as many places, which that pass sees as fresh masks already.

The whole prompt is read before (`context.read` with all of it settled). The cache is written once
per pass, and only what is committed: the first slots of the pass, in the order of the text.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from mdlm_jax import context as ctx
from mdlm_jax import ops, sampling
from mdlm_jax.structs import Cache, Context, Generation

static = partial(struct.field, pytree_node=False)


@struct.dataclass
class Plan:
    """How answers are written, token by token of a sliding window.

    What shapes the program is static. The numbers may be traced, so that another value compiles
    nothing, and each may be an array [B]: one value per row.
    """

    window: int = static()  # W, places that are looked at behind what is committed
    max_tokens: int = static()  # of an answer, in any row
    mask_id: int = static()  # fed at open places, which are tracked by position
    threshold: float | jax.Array | None  # nats; None = one token per pass
    penalty: float | jax.Array  # nats per place of distance to the first mask
    temperature: float | jax.Array = 0.0  # 0 = greedy
    stop_ids: tuple[int | jax.Array, ...] = ()  # the first of these ends an answer
    # So does the first of these to be completed, wherever it began. None of them is empty.
    stop_sequences: tuple[tuple[int | jax.Array, ...], ...] = ()
    budget: int | jax.Array | None = None  # tokens of a row's answer, if fewer than max_tokens
    top_k: int = static(default=0)  # filters of the candidates, before the temperature
    top_p: float = static(default=1.0)
    forbid_mask: bool = static(default=False)  # the engine may write the mask id as a token


@struct.dataclass
class Stream:
    """State of the loop. A place is filled once it has an order; its token is in the context."""

    context: Context  # its length counts what is committed
    prompt: jax.Array  # i32[B]  where the answer begins
    limit: jax.Array  # i32[B]   where it ends at the latest
    active: jax.Array  # bool[B]
    stopped: jax.Array  # bool[B]
    logprobs: jax.Array  # f32[B, C]
    order: jax.Array  # i32[B, C]
    forwards: jax.Array  # i32[B]
    fed: jax.Array  # i32[B]


@struct.dataclass
class Slots:
    """What one pass is fed, in the order of the model's sight. All [B, 2W] but `leading`."""

    tokens: jax.Array  # i32
    positions: jax.Array  # i32
    live: jax.Array  # bool  the rest is not there
    masked: jax.Array  # bool
    leading: jax.Array  # i32[B]  the first slots, which are to be committed


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

    `step_fn` returns logits f32[B, 2W, V] and fresh keys and values for 2W slots, causal by slot.
    A row ends with a stop token or the last token of a stop sequence, which stay in the answer; or
    unstopped, after `max_tokens` or with a full context. All of a context is cached, before and
    after. A token is committed in the pass after the one that filled it or, if later, the last of
    those that filled what stands before it: `forwards` counts the last commit's pass, too.
    """

    def one_pass(state: Stream) -> Stream:
        state = state.replace(forwards=state.forwards + state.active)
        slots = lay(state, plan)
        old = state.context
        logits_BwV, fresh = step_fn(
            params, slots.tokens, slots.positions, slots.live, old.cache, old.length
        )
        pass_keys_B = jax.vmap(jax.random.fold_in)(keys_B, state.forwards)
        state = commit(state, slots, fresh, plan)
        return fill(pass_keys_B, state, slots, logits_BwV, plan)

    state = start(context, active_B, plan)
    state = jax.lax.while_loop(lambda s: s.active.any(), one_pass, state)
    return collect(state, plan), state.context


def start(context: Context, active_B: jax.Array, plan: Plan) -> Stream:
    """The loop's first state: nothing is filled."""
    prompt_B, size = context.length, context.tokens.shape[1]
    limit_B = ctx.limit(prompt_B, size, max_tokens=plan.max_tokens, budget=plan.budget)
    zeros_B = jnp.zeros_like(prompt_B)
    return Stream(
        context=context,
        prompt=prompt_B,
        limit=limit_B,
        active=active_B & (limit_B > prompt_B),
        stopped=jnp.zeros_like(active_B),
        logprobs=jnp.zeros(context.tokens.shape, jnp.float32),
        order=jnp.zeros(context.tokens.shape, jnp.int32),
        forwards=zeros_B,
        fed=zeros_B,
    )


def lay(state: Stream, plan: Plan) -> Slots:
    """The window's slots: observed tokens, then masks, each ascending; then nothing.

    With p leading tokens that are filled, the window has W + p places, the last p of them fresh:
    never more than 2W, and none behind the context's end.
    """
    begin_B, size = state.context.length, state.order.shape[1]
    tokens_Bw, places_Bw = ctx.window(state.context, begin_B, 2 * plan.window)
    inside_Bw = places_Bw < size
    filled_Bw = inside_Bw & (ctx.at(state.order, places_Bw) > 0)
    leading_B = jnp.cumprod(filled_Bw, axis=1).sum(1)
    live_Bw = inside_Bw & (places_Bw < (begin_B + plan.window + leading_B)[:, None])
    live_Bw &= state.active[:, None]
    masked_Bw = live_Bw & ~filled_Bw
    rank_Bw = jnp.where(live_Bw, masked_Bw, 2)
    slots_Bw = jnp.argsort(rank_Bw, axis=1, stable=True)
    turn = partial(jnp.take_along_axis, indices=slots_Bw, axis=1)
    return Slots(
        tokens=turn(jnp.where(masked_Bw, plan.mask_id, tokens_Bw)),
        positions=turn(places_Bw),
        live=turn(live_Bw),
        masked=turn(masked_Bw),
        leading=leading_B,
    )


def commit(state: Stream, slots: Slots, fresh: Cache, plan: Plan) -> Stream:
    """Adds the leading tokens to the answer, up to its end, and caches them."""
    old = state.context
    out_Bw = jnp.arange(2 * plan.window) < slots.leading[:, None]
    out_Bw &= state.active[:, None]
    stop_Bw = ops.one_of(slots.tokens, plan.stop_ids)
    for sequence in plan.stop_sequences:
        stop_Bw |= completes(sequence, old.tokens, slots.positions)
    stop_Bw &= out_Bw
    end_Bw = stop_Bw | (out_Bw & (slots.positions + 1 >= state.limit[:, None]))
    kept_Bw = out_Bw & ~ops.behind_first(end_Bw)
    length_B = old.length + kept_Bw.sum(1)
    context = old.replace(
        cache=ctx.write(old.cache, fresh, slots.positions, kept_Bw),
        length=length_B,
        cached=jnp.where(state.active, length_B, old.cached),
    )
    return state.replace(
        context=context,
        active=state.active & ~end_Bw.any(1),
        stopped=state.stopped | (kept_Bw & stop_Bw).any(1),
        fed=state.fed + slots.live.sum(1),
    )


def completes(
    sequence: tuple[int | jax.Array, ...], tokens_BC: jax.Array, positions_BW: jax.Array
) -> jax.Array:
    """Whether the text up to each position ends with the sequence, bool[B, W]."""
    found_BW = jnp.ones(positions_BW.shape, bool)
    for back, id_ in enumerate(reversed(sequence)):
        places_BW = positions_BW - back
        there_BW = ctx.at(tokens_BC, places_BW)
        found_BW &= (places_BW >= 0) & (there_BW == jnp.reshape(id_, (-1, 1)))
    return found_BW


def fill(
    keys_B: jax.Array, state: Stream, slots: Slots, logits_BwV: jax.Array, plan: Plan
) -> Stream:
    """Fills the masks that the model is sure of, in the rows that go on."""
    picked_Bw = pick(ops.entropy(logits_BwV), slots, plan) & state.active[:, None]
    ids_Bw, logprobs_Bw = choose(keys_B, logits_BwV, plan)
    order_Bw = jnp.broadcast_to(state.forwards[:, None], picked_Bw.shape)
    tokens_BC = ctx.put(state.context.tokens, ids_Bw, slots.positions, picked_Bw)
    return state.replace(
        context=state.context.replace(tokens=tokens_BC),
        logprobs=ctx.put(state.logprobs, logprobs_Bw, slots.positions, picked_Bw),
        order=ctx.put(state.order, order_Bw, slots.positions, picked_Bw),
    )


def pick(entropy_Bw: jax.Array, slots: Slots, plan: Plan) -> jax.Array:
    """All masks j with A_j < threshold, or the one of lowest A_j if there are none, bool[B, 2W].

    A_j = H_j + penalty * (p_j - p_0): the entropy in nats, of the raw logits, and the distance to
    the first mask.
    """
    far = jnp.iinfo(jnp.int32).max
    first_B1 = jnp.where(slots.masked, slots.positions, far).min(1, keepdims=True)
    distance_Bw = (slots.positions - first_B1).astype(jnp.float32)
    cost_Bw = entropy_Bw + jnp.reshape(plan.penalty, (-1, 1)) * distance_Bw
    best_B = jnp.argmin(jnp.where(slots.masked, cost_Bw, jnp.inf), axis=1)
    best_Bw = slots.masked & (jnp.arange(cost_Bw.shape[1]) == best_B[:, None])
    if plan.threshold is None:
        return best_Bw
    sure_Bw = slots.masked & (cost_Bw < jnp.reshape(plan.threshold, (-1, 1)))
    return jnp.where(sure_Bw.any(1, keepdims=True), sure_Bw, best_Bw)


def choose(keys_B: jax.Array, logits_BwV: jax.Array, plan: Plan) -> tuple[jax.Array, jax.Array]:
    """A token for every slot, i32[B, 2W], and its log-prob under softmax(logits / T), unfiltered.

    Unlike elsewhere, top-k and top-p look at the raw logits, and the temperature comes last.
    """
    temperature = jnp.reshape(plan.temperature, (-1, 1, 1))
    forbidden = (plan.mask_id,) if plan.forbid_mask else ()
    kept_BwV = sampling.filter_logits(
        sampling.forbid(logits_BwV, forbidden),
        temperature=1.0,
        top_k=plan.top_k,
        top_p=plan.top_p,
    )
    scale = partial(sampling.scale, temperature=temperature)
    ids_Bw = sampling.draw(keys_B, scale(kept_BwV), temperature=temperature)
    return ids_Bw, ops.token_logprobs(scale(logits_BwV), ids_Bw)


def collect(state: Stream, plan: Plan) -> Generation:
    """Cuts the answers out of the buffers."""
    tokens_BW, places_BW = ctx.window(state.context, state.prompt, plan.max_tokens)
    length_B = state.context.length - state.prompt
    written_BW = ops.length_mask(length_B, plan.max_tokens)
    return Generation(
        tokens=jnp.where(written_BW, tokens_BW, 0),
        length=length_B,
        sampled=written_BW,
        logprobs=jnp.where(written_BW, ctx.at(state.logprobs, places_BW), 0.0),
        order=jnp.where(written_BW, ctx.at(state.order, places_BW), 0),
        stopped=state.stopped,
        forwards=state.forwards,
        commits=jnp.zeros_like(length_B),
        fed=state.fed,
    )
