"""The parts every layer is built from: normalisation, projections, the gated MLP."""

import flax.linen as nn
import jax
import jax.numpy as jnp

# Layers start by adding little to the residual stream, so that a token is still itself at the top.
QUIET = 0.1


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in float32."""

    eps: float

    @nn.compact
    def __call__(self, x):
        weight = self.param("weight", nn.initializers.ones, (x.shape[-1],))
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * scale).astype(x.dtype) * weight.astype(x.dtype)


class Linear(nn.Module):
    """x @ kernel (+ bias), over the last axis."""

    features: int
    bias: bool = False
    gain: float = 1.0  # of the initial output

    @nn.compact
    def __call__(self, x):
        shape = (x.shape[-1], self.features)
        normal = nn.initializers.variance_scaling(self.gain**2, "fan_in", "truncated_normal")
        kernel = self.param("kernel", normal, shape)
        # Two axes, not three: on XLA's CPU back end the weight gradient is twice as fast.
        flat = x.reshape(-1, x.shape[-1]) @ kernel.astype(x.dtype)
        if self.bias:
            bias = self.param("bias", nn.initializers.zeros, (self.features,))
            flat = flat + bias.astype(x.dtype)
        return flat.reshape(*x.shape[:-1], self.features)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)): SwiGLU (arXiv 2002.05202)."""

    width: int
    bias: bool = False

    @nn.compact
    def __call__(self, x_BWD):
        gate_BWF = Linear(self.width, self.bias, name="gate_proj")(x_BWD)
        up_BWF = Linear(self.width, self.bias, name="up_proj")(x_BWD)
        down = Linear(x_BWD.shape[-1], self.bias, QUIET, name="down_proj")
        return down(nn.silu(gate_BWF) * up_BWF)
