"""Training objectives, each a loss (params, (key, TokenBatch)) -> (Mean, metrics)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from mdlm_jax.autoregressive import score
from mdlm_jax.diffusion import corrupt, losses
from mdlm_jax.diffusion.corrupt import Noisy
from mdlm_jax.models import masks
from mdlm_jax.programs.build import Model
from mdlm_jax.structs import Mean, TokenBatch
from mdlm_jax.tokens.tokenizer import Specials

Piece = tuple[jax.Array, TokenBatch]  # a key and the rows it corrupts


def world(config: ConfigDict, model: Model, special: Specials, *, segments: int) -> Callable:
    """The loss of the config's world; `segments` bounds those of a row."""
    if config.world.kind == "autoregressive":
        return autoregressive(model)
    return OBJECTIVES[config.world.objective](model, special, config.sft, segments)


def autoregressive(model: Model) -> Callable:
    """Next-token loss on the same rows; also the policy's behaviour cloning."""

    def loss(params: dict, piece: Piece) -> tuple[Mean, dict]:
        _, batch = piece
        order = masks.order(batch.position, block_length=1)
        noisy = jnp.zeros_like(batch.loss_mask)
        sight = masks.Sight(batch.segment, order, noisy, prefix=batch.tokens.shape[1])
        hidden = model.train_hidden(params, batch.tokens, batch.position, sight)
        return score.next_token_loss(model.unembed(params, hidden), batch), {}

    return loss


# ---- of a diffusion world ----------------------------------------------------------------------


def sdar(model: Model, special: Specials, sft: ConfigDict, segments: int) -> Callable:
    """SDAR's: a masking rate for each episode, and weights 1 / rate."""

    def loss(params: dict, piece: Piece) -> tuple[Mean, dict]:
        key, batch = piece
        noisy = corrupt.corrupt(
            key, batch, mask_id=special.mask, eps=sft.mask_eps, segments=segments
        )
        return losses.sdar_loss(noisy_logits(model, params, batch, noisy), noisy), {}

    return loss


def semi_ar(model: Model, special: Specials, sft: ConfigDict, segments: int) -> Callable:
    """dLLM-RL's "semi-ar": a masking rate for each token, and no weights."""
    del segments

    def loss(params: dict, piece: Piece) -> tuple[Mean, dict]:
        key, batch = piece
        noisy = corrupt.corrupt_tokens(
            key, batch, mask_id=special.mask, lower=sft.mask_lower, upper=sft.mask_upper
        )
        return losses.semi_ar_loss(noisy_logits(model, params, batch, noisy), noisy), {}

    return loss


def wedlm(model: Model, special: Specials, sft: ConfigDict, segments: int) -> Callable:
    """WeDLM's: reordered blocks, and the next-token loss of the clean rows beside theirs."""

    def loss(params: dict, piece: Piece) -> tuple[Mean, dict]:
        key, batch = piece
        noisy = corrupt.corrupt_blocks(
            key,
            batch,
            mask_id=special.mask,
            block_length=model.order_length,
            per_block=sft.mask_per_block,
            segments=segments,
        )
        weights = {"weighting": sft.mlm_weighting, "ar_weight": sft.ar_weight}
        return wedlm_terms(model, params, batch, noisy, **weights)

    return loss


def wedlm_terms(
    model: Model,
    params: dict,
    batch: TokenBatch,
    noisy: Noisy,
    *,
    weighting: str,
    ar_weight: float,
) -> tuple[Mean, dict[str, Mean]]:
    """WeDLM's loss of one corrupted copy, and its terms as metrics. Without weight, no AR term."""
    clean_BLD, noisy_BMD = dual_hidden(model, params, batch, noisy)
    mlm = losses.mlm_loss(model.unembed(params, noisy_BMD), noisy, weighting=weighting)
    if ar_weight == 0:
        return mlm, {}
    ar = score.next_token_loss(model.unembed(params, clean_BLD), batch)
    loss = losses.wedlm_loss(mlm, ar, ar_weight=ar_weight)
    return loss, {"mlm_loss": mlm, "ar_loss": ar}


OBJECTIVES = {"sdar": sdar, "semi-ar": semi_ar, "wedlm": wedlm}


# ---- [clean rows | noisy answer blocks] --------------------------------------------------------


def noisy_logits(model: Model, params: dict, batch: TokenBatch, noisy: Noisy) -> jax.Array:
    """Logits f32[B, M, V] of the noisy copy."""
    return model.unembed(params, dual_hidden(model, params, batch, noisy)[1])


def dual_hidden(
    model: Model, params: dict, batch: TokenBatch, noisy: Noisy
) -> tuple[jax.Array, jax.Array]:
    """Hidden states of the clean rows f[B, L, D] and of the noisy copy f[B, M, D]."""
    length = batch.tokens.shape[1]
    tokens = _both(batch.tokens, noisy.tokens)  # i32[B, L + M]
    positions = _both(batch.position, noisy.position)
    hidden = model.train_hidden(params, tokens, positions, dual_sight(model, batch, noisy))
    return hidden[:, :length], hidden[:, length:]


def dual_sight(model: Model, batch: TokenBatch, noisy: Noisy) -> masks.Sight:
    """Who sees whom in training; a model that is causal by slot is so inside every block."""
    positions = _both(batch.position, noisy.position)
    slot = jnp.broadcast_to(jnp.arange(positions.shape[1]), positions.shape)
    return masks.Sight(
        segment=_both(batch.segment, noisy.segment),
        order=masks.order(positions, block_length=model.order_length),
        noisy=_both(jnp.zeros_like(batch.loss_mask), jnp.ones_like(noisy.masked)),
        slot=slot if model.by_slot else None,
        prefix=batch.tokens.shape[1],
        ahead=0 if model.by_slot else model.order_length - 1,
    )


def _both(clean_BL: jax.Array, noisy_BM: jax.Array) -> jax.Array:
    return jnp.concatenate([clean_BL, noisy_BM], axis=1)
