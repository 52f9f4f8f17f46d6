"""Which masked tokens of a block are settled after one look at it, and when (specs/sdar.md 5).

The public engines differ in small ways that change the text; each way has a name here, and PRESETS
puts them together as the engines do.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from mdlm_jax import ops, sampling

static = partial(struct.field, pytree_node=False)


@struct.dataclass
class Plan:
    """How answers are written, block by block.

    What shapes the program is static. The numbers `steps`, `threshold`, `temperature`, `stop_ids`
    and `budget` may be traced, so that another value compiles nothing, and each may be an array
    [B]: one value per row.
    """

    strategy: str = static()  # a key of STRATEGIES
    block: int = static()  # b, tokens denoised together
    max_tokens: int = static()  # of an answer, in any row
    mask_id: int = static()  # never chosen; tracked by position, so it may stand in a prompt
    pad_id: int = static()  # fills the block behind the answer
    steps: int | jax.Array  # S, denoising steps per block
    threshold: float | jax.Array  # confidence (dynamic) or nats (entropy bounded)
    temperature: float | jax.Array  # 0 = greedy
    stop_ids: tuple[int | jax.Array, ...]  # the first of these ends an answer
    budget: int | jax.Array | None = None  # tokens of a row's answer, if fewer than max_tokens
    top_k: int = static(default=0)  # filters of the candidates, as in sampling.py
    top_p: float = static(default=1.0)
    min_p: float = static(default=0.0)
    filtered: bool = static(default=False)  # confidence and entropy are taken after the filters
    fallback: str = static(default="top_k")  # a key of FALLBACKS
    inclusive: bool = static(default=False)  # confidence >= threshold is enough; else >
    schedule: str = static(default="remainder_first")  # a key of SCHEDULES
    # The last block is denoised to its end, past a stop token and past the limit; what stands
    # there stays in the context. Else the answer ends as soon as it can, and padding fills up.
    whole_blocks: bool = static(default=False)
    rounded_limit: bool = static(default=False)  # an answer may run to the end of its last block
    # The model is causal by slot (WeDLM): blocks follow the prompt, and observed tokens are fed
    # before masks. Else block-causal (SDAR): blocks lie at multiples of b.
    causal: bool = static(default=False)


# What the public engines do, without their defects: settled tokens are never overwritten, the mask
# is never chosen, and no mask is left. Apply with `plan.replace(**PRESETS[name])`.
CANONICAL = {
    "filtered": False,
    "fallback": "top_k",
    "inclusive": False,
    "schedule": "remainder_first",
    "whole_blocks": False,
    "rounded_limit": False,
    "causal": False,
}
ENGINE = CANONICAL | {"whole_blocks": True, "rounded_limit": True}
PRESETS = {
    "canonical": CANONICAL,
    "generate_py": ENGINE | {"filtered": True},
    "opencompass": ENGINE,  # with top_k = 1
    "jetengine": ENGINE | {"fallback": "left_most"},
    "lmdeploy": ENGINE
    | {"fallback": "best", "inclusive": True, "schedule": "floor", "rounded_limit": False},
    "sglang": ENGINE
    | {"strategy": "low_confidence_dynamic", "temperature": 0.0, "fallback": "best"}
    | {"schedule": "one", "rounded_limit": False},
    # WeDLM's generate_wedlm (specs/wedlm.md 4). Its threshold 0 means one token per step, which is
    # the strategy low_confidence_static here.
    "wedlm_block": CANONICAL
    | {"strategy": "low_confidence_dynamic", "fallback": "best", "inclusive": True}
    | {"schedule": "one", "causal": True},
}


@struct.dataclass
class View:
    """What a strategy may look at. All [B, b]."""

    ids: jax.Array  # i32
    confidence: jax.Array  # f32
    logprobs: jax.Array  # f32
    entropy: jax.Array  # f32  nats
    lottery: jax.Array  # f32  uniform


def look(keys_B: jax.Array, logits_BbV: jax.Array, plan: Plan) -> View:
    """Samples every position of the canvas and measures how sure the model is of it."""
    keys_2B = jax.vmap(jax.random.split, out_axes=1)(keys_B)
    temperature = jnp.reshape(plan.temperature, (-1, 1, 1))
    filters = {"top_k": plan.top_k, "top_p": plan.top_p, "min_p": plan.min_p}
    ids_Bb, confidence_Bb, logprobs_Bb = sampling.choose(
        keys_2B[0],
        logits_BbV,
        temperature=temperature,
        forbidden=(plan.mask_id,),
        filtered=plan.filtered,
        **filters,
    )
    judged_BbV = sampling.scale(logits_BbV, temperature=temperature)
    if plan.filtered:
        judged_BbV = sampling.filter_logits(judged_BbV, temperature=1.0, **filters)
    lottery_Bb = jax.vmap(lambda key: jax.random.uniform(key, ids_Bb.shape[1:]))(keys_2B[1])
    return View(ids_Bb, confidence_Bb, logprobs_Bb, ops.entropy(judged_BbV), lottery_Bb)


# ---- strategies: (View, masked bool[B, b], tokens due i32[B], Plan) -> to settle, bool[B, b] -----


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


def left_most(score_Bb: jax.Array, masked_Bb: jax.Array, k_B: jax.Array) -> jax.Array:
    """The masked tokens among k places from the first mask on, bool[B, b].

    As in JetEngine, a settled token among them uses up its place: at least one is picked, and fewer
    than k where masks are apart.
    """
    del score_Bb
    first_B1 = jnp.argmax(masked_Bb, axis=1)[:, None]
    return masked_Bb & (jnp.arange(masked_Bb.shape[1]) < first_B1 + k_B[:, None])


def best(score_Bb: jax.Array, masked_Bb: jax.Array, k_B: jax.Array) -> jax.Array:
    """The one masked token with the best score, bool[B, b]."""
    return top_k(score_Bb, masked_Bb, jnp.ones_like(k_B))


# What the dynamic strategy settles when fewer tokens than are due are sure.
FALLBACKS = {"top_k": top_k, "left_most": left_most, "best": best}


def low_confidence_static(view: View, masked_Bb, k_B, plan: Plan) -> jax.Array:
    """The k most confident masked tokens."""
    del plan
    return top_k(view.confidence, masked_Bb, k_B)


def low_confidence_dynamic(view: View, masked_Bb, k_B, plan: Plan) -> jax.Array:
    """All masked tokens above the threshold if there are k of them, else the fall-back's."""
    threshold = jnp.reshape(plan.threshold, (-1, 1))
    above_Bb = view.confidence > threshold
    if plan.inclusive:
        above_Bb |= view.confidence == threshold
    sure_Bb = masked_Bb & above_Bb
    enough_B = sure_Bb.sum(1) >= k_B
    fallback_Bb = FALLBACKS[plan.fallback](view.confidence, masked_Bb, k_B)
    return jnp.where(enough_B[:, None], sure_Bb, fallback_Bb)


def sequential(view: View, masked_Bb, k_B, plan: Plan) -> jax.Array:
    """The k left-most masked tokens."""
    del view, plan
    return masked_Bb & (jnp.cumsum(masked_Bb, 1) <= k_B[:, None])


def random(view: View, masked_Bb, k_B, plan: Plan) -> jax.Array:
    """k masked tokens, uniformly."""
    del plan
    return top_k(view.lottery, masked_Bb, k_B)


def entropy_bounded(view: View, masked_Bb, k_B, plan: Plan) -> jax.Array:
    """The n masked tokens of lowest entropy.

    n counts the running sums of the entropies, lowest first, that are below the threshold; at
    least 1.
    """
    del k_B
    rank_Bb = rank(-view.entropy, masked_Bb)
    ahead_Bbb = masked_Bb[:, None, :] & (rank_Bb[:, None, :] <= rank_Bb[:, :, None])
    total_Bb = jnp.where(ahead_Bbb, view.entropy[:, None, :], 0.0).sum(-1)
    below_Bb = masked_Bb & (total_Bb < jnp.reshape(plan.threshold, (-1, 1)))
    return masked_Bb & (rank_Bb < jnp.maximum(below_Bb.sum(1, keepdims=True), 1))


STRATEGIES: dict[str, Callable] = {
    "low_confidence_dynamic": low_confidence_dynamic,
    "low_confidence_static": low_confidence_static,
    "sequential": sequential,
    "random": random,
    "entropy_bounded": entropy_bounded,
}


# ---- schedules: (step i32[B], b, S) -> tokens due at this step, at least one, i32[B] -------------


def remainder_first(step_B: jax.Array, *, block: int, steps: int | jax.Array) -> jax.Array:
    """block // steps, and one more in the first block % steps."""
    return jnp.maximum(block // steps + (step_B < block % steps), 1)


def floor(step_B: jax.Array, *, block: int, steps: int | jax.Array) -> jax.Array:
    """block // steps; what remains takes further steps."""
    return jnp.maximum(jnp.zeros_like(step_B) + block // steps, 1)


def one(step_B: jax.Array, *, block: int, steps: int | jax.Array) -> jax.Array:
    """One."""
    del block, steps
    return jnp.ones_like(step_B)


SCHEDULES: dict[str, Callable] = {"remainder_first": remainder_first, "floor": floor, "one": one}
