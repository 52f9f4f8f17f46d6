"""A mixture of experts: every token passes through its own few, and only those are computed."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from mdlm_jax.models.blocks import QUIET
from mdlm_jax.models.config import ModelConfig


def route(logits_TE: jax.Array, *, top: int, normalise: bool) -> tuple[jax.Array, jax.Array]:
    """Weights f32[T, top] and experts i32[T, top]: softmax over all experts, then the best few."""
    weights_Tk, experts_Tk = jax.lax.top_k(jax.nn.softmax(logits_TE, axis=-1), top)
    if normalise:
        weights_Tk /= weights_Tk.sum(-1, keepdims=True)
    return weights_Tk, experts_Tk


class Experts(nn.Module):
    """Sum over a token's experts of weight * down(silu(gate(x)) * up(x)); the router in float32.

    Tokens are sorted by expert, so that each expert is one dense product over its own tokens.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BWD):
        c = self.config
        count, width, inner = c.num_experts, c.hidden_size, c.moe_intermediate_size
        x_TD = x_BWD.reshape(-1, width)
        router_DE = self.param("gate", nn.initializers.lecun_normal(), (width, count))
        logits_TE = (x_TD @ router_DE.astype(x_TD.dtype)).astype(jnp.float32)
        weights_Tk, experts_Tk = route(
            logits_TE, top=c.num_experts_per_tok, normalise=c.norm_topk_prob
        )
        order = jnp.argsort(experts_Tk.reshape(-1), stable=True)  # i32[T k] (token, choice) pairs
        sizes_E = jnp.bincount(experts_Tk.reshape(-1), length=count)
        token = order // c.num_experts_per_tok

        def project(name, x, shape, gain):
            normal = nn.initializers.variance_scaling(
                gain**2, "fan_in", "truncated_normal", batch_axis=0
            )
            kernel = self.param(name, normal, (count, *shape))
            return jax.lax.ragged_dot(x, kernel.astype(x.dtype), sizes_E)

        sorted_SD = x_TD[token]
        gate_SF = project("gate_proj", sorted_SD, (width, inner), 1.0)
        up_SF = project("up_proj", sorted_SD, (width, inner), 1.0)
        down_SD = project("down_proj", nn.silu(gate_SF) * up_SF, (inner, width), QUIET)
        down_SD *= weights_Tk.reshape(-1)[order, None].astype(down_SD.dtype)
        return jnp.zeros_like(x_TD).at[token].add(down_SD).reshape(x_BWD.shape)
