"""WeDLM's training against the published fine-tuning code: reordering, mask, losses, gradients.

The goldens pack samples as [clean | noisy] one after the other; our rows hold all clean samples,
then all noisy ones. What was masked is taken from the goldens.
"""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import ATOL, Case

from mdlm_jax import ops
from mdlm_jax.diffusion import corrupt
from mdlm_jax.models import hub, masks
from mdlm_jax.programs import build, objectives
from mdlm_jax.structs import TokenBatch

wedlm = pytest.mark.golden("wedlm")
LOSS = 1e-5  # absolute, of losses
# Hub names of the parameters whose gradients are stored whole.
STORED = {
    "train_grad_final_norm": "model.norm.weight",
    "train_grad_l0_q_proj": "model.layers.0.self_attn.q_proj.weight",
}
EMBEDDING = "model.embed_tokens.weight"


class Training(Case):
    """A golden folder's packed samples as one of our rows, and the copy that was drawn."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.block = int(self["train_block_size"])
        self.model = build.Model(self.config, self.config.vocab_size, self.block, by_slot=True)
        self.lengths = np.diff(self["train_cum_seqlens"])
        self.places = self._places()
        self.batch = self._batch()

    def _places(self) -> np.ndarray:
        """Where each place of our row, clean ones first, stands in the golden's array."""
        samples = np.cumsum([0, *(2 * self.lengths)[:-1]])
        pairs = list(zip(samples, self.lengths, strict=True))
        clean = [start + np.arange(n) for start, n in pairs]
        noisy = [start + n + np.arange(n) for start, n in pairs]
        return np.concatenate([*clean, *noisy])

    def _batch(self) -> TokenBatch:
        """All places are answer places, so that every block has its noisy copy as there."""
        segment = np.repeat(np.arange(len(self.lengths)) + 1, self.lengths)
        row = (
            self["train_packed_input_ids"],
            segment,
            np.concatenate([np.arange(n) for n in self.lengths]),
            self["train_packed_labels"] != -100,
            np.arange(len(segment)),
        )
        return TokenBatch(*(jnp.asarray(x)[None] for x in row))

    def ours(self, name: str) -> np.ndarray:
        """A golden array in the order of our row."""
        return self[name][self.places]

    def noisy_half(self, name: str) -> np.ndarray:
        """What stands in its noisy copy, [1, M]."""
        return self.ours(name)[None, self.batch.tokens.shape[1] :]

    def drawn(self) -> corrupt.Noisy:
        """The copy with the golden's masks and rates, in natural order."""
        copy = corrupt.answers(self.batch)
        masked, rate = np.zeros(copy.masked.shape, bool), np.ones(copy.rate.shape, np.float32)
        start = np.cumsum([0, *self.lengths[:-1]])[np.asarray(copy.segment[0]) - 1]
        natural = start + self.noisy_half("train_dual_position_ids")[0]
        masked[0, natural] = self.noisy_half("train_dual_masked")[0]
        rate[0, natural] = self.noisy_half("train_dual_p_mask")[0]
        return corrupt.hide(
            copy, jnp.asarray(masked), jnp.asarray(rate), mask_id=self.checkpoint.mask_id
        )

    def noisy(self) -> corrupt.Noisy:
        """The same, reordered."""
        drawn = self.drawn()
        return corrupt.reorder(drawn, corrupt.blocks_of(drawn, block_length=self.block))

    def blocks(self) -> np.ndarray:
        """The block of each place of the noisy copy, before it is reordered."""
        return np.asarray(corrupt.blocks_of(self.drawn(), block_length=self.block))


@functools.cache
def training(folder: Path) -> Training:
    return Training(folder)


@pytest.fixture
def its(golden: Path) -> Training:
    return training(golden)


@wedlm
def test_the_copies_and_their_order(its: Training):
    noisy, clean = its.noisy(), its.batch
    for name, ours, theirs in (
        ("train_dual_input_ids", clean.tokens, noisy.tokens),
        ("train_dual_target_ids", clean.tokens, noisy.target),
        ("train_dual_position_ids", clean.position, noisy.position),
        ("train_dual_masked", jnp.zeros_like(clean.loss_mask), noisy.masked),
    ):
        row = jnp.concatenate([ours, theirs], axis=1)[0]
        np.testing.assert_array_equal(row, its.ours(name), err_msg=name)
    assert (its["train_dual_cum_seqlens"] == 2 * its["train_cum_seqlens"]).all()


@wedlm
def test_as_many_tokens_of_a_block_are_masked_as_its_rate_says(its: Training):
    drawn, block_BM = its.drawn(), its.blocks()
    eligible = np.asarray(drawn.eligible).astype(bool)
    assert not np.asarray(drawn.masked)[~eligible].any()
    # A block without masks does not tell its rate.
    known = np.isin(block_BM, block_BM[np.asarray(drawn.masked)])
    rate = np.zeros(block_BM.shape, np.float32)
    for block in np.unique(block_BM[known]):
        rate[block_BM == block] = np.asarray(drawn.rate)[(block_BM == block) & drawn.masked].max()
    masked = corrupt.draw_counts(
        jax.random.key(0), jnp.asarray(eligible), jnp.asarray(rate), jnp.asarray(block_BM)
    )
    for block in np.unique(block_BM):
        here = block_BM == block
        assert np.asarray(masked)[here].sum() == np.asarray(drawn.masked)[here].sum()


@wedlm
def test_who_sees_whom(its: Training):
    sight = objectives.dual_sight(its.model, its.batch, its.noisy())
    allowed = its["train_dual_attn_allow"][np.ix_(its.places, its.places)]
    np.testing.assert_array_equal(masks.visible(sight, sight)[0], allowed)


@wedlm
def test_logits_and_the_loss_of_every_masked_token(its: Training):
    noisy = its.noisy()

    @jax.jit
    def logits_of(params):
        hidden = objectives.dual_hidden(its.model, params, its.batch, noisy)
        return its.model.unembed(params, jnp.concatenate(hidden, axis=1))

    logits = logits_of(its.params)
    np.testing.assert_allclose(logits[0], its.ours("train_dual_logits"), atol=ATOL)
    nll = -ops.token_logprobs(logits[:, its.batch.tokens.shape[1] :], noisy.target)
    np.testing.assert_allclose(nll[noisy.masked], its["train_masked_token_loss"], atol=ATOL)


def variant(name: str) -> dict:
    """ "weighted_ar05" -> weighting "weighted", AR weight 0.5."""
    weighting, whole, rest = re.fullmatch(r"(\w+)_ar(\d)(\d*)", name).groups()
    return {"weighting": weighting, "ar_weight": float(f"{whole}.{rest or 0}")}


@wedlm
def test_losses_and_gradients_of_every_variant(its: Training):
    noisy = its.noisy()
    assert its.facts["train"]
    for name, golden in its.facts["train"].items():
        options = variant(name)

        def loss_of(params, options=options):
            loss, terms = objectives.wedlm_terms(its.model, params, its.batch, noisy, **options)
            return ops.mean_value(loss), terms

        (loss, terms), grads = jax.jit(jax.value_and_grad(loss_of, has_aux=True))(its.params)
        for key in ("total", "loss"):
            np.testing.assert_allclose(loss, golden[key], atol=LOSS, err_msg=name)
        assert int(noisy.masked.sum()) == golden["mlm/num_tokens"]
        assert ("ar/loss" in golden) == bool(terms)
        for term, mean in terms.items():
            value = golden[term.replace("_", "/")]
            np.testing.assert_allclose(ops.mean_value(mean), value, atol=LOSS, err_msg=name)
        if terms:
            assert terms["ar_loss"].count == golden["ar/num_tokens"]
        check_gradients(its, name, golden, grads)


def check_gradients(its: Training, name: str, golden: dict, grads: dict) -> None:
    """The norms of all parameters' gradients, and what is stored whole: of one variant."""
    named = dict(hub.hub_tensors(grads, its.config, its.checkpoint.model_type))
    found = {key: np.linalg.norm(np.asarray(grad, np.float64)) for key, grad in named.items()}
    assert found.keys() == golden["grad_norms"].keys()
    for key, norm in golden["grad_norms"].items():
        np.testing.assert_allclose(found[key], norm, rtol=1e-4, err_msg=f"{name} {key}")
    whole = np.linalg.norm(list(found.values()))
    np.testing.assert_allclose(whole, golden["grad_global_norm"], rtol=1e-4, err_msg=name)
    if name != "weighted_ar1":
        return
    stored = {key: named[parameter] for key, parameter in STORED.items()}
    stored["train_grad_embed_mask_row"] = named[EMBEDDING][its.checkpoint.mask_id]
    for key, grad in stored.items():
        scale = np.abs(its[key]).max()
        np.testing.assert_allclose(grad, its[key], atol=1e-4 * scale, rtol=1e-4, err_msg=key)


@wedlm
def test_every_training_array_is_held_against_ours(its: Training):
    used = {
        *("packed_input_ids", "packed_labels", "cum_seqlens", "block_size"),
        *("dual_input_ids", "dual_target_ids", "dual_position_ids", "dual_masked", "dual_p_mask"),
        *("dual_cum_seqlens", "dual_attn_allow", "dual_logits", "masked_token_loss"),
        *("grad_final_norm", "grad_l0_q_proj", "grad_embed_mask_row"),
    }
    names = {name for name in its.arrays if name.startswith("train_")}
    assert names <= {f"train_{name}" for name in used}
