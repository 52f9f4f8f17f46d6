"""LFM2's gated short convolution, told who precedes whom by the mask, not by the array.

A convolution mixes neighbours in an array. Here rows are packed and padded, and in training for
diffusion they hold a noisy copy besides the clean tokens. So what comes before a token is looked
up: the token that it is allowed to see and that stands at its position minus 1, 2, ...
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from mdlm_jax.models.blocks import QUIET, Linear
from mdlm_jax.models.config import ModelConfig


def sources(
    positions_BW: jax.Array, allowed_BWW: jax.Array, cached_B: jax.Array | None, *, taps: int
) -> tuple[jax.Array, jax.Array]:
    """Where the token 0, 1, ... taps - 1 places before each token is, and whether there is one.

    Returns i32[B, W, taps] places in [the taps last cached tokens | the window], and bool of the
    same shape.
    """
    wanted_BWT = positions_BW[:, :, None] - jnp.arange(taps)
    at_BWTW = positions_BW[:, None, None, :] == wanted_BWT[..., None]
    at_BWTW &= allowed_BWW[:, :, None, :]
    place_BWT, found_BWT = taps + jnp.argmax(at_BWTW, axis=-1), at_BWTW.any(-1)
    if cached_B is None:
        return place_BWT, found_BWT
    behind_BWT = cached_B[:, None, None] - wanted_BWT  # 1 = the last cached token
    in_cache_BWT = (behind_BWT >= 1) & (behind_BWT <= taps) & (wanted_BWT >= 0)
    return jnp.where(in_cache_BWT, taps - behind_BWT, place_BWT), found_BWT | in_cache_BWT


class ShortConv(nn.Module):
    """out(C * conv(B * u)) with (B, C, u) = in(x); depthwise, causal, no activation."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BWD, source, cached_BTD):
        """Mixed values f[B, W, D] and the convolution's fresh inputs f[B, W, D].

        `source` comes from `sources`; `cached_BTD` holds the inputs of the last cached tokens.
        """
        c = self.config
        taps, width = c.conv_L_cache, c.hidden_size
        gates = Linear(3 * width, c.conv_bias, name="in_proj")(x_BWD)
        before_BWD, after_BWD, u_BWD = jnp.split(gates, 3, axis=-1)
        fresh_BWD = before_BWD * u_BWD
        if cached_BTD is None:
            cached_BTD = jnp.zeros((x_BWD.shape[0], taps, width), fresh_BWD.dtype)
        joined = jnp.concatenate([cached_BTD.astype(fresh_BWD.dtype), fresh_BWD], axis=1)
        init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
        kernel_TD = self.param("kernel", init, (taps, width)).astype(x_BWD.dtype)
        place_BWT, found_BWT = source
        mixed_BWD = jnp.zeros_like(fresh_BWD)
        for back in range(taps):
            seen_BWD = jnp.take_along_axis(joined, place_BWT[..., back, None], axis=1)
            seen_BWD = jnp.where(found_BWT[..., back, None], seen_BWD, 0)
            mixed_BWD += kernel_TD[taps - 1 - back] * seen_BWD
        if c.conv_bias:
            mixed_BWD += self.param("bias", nn.initializers.zeros, (width,)).astype(x_BWD.dtype)
        out = Linear(width, c.conv_bias, QUIET, name="out_proj")
        return out(after_BWD * mixed_BWD), fresh_BWD
