"""A mixture of experts: every token passes through its own few, and only those are computed."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from mdlm_jax.models.blocks import QUIET
from mdlm_jax.models.config import ModelConfig

LARGEST_TILE = 128  # rows


def route(logits_TE: jax.Array, *, top: int, normalise: bool) -> tuple[jax.Array, jax.Array]:
    """Weights f32[T, top] and experts i32[T, top]: softmax over all experts, then the best few."""
    weights_Tk, experts_Tk = jax.lax.top_k(jax.nn.softmax(logits_TE, axis=-1), top)
    if normalise:
        weights_Tk /= weights_Tk.sum(-1, keepdims=True)
    return weights_Tk, experts_Tk


def grouped_dot(x_SD: jax.Array, kernel_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Products of neighbouring rows with their own expert's kernel, f[S, F].

    The first sizes_E[0] rows are expert 0's, and so on; the sizes add up to S.
    """
    # XLA has kernels for this where there are accelerators; on a CPU it would compute every expert
    # for every row.
    return jax.lax.platform_dependent(
        x_SD, kernel_EDF, sizes_E, cpu=_tiled_dot, default=jax.lax.ragged_dot
    )


def _tiled_dot(x_SD: jax.Array, kernel_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Cuts each expert's rows into tiles of one size, the last one filled up, and multiplies those.

    With tiles as large as an expert's mean share, at most twice the rows are computed.
    """
    rows, experts = x_SD.shape[0], kernel_EDF.shape[0]
    tile = min(-(-rows // experts), LARGEST_TILE)
    count = min(rows, rows // tile + experts)  # tiles, at most
    tiles_E = -(-sizes_E // tile)
    ends_E = jnp.cumsum(tiles_E)
    number_N = jnp.arange(count)
    expert_N = jnp.minimum(jnp.searchsorted(ends_E, number_N, side="right"), experts - 1)
    # The rows of each tile, by their place among their expert's.
    first_N = (number_N - (ends_E - tiles_E)[expert_N]) * tile
    within_NM = first_N[:, None] + jnp.arange(tile)
    mine_NM = within_NM < sizes_E[expert_N][:, None]
    place_NM = (jnp.cumsum(sizes_E) - sizes_E)[expert_N][:, None] + within_NM
    rows_NMD = x_SD.at[jnp.where(mine_NM, place_NM, rows)].get(mode="fill", fill_value=0)
    products_NMF = jnp.einsum("nmd,ndf->nmf", rows_NMD, kernel_EDF[expert_N])
    empty_SF = jnp.zeros((rows, kernel_EDF.shape[2]), products_NMF.dtype)
    return empty_SF.at[jnp.where(mine_NM, place_NM, rows)].set(products_NMF, mode="drop")


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
            return grouped_dot(x, kernel.astype(x.dtype), sizes_E)

        sorted_SD = x_TD[token]
        gate_SF = project("gate_proj", sorted_SD, (width, inner), 1.0)
        up_SF = project("up_proj", sorted_SD, (width, inner), 1.0)
        down_SD = project("down_proj", nn.silu(gate_SF) * up_SF, (inner, width), QUIET)
        down_SD *= weights_Tk.reshape(-1)[order, None].astype(down_SD.dtype)
        return jnp.zeros_like(x_TD).at[token].add(down_SD).reshape(x_BWD.shape)
