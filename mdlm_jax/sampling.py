"""Logits -> ids, confidences and log-probabilities.

Filters follow the logits processors of transformers, in the order of its `generate`: repetition
penalty, temperature, top-k, top-p, min-p. A removed token's logit is -inf. Every row draws from its
own key, so what a row says never depends on its batch mates.
"""

import dataclasses

import jax
import jax.numpy as jnp

from mdlm_jax import ops


@dataclasses.dataclass(frozen=True)
class Filters:
    """Which tokens may be drawn. The defaults leave the model's distribution as it is."""

    top_k: int = 0  # the k most likely; 0 = all
    top_p: float = 1.0  # the smallest set of at least this probability
    min_p: float = 0.0  # at least this times the probability of the most likely
    repetition_penalty: float = 1.0  # p > 1 makes what was said before less likely


NO_FILTERS = Filters()


def sample(
    keys_B: jax.Array,
    logits_BV: jax.Array,
    *,
    temperature: float | jax.Array,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    penalty: float = 1.0,
    said_BC: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Draws one token per distribution.

    Args:
        keys_B: typed key[B] (`jax.random.key`), one per row, used up by this call.
        logits_BV: f[B, ..., V].
        temperature: T >= 0, may be traced; 0 takes the most likely token. An array is broadcast
            against the logits: f32[B, 1, ...] gives each row its own.
        top_k, top_p, min_p: filters, see `filter_logits`; the defaults leave all tokens in.
        penalty, said_BC: see `repetition_penalty`; 1 = none, and then nothing need have been said.

    Returns:
        ids: i32[B, ...].
        logprobs: f32[B, ...] of those ids under softmax(logits / T) over *all* tokens, the filters
            and the penalty not counted (T = 1 when the temperature is 0), as a policy loss scores
            them later.
    """
    scaled_BV = scale(logits_BV, temperature=temperature)  # f32[B, ..., V]
    if penalty != 1.0:
        logits_BV = repetition_penalty(logits_BV, said_BC, penalty)
    filters = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    kept_BV = filter_logits(logits_BV, temperature=temperature, **filters)
    ids_B = draw(keys_B, kept_BV, temperature=temperature)
    return ids_B, ops.token_logprobs(scaled_BV, ids_B)


def draw(keys_B: jax.Array, logits_BV: jax.Array, *, temperature: float | jax.Array) -> jax.Array:
    """Draws from softmax(logits), by the Gumbel-max trick: argmax(logits + Gumbel noise).

    Args:
        keys_B: typed key[B], one per row, used up by this call.
        logits_BV: f32[B, ..., V], scaled by the temperature and filtered.
        temperature: where it is 0 the most likely token is taken. A constant 0 costs no random
            numbers: the compiler drops them.

    Returns:
        i32[B, ...].
    """
    noise_BV = jax.vmap(lambda key: jax.random.gumbel(key, logits_BV.shape[1:]))(keys_B)
    noise_BV = jnp.where(jnp.asarray(temperature) > 0, noise_BV, 0.0)
    return jnp.argmax(logits_BV + noise_BV, axis=-1).astype(jnp.int32)


def choose(
    keys_B: jax.Array,
    logits_BWV: jax.Array,
    *,
    temperature: float | jax.Array,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    forbidden: tuple[int, ...] = (),
    filtered: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A candidate for every place of a canvas, and how sure the model is of it.

    Args: as `sample`, with logits f[B, W, V], and
        top_k, top_p, min_p: as in `Filters`.
        forbidden: ids that are never drawn, though their probability still counts as the model's
            doubt.
        filtered: measure the confidence after the filters instead of before them.

    Returns:
        ids: i32[B, W].
        confidence: f32[B, W], probability of the candidate under softmax(logits / T) over all
            tokens, or over those that the filters keep.
        logprobs: f32[B, W], its log-probability over all tokens.
    """
    filters = {"temperature": 1.0, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    scaled_BWV = scale(logits_BWV, temperature=temperature)
    allowed_BWV = filter_logits(forbid(scaled_BWV, forbidden), **filters)
    ids_BW = draw(keys_B, allowed_BWV, temperature=temperature)
    logprobs_BW = ops.token_logprobs(scaled_BWV, ids_BW)
    if not filtered:
        return ids_BW, jnp.exp(logprobs_BW), logprobs_BW
    # The candidate's own logit, so that a filter that leaves one token makes it exactly certain.
    chosen_BW = jnp.take_along_axis(scaled_BWV, ids_BW[..., None], axis=-1)[..., 0]
    kept_BW = jax.nn.logsumexp(filter_logits(scaled_BWV, **filters), axis=-1)
    return ids_BW, jnp.exp(chosen_BW - kept_BW), logprobs_BW


def filter_logits(
    logits: jax.Array,
    *,
    temperature: float | jax.Array,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> jax.Array:
    """Temperature, then top-k, top-p and min-p: f[..., V] -> f32[..., V], -inf where removed."""
    logits = scale(logits, temperature=temperature)
    return min_p_filter(top_p_filter(top_k_filter(logits, top_k), top_p), min_p)


def scale(logits: jax.Array, *, temperature: float | jax.Array) -> jax.Array:
    """logits / T in float32; unchanged at T = 0, where the caller takes the largest."""
    temperature = jnp.asarray(temperature, jnp.float32)
    return logits.astype(jnp.float32) / jnp.where(temperature > 0, temperature, 1.0)


def forbid(logits: jax.Array, ids: tuple[int, ...] | jax.Array) -> jax.Array:
    """Sets the logits of the given ids to -inf: f[..., V], i32[n] -> f[..., V]."""
    # A selection, not a scatter: it fuses with what is around it.
    forbidden_V = jnp.isin(jnp.arange(logits.shape[-1]), jnp.asarray(ids, jnp.int32))
    return jnp.where(forbidden_V, -jnp.inf, logits)


def repetition_penalty(logits: jax.Array, seen: jax.Array, penalty: float) -> jax.Array:
    """Makes tokens that were already said less likely (p > 1); repeats do not compound.

    logit * p where it is negative, logit / p elsewhere (CTRL, Keskar et al. 2019).

    Args:
        logits: f[B, V].
        seen: i32[B, C] ids; -1 = nothing there.
    """
    vocab = logits.shape[-1]
    # An index beyond V is dropped; a plain -1 would wrap to the last token.
    places = jnp.where(seen < 0, vocab, seen)
    rows = jnp.arange(logits.shape[0])[:, None]
    said_BV = jnp.zeros(logits.shape, bool).at[rows, places].set(True, mode="drop")
    punished_BV = jnp.where(logits < 0, logits * penalty, logits / penalty)
    return jnp.where(said_BV, punished_BV, logits)


def top_k_filter(logits: jax.Array, k: int, *, min_keep: int = 1) -> jax.Array:
    """Keeps the k largest logits and all ties with the k-th; k <= 0 keeps everything."""
    vocab = logits.shape[-1]
    if k <= 0 or k >= vocab:
        return logits
    kth = jax.lax.top_k(logits, min(max(k, min_keep), vocab))[0][..., -1:]  # f[..., 1]
    return jnp.where(logits < kth, -jnp.inf, logits)


def top_p_filter(logits: jax.Array, p: float, *, min_keep: int = 1) -> jax.Array:
    """Keeps the most likely tokens up to and including the one whose running total crosses p.

    Tokens that tie with the last one kept are kept too. Nucleus sampling, Holtzman et al. 2020.
    """
    if p >= 1.0:
        return logits
    ranked = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)  # f[..., V], most likely first
    probs = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs  # probability of everything ranked above
    keep = (before < p) | (jnp.arange(logits.shape[-1]) < min_keep)
    lowest = jnp.min(jnp.where(keep, ranked, jnp.inf), axis=-1, keepdims=True)  # f[..., 1]
    return jnp.where(logits < lowest, -jnp.inf, logits)


def min_p_filter(logits: jax.Array, p: float, *, min_keep: int = 1) -> jax.Array:
    """Keeps tokens with at least p times the probability of the most likely one (Nguyen 2024)."""
    if p <= 0.0:
        return logits
    probs = jax.nn.softmax(logits, axis=-1)
    keep = probs >= p * jnp.max(probs, axis=-1, keepdims=True)
    if min_keep > 1:
        keep |= logits >= jax.lax.top_k(logits, min(min_keep, logits.shape[-1]))[0][..., -1:]
    return jnp.where(keep, logits, -jnp.inf)
