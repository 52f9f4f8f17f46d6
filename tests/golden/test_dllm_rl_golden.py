"""dLLM-RL's training of SDAR models against its code: "semi-ar", "trace" and TraceRL.

A row is [prompt, padded on the left | response, padded on the right], and the noisy half a copy of
the response. Blocks are counted from the response's start.
"""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import ATOL, Case

from mdlm_jax import ops
from mdlm_jax.diffusion import corrupt, losses
from mdlm_jax.diffusion.corrupt import Noisy
from mdlm_jax.models import masks
from mdlm_jax.rl import loss as rl
from mdlm_jax.structs import TokenBatch

sdar = pytest.mark.golden("sdar")
EPSILON, BETA = 0.2, 0.01  # of all goldens, as their README says


class Rows:
    """The rows of one golden case: those that were given, and those that were trained."""

    def __init__(self, case: Case, name: str):
        self.case, self.name = case, name
        self.start, self.block = int(self["start_pos"]), int(self["block"])
        prompt_BP = self["input_ids"][:, : self.start]
        padding_BP = np.cumprod(prompt_BP == case.facts["pad_token_id"], axis=1) > 0
        width = self["input_ids"].shape[1]
        self.live_BL = np.pad(~padding_BP, ((0, 0), (0, width - self.start)), constant_values=True)
        self.position_BL = np.maximum(np.cumsum(self.live_BL, axis=1) - 1, 0)

    def __getitem__(self, key: str) -> np.ndarray:
        return self.case[f"{self.name}_{key}"]

    def copy(self) -> Noisy:
        """The response, nothing masked; what the golden never trains is padding."""
        tokens_BL, rest = self["input_ids"], slice(self.start, None)
        is_padding_BM = trailing(tokens_BL[:, rest] == self.case.facts["pad_token_id"])
        fields = (
            tokens_BL,
            self.live_BL,
            self.position_BL,
            np.pad(~is_padding_BM, ((0, 0), (self.start, 0))),
            np.broadcast_to(np.arange(tokens_BL.shape[1])[rest], is_padding_BM.shape),
        )
        dtypes = (jnp.int32, jnp.int32, jnp.int32, bool, jnp.int32)
        return corrupt.answers(
            TokenBatch(*(jnp.asarray(x, t) for x, t in zip(fields, dtypes, strict=True)))
        )

    def sight(self, row_R: np.ndarray) -> masks.Sight:
        """Who sees whom in [clean | noisy response] of some of the rows."""
        live_RL = self.live_BL[row_R]
        place_L = (np.arange(live_RL.shape[1]) - self.start) // self.block
        order_RL = np.broadcast_to(place_L, live_RL.shape)
        half = lambda x: np.concatenate([x, x[:, self.start :]], axis=1)  # noqa: E731
        noisy_E = np.arange(half(order_RL).shape[1]) >= live_RL.shape[1]
        return masks.Sight(
            segment=jnp.asarray(half(live_RL), jnp.int32),
            order=jnp.asarray(half(order_RL)),
            noisy=jnp.broadcast_to(noisy_E, half(order_RL).shape),
        )

    def logits(self, params: dict, noisy: Noisy, row_R: np.ndarray) -> jax.Array:
        """Logits of the clean prompt and the noisy response, f32[R, L, V]."""
        tokens_RE = jnp.concatenate([self["input_ids"][row_R], noisy.tokens], axis=1)
        positions_RE = jnp.concatenate([self.position_BL[row_R], noisy.position], axis=1)
        hidden, _ = self.case.hidden(params, tokens_RE, positions_RE, self.sight(row_R))
        middle = self["input_ids"].shape[1]
        prompt_and_noisy = jnp.concatenate([hidden[:, : self.start], hidden[:, middle:]], axis=1)
        return self.case.unembed(params, prompt_and_noisy)


def trailing(found_BM: np.ndarray) -> np.ndarray:
    """Where all places up to the end of the row are true ones."""
    return np.cumprod(found_BM[:, ::-1], axis=1)[:, ::-1] > 0


@pytest.fixture(scope="module")
def case(golden: Path) -> Case:
    return Case(golden)


def names_of(case: Case, method: str) -> list[str]:
    return [
        name[: -len("_loss")]
        for name in case.arrays
        if name.startswith(f"rl_{method}") and name.endswith("_loss")
    ]


def rounds_of(rows: Rows, *, shrink: int = 1) -> tuple[Noisy, np.ndarray]:
    """Every round of every row that trains a token, as the goldens list them; and its row."""
    copy = rows.copy()
    mask_id = rows.case.facts["mask_token_id"]
    round_BM = corrupt.trace_rounds(
        jnp.asarray(rows["step_map"]), block_length=rows.block, shrink=shrink
    )
    found, row_R = [], []
    for row in range(len(copy.tokens)):
        one = partial(jax.tree.map, lambda x, row=row: x[row : row + 1])
        for number in range(int(round_BM[row].max()) + 1):
            noisy = corrupt.replay(one(copy), one(round_BM), number, mask_id=mask_id)
            if (noisy.eligible > 0).any():
                found.append(noisy)
                row_R.append(row)
    return jax.tree.map(lambda *x: jnp.concatenate(x), *found), np.array(row_R)


def check_rows(rows: Rows, noisy: Noisy, row_R: np.ndarray) -> None:
    """Tokens, positions, mask and places of the loss, where a row is not padding."""
    live = np.concatenate([rows.live_BL, rows.live_BL[:, rows.start :]], axis=1)[row_R]
    ids = np.concatenate([rows["input_ids"][row_R], noisy.tokens], axis=1)
    positions = np.concatenate([rows.position_BL[row_R], noisy.position], axis=1)
    np.testing.assert_array_equal(ids, rows["extended_input_ids"])
    np.testing.assert_array_equal(positions[live], rows["position_ids"][live])
    np.testing.assert_array_equal(rows["labels"][:, rows.start :], noisy.target)
    sight = rows.sight(row_R)
    allowed = np.asarray(masks.visible(sight, sight))
    np.testing.assert_array_equal(allowed[live], rows["attn_mask"][live])
    trained = np.asarray(noisy.masked & (noisy.eligible > 0))
    np.testing.assert_array_equal(trained, rows["p_mask"][:, rows.start :])
    assert not rows["p_mask"][:, : rows.start].any()


def loss_and_logprobs(rows: Rows, noisy: Noisy, row_R: np.ndarray) -> tuple:
    """The unweighted loss, and the log-prob of every token, f32[R, L]."""

    @jax.jit
    def run(params):
        logits = rows.logits(params, noisy, row_R)
        loss = losses.semi_ar_loss(logits[:, rows.start :], noisy)
        return ops.mean_value(loss), ops.token_logprobs(logits, rows["labels"])

    return run(rows.case.params)


def check_loss(case: Case, name: str, rows: Rows, noisy: corrupt.Noisy, row_R: np.ndarray) -> None:
    """The loss is that of both golden files."""
    loss, _ = loss_and_logprobs(rows, noisy, row_R)
    np.testing.assert_allclose(loss, rows["loss"], rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(loss, case.facts["train_losses"][name], rtol=1e-5)


@sdar
def test_semi_ar(case: Case):
    """What was masked is taken from the golden: padding is masked, too, and never trained."""
    assert names_of(case, "sft_semiar")
    for name in names_of(case, "sft_semiar"):
        rows = Rows(case, name)
        copy, row_R = rows.copy(), np.arange(len(rows["input_ids"]))
        shown = rows["extended_input_ids"][:, rows["input_ids"].shape[1] :]
        masked = jnp.asarray(shown == case.facts["mask_token_id"])
        noisy = corrupt.hide(copy, masked, copy.rate, mask_id=case.facts["mask_token_id"])
        check_rows(rows, noisy, row_R)
        check_loss(case, name, rows, noisy, row_R)


@sdar
def test_trace(case: Case):
    assert names_of(case, "sft_trace")
    for name in names_of(case, "sft_trace"):
        rows = Rows(case, name)
        noisy, row_R = rounds_of(rows)
        check_rows(rows, noisy, row_R)
        check_loss(case, name, rows, noisy, row_R)


@sdar
def test_trace_rl(case: Case):
    """Its loss is GRPO's with a constant divisor, the rollout's policy being the reference, too."""
    assert names_of(case, "tracerl")
    for name in names_of(case, "tracerl"):
        rows = Rows(case, name)
        noisy, row_R = rounds_of(rows)
        check_rows(rows, noisy, row_R)
        _, logprobs_RL = loss_and_logprobs(rows, noisy, row_R)
        live = rows.live_BL[row_R]
        np.testing.assert_allclose(logprobs_RL[live], rows["logp_new"][live], atol=ATOL)
        old_RL = jnp.asarray(rows["logp_old"])
        batch = rl.PolicyBatch(
            mask=jnp.asarray(rows["p_mask"]),
            advantages=jnp.asarray(rows["adv"]),
            old_logprobs=old_RL,
            ref_logprobs=old_RL,
        )
        loss, _ = rl.grpo_loss(
            logprobs_RL,
            batch,
            loss_type="dr_grpo",
            epsilon=EPSILON,
            epsilon_high=EPSILON,
            beta=BETA,
            max_completion_length=noisy.tokens.shape[1],
        )
        np.testing.assert_allclose(ops.mean_value(loss), rows["loss"], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            ops.mean_value(loss), case.facts["train_losses"][name], atol=1e-6, rtol=1e-5
        )


@sdar
def test_every_array_of_dllm_rl_is_held_against_ours(case: Case):
    shared = (
        *("input_ids", "extended_input_ids", "p_mask", "position_ids", "labels", "attn_mask"),
        *("start_pos", "block", "loss"),
    )
    own = {
        "sft_semiar": (),
        "sft_trace": ("step_map",),
        "tracerl": ("step_map", "adv", "logp_old", "logp_new"),
    }
    expected = {
        f"{name}_{key}"
        for method, keys in own.items()
        for name in names_of(case, method)
        for key in (*shared, *keys)
    }
    assert {name for name in case.arrays if name.startswith("rl_")} == expected
