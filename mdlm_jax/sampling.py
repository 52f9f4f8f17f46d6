"""Logits -> ids, confidences and log-probabilities.

Filters follow the logits processors of transformers, in the order of its `generate`: repetition
penalty, temperature, top-k, top-p, min-p. A removed token's logit is -inf. Every row draws from its
own key, so what a row says never depends on its batch mates.
"""

import jax
import jax.numpy as jnp


def sample(
    keys_B: jax.Array,
    logits_BV: jax.Array,
    *,
    temperature: float | jax.Array,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Draws one token per distribution by the Gumbel-max trick: argmax(logits / T + Gumbel noise).

    Args:
        keys_B: typed key[B] (`jax.random.key`), one per row, used up by this call.
        logits_BV: f[B, ..., V].
        temperature: T >= 0, may be traced; 0 takes the most likely token. A constant 0 costs no
            random numbers: the compiler drops them.
        top_k, top_p, min_p: filters, see `filter_logits`; the defaults leave all tokens in.

    Returns:
        ids: i32[B, ...].
        logprobs: f32[B, ...] of those ids under softmax(logits / T) over *all* tokens, the filters
            not counted (T = 1 when the temperature is 0), as a policy loss scores them later.
    """
    scaled_BV = scale(logits_BV, temperature=temperature)  # f32[B, ..., V]
    noise_BV = jax.vmap(lambda key: jax.random.gumbel(key, logits_BV.shape[1:]))(keys_B)
    noise_BV = jnp.where(jnp.asarray(temperature) > 0, noise_BV, 0.0)
    kept_BV = min_p_filter(top_p_filter(top_k_filter(scaled_BV, top_k), top_p), min_p)
    ids_B = jnp.argmax(kept_BV + noise_BV, axis=-1).astype(jnp.int32)
    chosen_B = jnp.take_along_axis(scaled_BV, ids_B[..., None], axis=-1)[..., 0]
    return ids_B, chosen_B - jax.nn.logsumexp(scaled_BV, axis=-1)


def choose(
    keys_B: jax.Array,
    logits_BWV: jax.Array,
    *,
    temperature: float | jax.Array,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A candidate for every place of a canvas, and how sure the model is of it.

    Args: as `sample`, with logits f[B, W, V].

    Returns:
        ids: i32[B, W].
        confidence: f32[B, W], probability of the candidate under softmax(logits / T), unfiltered.
        logprobs: f32[B, W], its logarithm.
    """
    ids_BW, logprobs_BW = sample(
        keys_B, logits_BWV, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    return ids_BW, jnp.exp(logprobs_BW), logprobs_BW


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
    return logits.at[..., jnp.asarray(ids, jnp.int32)].set(-jnp.inf)


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
