"""Rotary position embeddings: one table of angles per forward pass, in every variant of the hub.

Sources: RoFormer (arXiv 2104.09864); linear and dynamic (NTK) scaling; YaRN (arXiv 2309.00071);
Llama 3.1; LongRoPE (arXiv 2402.13753); the names are those of transformers.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Scaling:
    """`rope_parameters` (or `rope_scaling`) of a config, without the base."""

    rope_type: str  # a key of VARIANTS
    max_position_embeddings: int = 0
    original_max_position_embeddings: int = 0  # 0 = max_position_embeddings
    factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @property
    def original(self) -> int:
        """N0, the length the model was first trained for."""
        return self.original_max_position_embeddings or self.max_position_embeddings


def plain(width: int, theta: float | jax.Array) -> jax.Array:
    """theta^(-2i/K) for i < K/2: f32[K/2], or f32[B, K/2] for a base per row."""
    exponent_k = jnp.arange(0, width, 2, dtype=jnp.float32) / width
    return 1.0 / jnp.asarray(theta, jnp.float32)[..., None] ** exponent_k


# ---- variants: (width, theta, Scaling, length i32[B]) -> (f32[k] or f32[B, k], factor) ---------


def linear(width: int, theta: float, s: Scaling, length_B: jax.Array):
    """Positions are divided by the factor."""
    return plain(width, theta) / s.factor, 1.0


def dynamic(width: int, theta: float, s: Scaling, length_B: jax.Array):
    """The base grows with the row's length once that passes the trained one (NTK)."""
    limit = s.max_position_embeddings
    length_B = jnp.maximum(length_B, limit).astype(jnp.float32)
    grown_B = (s.factor * length_B / limit - (s.factor - 1)) ** (width / (width - 2))
    return plain(width, theta * grown_B), 1.0


def yarn(width: int, theta: float, s: Scaling, length_B: jax.Array):
    """Slow dimensions are interpolated, fast ones kept, a ramp between them."""

    def dimension(turns: float) -> float:
        return width * math.log(s.original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(s.beta_fast), dimension(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high = high + 0.001 if low == high else high
    ramp_k = jnp.clip((jnp.arange(width // 2, dtype=jnp.float32) - low) / (high - low), 0, 1)
    frequency_k = plain(width, theta)
    factor = s.factor or s.max_position_embeddings / s.original
    frequency_k = frequency_k / factor * ramp_k + frequency_k * (1 - ramp_k)
    return frequency_k, _yarn_factor(s, factor)


def _yarn_factor(s: Scaling, factor: float) -> float:
    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if s.attention_factor is not None:
        return s.attention_factor
    if s.mscale and s.mscale_all_dim:
        return magnitude(s.mscale) / magnitude(s.mscale_all_dim)
    return magnitude(1.0)


def llama3(width: int, theta: float, s: Scaling, length_B: jax.Array):
    """Long wavelengths are stretched, short ones kept, a linear mix between them."""
    frequency_k = plain(width, theta)
    turns_k = s.original * frequency_k / (2 * math.pi)  # in the trained length
    mix_k = (turns_k - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    mix_k = jnp.clip(mix_k, 0, 1)
    return (1 - mix_k) * frequency_k / s.factor + mix_k * frequency_k, 1.0


def longrope(width: int, theta: float, s: Scaling, length_B: jax.Array):
    """A searched factor per dimension, other ones for rows beyond the trained length."""
    short_k, long_k = jnp.asarray(s.short_factor), jnp.asarray(s.long_factor)
    factor_Bk = jnp.where((length_B > s.original)[:, None], long_k, short_k)
    factor = s.factor or s.max_position_embeddings / s.original
    attention = s.attention_factor
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(s.original))
    return plain(width, theta) / factor_Bk, attention


VARIANTS: dict[str, Callable] = {
    "linear": linear,
    "dynamic": dynamic,
    "yarn": yarn,
    "llama3": llama3,
    "longrope": longrope,
}


def frequencies(
    width: int, theta: float, scaling: Scaling | None, length_B: jax.Array
) -> tuple[jax.Array, float]:
    """Radians per position, f32[B or 1, K/2], and the factor on cosine and sine."""
    if scaling is None:
        return plain(width, theta)[None], 1.0
    frequency, factor = VARIANTS[scaling.rope_type](width, theta, scaling, length_B)
    return jnp.atleast_2d(frequency), factor


def angles(
    positions_BW: jax.Array,
    live_BW: jax.Array,
    *,
    width: int,
    theta: float,
    scaling: Scaling | None,
) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine f32[B, W, 1, K/2] for `rotate`.

    The length that some variants depend on is the row's own largest live position + 1, so that a
    row's numbers never depend on its batch mates.
    """
    length_B = jnp.max(jnp.where(live_BW, positions_BW, 0), axis=1) + 1
    frequency_Bk, factor = frequencies(width, theta, scaling, length_B)
    angle_BW1k = positions_BW[:, :, None, None] * frequency_Bk[:, None, None, :]
    return jnp.cos(angle_BW1k) * factor, jnp.sin(angle_BW1k) * factor


def rotate(x_BWHK: jax.Array, cos_BW1k: jax.Array, sin_BW1k: jax.Array) -> jax.Array:
    """Half-split: dimension i turns with i + K/2."""
    left, right = jnp.split(x_BWHK.astype(jnp.float32), 2, axis=-1)
    turned = (left * cos_BW1k - right * sin_BW1k, right * cos_BW1k + left * sin_BW1k)
    return jnp.concatenate(turned, axis=-1).astype(x_BWHK.dtype)
