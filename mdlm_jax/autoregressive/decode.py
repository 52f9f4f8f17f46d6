"""Decoding one token at a time, in one `lax.while_loop`."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from mdlm_jax import context as ctx
from mdlm_jax import ops, sampling
from mdlm_jax.structs import Context, Generation


@struct.dataclass
class Line:
    """State of the loop."""

    context: Context
    active: jax.Array  # bool[B]
    stopped: jax.Array  # bool[B]
    logprobs: jax.Array  # f32[B, C]
    forwards: jax.Array  # i32[B]


def generate(
    step_fn: Callable,
    params: dict,
    keys_B: jax.Array,
    context: Context,
    active_B: jax.Array,
    *,
    temperature: float,
    max_tokens: int,
    stop_ids: tuple[int, ...],
    filters: sampling.Filters = sampling.NO_FILTERS,
) -> tuple[Generation, Context]:
    """Writes at most `max_tokens` behind each active row's context, ending with a stop token.

    `step_fn` returns logits f32[B, 1, V] and the fresh keys and values of one token. The last
    token of a context is always pending: it is fed with the first pass. A row that comes to its
    last place and does not stop there by itself gets the first of `stop_ids`, forced (not
    `sampled`), and ends unstopped. Log-probs are those of softmax(logits / temperature), whatever
    the filters.
    """
    prompt_B = context.length
    limit_B = ctx.limit(prompt_B, context.tokens.shape[1], max_tokens=max_tokens)
    stops = jnp.asarray(stop_ids, jnp.int32)

    def one_token(state: Line) -> Line:
        old, on_B1 = state.context, state.active[:, None]
        tokens_B1, positions_B1 = ctx.window(old, old.length - 1, 1)
        logits_B1V, fresh = step_fn(params, tokens_B1, positions_B1, on_B1, old.cache, old.cached)
        next_keys_B = jax.vmap(jax.random.fold_in)(keys_B, old.length)
        is_said_BC = ops.length_mask(old.length, old.tokens.shape[1])
        ids_B, logprobs_B = sampling.sample(
            next_keys_B,
            logits_B1V[:, 0],
            temperature=temperature,
            top_k=filters.top_k,
            top_p=filters.top_p,
            min_p=filters.min_p,
            penalty=filters.repetition_penalty,
            said_BC=jnp.where(is_said_BC, old.tokens, -1),
        )
        stopped_B = jnp.isin(ids_B, stops)
        forced_B = (old.length + 1 >= limit_B) & ~stopped_B
        ids_B = jnp.where(forced_B, stops[0], ids_B)
        next_B1, chosen_B1 = old.length[:, None], on_B1 & ~forced_B[:, None]
        context = old.replace(
            tokens=ctx.put(old.tokens, ids_B[:, None], next_B1, on_B1),
            cache=ctx.write(old.cache, fresh, positions_B1, on_B1),
            cached=jnp.where(state.active, old.length, old.cached),
            length=old.length + state.active,
        )
        return Line(
            context=context,
            active=state.active & ~stopped_B & ~forced_B,
            stopped=state.stopped | (state.active & stopped_B),
            logprobs=ctx.put(state.logprobs, logprobs_B[:, None], next_B1, chosen_B1),
            forwards=state.forwards + state.active,
        )

    active_B = active_B & (limit_B > prompt_B) & (prompt_B > 0)
    state = Line(
        context=context,
        active=active_B,
        stopped=jnp.zeros_like(active_B),
        logprobs=jnp.zeros(context.tokens.shape, jnp.float32),
        forwards=jnp.zeros_like(prompt_B),
    )
    state = jax.lax.while_loop(lambda s: s.active.any(), one_token, state)
    return _collect(state, prompt_B, max_tokens), state.context


def _collect(state: Line, prompt_B: jax.Array, width: int) -> Generation:
    """Cuts what was written out of the buffers."""
    tokens_BW, places_BW = ctx.window(state.context, prompt_B, width)
    length_B = state.context.length - prompt_B
    written_BW = jnp.arange(width) < length_B[:, None]
    forced_BW = (jnp.arange(width) == length_B[:, None] - 1) & ~state.stopped[:, None]
    sampled_BW = written_BW & ~forced_BW
    return Generation(
        tokens=jnp.where(written_BW, tokens_BW, 0),
        length=length_B,
        sampled=sampled_BW,
        logprobs=jnp.where(sampled_BW, ctx.at(state.logprobs, places_BW), 0.0),
        order=jnp.where(written_BW, 1 + jnp.arange(width), 0),
        stopped=state.stopped,
        forwards=state.forwards,
        commits=jnp.zeros_like(length_B),
        fed=state.forwards,
    )
