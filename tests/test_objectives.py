"""What a diffusion world is trained on: who sees whom in both copies, and how rows are cut."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import TINY, SlotCausal, message, sharp_params
from test_corrupt import plain_batch

from mdlm_jax import context as ctx
from mdlm_jax import ops
from mdlm_jax.diffusion import corrupt
from mdlm_jax.programs import build, objectives
from mdlm_jax.structs import TokenBatch
from mdlm_jax.tokens.tokenizer import Specials
from mdlm_jax.train import state

BLOCK, PROMPT = 4, 5
SPECIAL = Specials(pad=0, mask=22, system=1, end=2, playing=3, solved=4, failed=5)
BY_SLOT = build.Model(TINY, TINY.vocab_size, BLOCK, by_slot=True)
BY_BLOCK = build.Model(TINY, TINY.vocab_size, BLOCK)
WEIGHTS = {"weighting": "weighted", "ar_weight": 0.7}
SFT = SimpleNamespace(  # config.sft, as far as objectives read it
    mask_eps=0.01,
    mask_lower=0.1,
    mask_upper=0.9,
    mask_per_block=True,
    mlm_weighting="weighted",
    ar_weight=1.0,
)


@pytest.fixture(scope="module")
def params():
    return sharp_params(17)


def rows_of(lengths_by_row: list[list[int]], tokens: list[list[int]]) -> TokenBatch:
    """Packed rows whose segments say `tokens`, all rows' one after the other."""
    batch = plain_batch(lengths_by_row, PROMPT)
    said = iter(tokens)
    ids = np.zeros(batch.tokens.shape, np.int32)
    for row, lengths in enumerate(lengths_by_row):
        ids[row, : sum(lengths)] = [i for _ in lengths for i in next(said)]
    return batch.replace(tokens=jnp.asarray(ids))


LENGTHS, BLOCKS = [11, 13, 17], 5
TEXTS = [np.random.default_rng(n).integers(6, 22, n).tolist() for n in LENGTHS]
PACKED = rows_of([LENGTHS[:2], LENGTHS[2:]], TEXTS)
ALONE = rows_of([[n] for n in LENGTHS], TEXTS)


def noisy_of(batch: TokenBatch, seed: int) -> corrupt.Noisy:
    """The reordered copy in which an episode has the same masks, however its row is packed."""
    rng, copy = np.random.default_rng(seed), corrupt.answers(batch)
    lots, rates = rng.random((len(LENGTHS), max(LENGTHS))), rng.random((len(LENGTHS), BLOCKS))
    before_B = np.cumsum([0, *np.asarray(batch.segment).max(1)[:-1]])
    episode_BM = np.maximum(before_B[:, None] + np.asarray(copy.segment) - 1, 0)
    position_BM = np.asarray(copy.position)
    rate_BM = rates[episode_BM, position_BM // BLOCK].astype(np.float32)
    masked_BM = (lots[episode_BM, position_BM] < rate_BM) & (np.asarray(copy.eligible) > 0)
    noisy = corrupt.hide(copy, jnp.asarray(masked_BM), jnp.asarray(rate_BM), mask_id=SPECIAL.mask)
    return corrupt.reorder(noisy, corrupt.blocks_of(copy, block_length=BLOCK))


@pytest.fixture(scope="module")
def drawn() -> dict[str, tuple[TokenBatch, corrupt.Noisy]]:
    """The same episodes with the same masks, packed and alone."""
    return {
        name: (batch, noisy_of(batch, 3)) for name, batch in (("packed", PACKED), ("alone", ALONE))
    }


@pytest.mark.parametrize("objective", objectives.OBJECTIVES)
def test_every_objective_draws_by_its_key_and_trains_what_it_may(params, objective):
    model = BY_SLOT if objective == "wedlm" else BY_BLOCK
    loss = jax.jit(objectives.OBJECTIVES[objective](model, SPECIAL, SFT, 2))
    first, again, other = (loss(params, (jax.random.key(s), PACKED))[0] for s in (0, 0, 1))
    assert float(ops.mean_value(first)) == float(ops.mean_value(again)) > 0
    assert float(ops.mean_value(first)) != float(ops.mean_value(other))
    changed = PACKED.replace(tokens=jnp.where(PACKED.segment > 0, PACKED.tokens, 9))
    padded = loss(params, (jax.random.key(0), changed))[0]
    np.testing.assert_allclose(ops.mean_value(first), ops.mean_value(padded), rtol=1e-6)


def test_the_clean_half_is_a_plain_causal_forward(params, drawn):
    for batch, noisy in drawn.values():
        clean, _ = objectives.dual_hidden(BY_SLOT, params, batch, noisy)
        for row, segment in np.ndindex(batch.tokens.shape[0], 2):
            here = np.asarray(batch.segment)[row] == segment + 1
            if not here.any():
                continue
            tokens = batch.tokens[row, here][None]
            positions = jnp.arange(here.sum())[None]
            alone, _ = BY_SLOT.hidden(params, tokens, positions, jnp.ones(tokens.shape, bool))
            np.testing.assert_allclose(clean[row, here], alone[0], atol=1e-4)


def test_the_noisy_half_is_what_streaming_sees(params, drawn):
    """The text before the block is read; then its observed tokens and its masks are fed."""
    batch, noisy = drawn["alone"]
    logits = objectives.noisy_logits(BY_SLOT, params, batch, noisy)
    model, checked = SlotCausal(), 0
    for row, block in np.ndindex(len(LENGTHS), 5):
        there = (noisy.segment[row] > 0) & (noisy.position[row] // BLOCK == block)
        there = np.asarray(there)
        if not there.any():
            continue
        text = message(TEXTS[row][: block * BLOCK], width=20)
        context = model.read(params, model.memory(1, 24), text)
        ids, positions = noisy.tokens[row, there][None], noisy.position[row, there][None]
        window = (params, ids, positions, jnp.ones(ids.shape, bool))
        streamed, _ = model.step(*window, context.cache, context.cached)
        np.testing.assert_allclose(logits[row, there], streamed[0], atol=2e-4)
        checked += 1
    assert checked == 2 + 3 + 4


def test_packed_rows_train_as_the_same_episodes_alone(params, drawn):
    values = {}
    for name, (batch, noisy) in drawn.items():
        loss = partial(objectives.wedlm_terms, BY_SLOT, batch=batch, noisy=noisy, **WEIGHTS)
        total, grads = jax.value_and_grad(lambda p, f=loss: ops.mean_value(f(p)[0]))(params)
        values[name] = (total, loss(params)[0].count, grads)
    for packed, alone in zip(*map(jax.tree.leaves, values.values()), strict=True):
        np.testing.assert_allclose(packed, alone, rtol=1e-3, atol=1e-4)


def test_micro_batches_of_uneven_counts_change_nothing(params, drawn):
    rows = drawn["alone"]

    def loss(params, piece):
        return objectives.wedlm_terms(BY_SLOT, params, *piece, **WEIGHTS)

    def cut(count):
        return jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), rows)

    whole, loss_1, terms_1 = state.gradients(loss, params, cut(1))
    pieces, loss_3, terms_3 = state.gradients(loss, params, cut(3))
    counts = [
        loss(params, jax.tree.map(lambda x, i=i: x[i : i + 1], rows))[0].count for i in (0, 1)
    ]
    assert (counts[0] != counts[1]).all()
    np.testing.assert_allclose(ops.mean_value(loss_1), ops.mean_value(loss_3), rtol=1e-5)
    for name, mean in terms_1.items():
        np.testing.assert_allclose(ops.mean_value(mean), ops.mean_value(terms_3[name]), rtol=1e-5)
    expected = jax.grad(lambda p: ops.mean_value(loss(p, rows)[0]))(params)
    for found in (whole, pieces):
        for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)


def test_blocks_without_a_trained_token_need_no_noisy_copy(params):
    """The published code copies them; nobody sees them, and they have no mask."""
    whole = ALONE.replace(
        answer_index=jnp.where(ALONE.segment > 0, jnp.arange(ALONE.tokens.shape[1]), -1)
    )
    few, every = (
        objectives.wedlm_terms(BY_SLOT, params, batch, noisy_of(batch, 4), **WEIGHTS)[0]
        for batch in (ALONE, whole)
    )
    np.testing.assert_allclose(few.total, every.total, rtol=1e-5)
    np.testing.assert_allclose(few.count, every.count, rtol=1e-6)


# ---- a streamed world's context --------------------------------------------------------------


WORLD = SimpleNamespace(  # config.world, as far as a stream reads it
    max_tokens=12,
    temperature=0.0,
    slot=8,
    stream=SimpleNamespace(window=3, threshold=1.0, penalty=0.05),
)


def test_a_streamed_world_reads_the_next_turn_from_a_block_border(params):
    """After two turns its cache is that of the whole text, padding included, read at once."""
    stop_ids, lengths = tuple(range(6, 14)), []  # many, so that answers end inside blocks
    speaker = build.stream_speaker(BY_SLOT, SPECIAL, stop_ids=stop_ids, world=WORLD)
    context = ctx.empty(2, 56, TINY.cache_shape, jnp.float32)
    prompts = message([1, *TEXTS[0][:6], 2], [1, *TEXTS[1][:11], 2, 0, 0, 0], width=16)
    context = jax.jit(partial(speaker.begin, group=1))(params, prompts, context)
    keys, active = jax.random.split(jax.random.key(0), 2), jnp.ones(2, bool)
    for action in ([7, 8, 2], [9, 2]):
        heard = message(action, action[::-1], width=5)
        context = jax.jit(speaker.read)(params, context, heard)
        np.testing.assert_array_equal(context.cached, context.length)
        before = context.length
        said, context = jax.jit(speaker.write)(params, keys, context, active)
        lengths += said.length.tolist()
        np.testing.assert_array_equal(context.length % BLOCK, 0)
        np.testing.assert_array_equal(context.length - before, -(-said.length // BLOCK) * BLOCK)
    assert min(lengths) > 0
    assert any(length % BLOCK for length in lengths)
    last = jax.jit(speaker.read)(params, context, message([6, 2], [6, 2], width=5))
    model = SlotCausal()
    again = model.read(params, model.memory(2, 56), ctx.Message(last.tokens, last.length))
    live = ops.length_mask(last.length, 56)
    for ours, theirs in ((last.cache.key, again.cache.key), (last.cache.value, again.cache.value)):
        places = np.asarray(live)
        ours, theirs = (np.asarray(x).transpose(1, 3, 0, 2, 4)[places] for x in (ours, theirs))
        np.testing.assert_allclose(ours, theirs, atol=2e-4)
