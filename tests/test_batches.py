"""Episodes as ids and as packed rows: nothing is lost, cut or mixed."""

import numpy as np
import pytest
from test_trajectory import episode as record_of

from mdlm_jax.tokens import batches, tokenizer
from mdlm_jax.tokens import trajectory as records

ROW, ANSWERS, BLOCK = 24, 12, 4


def random_episodes(count: int, seed: int = 0) -> list[batches.Episode]:
    """Episodes of 3 to 15 tokens, each with ids of its own, some of them trained."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        length = int(rng.integers(3, 16))
        trained = np.zeros(length, bool)
        trained[rng.integers(max(1, length - 8), length) :] = True
        made.append(
            batches.Episode(np.arange(length, dtype=np.int32) + 100 * (number + 1), trained)
        )
    return made


def packed(episodes, **sizes):
    sizes = {"row_length": ROW, "answer_length": ANSWERS, "block_length": BLOCK} | sizes
    return batches.pack(episodes, **sizes)


@pytest.fixture(scope="module")
def words() -> tokenizer.Tokenizer:
    return tokenizer.train(["You take the milk. put milk in fridge"] * 3, vocab_size=300)


def test_every_episode_is_in_one_row_once_and_whole():
    episodes = random_episodes(60)
    rows, dropped = packed(episodes)
    assert dropped == 0
    found = {}
    for row in rows:
        for segment in range(1, row["segment"].max() + 1):
            here = row["segment"] == segment
            ids = row["tokens"][here].tolist()
            assert ids[0] not in found
            found[ids[0]] = ids
            np.testing.assert_array_equal(np.diff(np.flatnonzero(here)), 1)  # in one piece
            np.testing.assert_array_equal(row["position"][here], np.arange(len(ids)))
    assert found == {e.tokens[0]: e.tokens.tolist() for e in episodes}
    assert len(rows) < len(episodes) / 1.5
    assert batches.most_segments(rows) == max(row["segment"].max() for row in rows) > 1


def test_the_loss_mask_is_the_episodes_own_and_padding_has_none():
    episodes = random_episodes(40, seed=1)
    trained = {int(e.tokens[0]): e.trained.tolist() for e in episodes}
    for row in packed(episodes)[0]:
        assert not row["loss_mask"][row["segment"] == 0].any()
        for segment in range(1, row["segment"].max() + 1):
            here = row["segment"] == segment
            assert row["loss_mask"][here].tolist() == trained[int(row["tokens"][here][0])]


def test_answer_places_are_the_whole_blocks_that_hold_a_trained_token():
    for row in packed(random_episodes(40, seed=2))[0]:
        places = row["answer_index"][row["answer_index"] >= 0]
        assert len(places) <= ANSWERS
        assert len(set(places)) == len(places)
        expected = [
            place
            for place in range(ROW)
            if row["segment"][place] > 0 and shares_a_trained_block(row, place)
        ]
        assert sorted(places) == expected
        assert (row["answer_index"][len(places) :] == -1).all()


def shares_a_trained_block(row: dict, place: int) -> bool:
    """Whether a token of the same episode and block is trained."""
    same = row["segment"] == row["segment"][place]
    level = row["position"] // BLOCK == row["position"][place] // BLOCK
    return bool((row["loss_mask"] & same & level).any())


def test_what_is_too_long_is_counted_not_cut():
    long = batches.Episode(np.arange(ROW + 1, dtype=np.int32), np.arange(ROW + 1) > ROW - 1)
    chatty = batches.Episode(np.arange(ROW, dtype=np.int32), np.ones(ROW, bool))
    fits = batches.Episode(np.arange(ROW, dtype=np.int32), np.arange(ROW) >= ROW - ANSWERS)
    rows, dropped = packed([long, chatty, fits])
    assert dropped == 2
    assert len(rows) == 1
    assert (rows[0]["segment"] == 1).all()
    with pytest.raises(ValueError, match="no episode to train on"):
        batches.Batches(packed([long])[0], size=2, seed=0)


def test_a_batch_is_the_same_whenever_it_is_asked_for():
    rows = packed(random_episodes(50))[0]
    first, again, other = (batches.Batches(rows, size=3, seed=seed) for seed in (5, 5, 6))
    for step in (7, 0, 100):
        for name in ("tokens", "segment", "position", "loss_mask", "answer_index"):
            np.testing.assert_array_equal(getattr(first[step], name), getattr(again[step], name))
    assert first[0].tokens.shape == (3, ROW)
    assert first[0].answer_index.shape == (3, ANSWERS)
    assert any((first[step].tokens != other[step].tokens).any() for step in range(3))


def test_an_epoch_serves_each_row_once_and_the_next_in_another_order():
    rows = packed(random_episodes(60))[0]
    rows = rows[: len(rows) // 2 * 2]
    served = batches.Batches(rows, size=2, seed=0)
    half = len(rows) // 2
    heads = [served[step].tokens[:, 0].tolist() for step in range(2 * half)]
    first, second = (sum(heads[i * half : (i + 1) * half], []) for i in range(2))
    assert sorted(first) == sorted(second) == sorted(row["tokens"][0] for row in rows)
    assert first != second


def test_fewer_rows_than_a_batch_takes_are_repeated():
    rows = packed(random_episodes(2))[0]
    assert batches.Batches(rows, size=5, seed=0)[3].tokens.shape == (5, ROW)


# ---- episodes ------------------------------------------------------------------------------------


def test_a_world_episode_trains_observations_and_their_status_up_to_a_block_border(words):
    record, special = record_of(), words.special
    slot = 2 * BLOCK
    world = batches.world_episode(words, record, block_length=BLOCK, slot=slot)
    ids, trained = world.tokens.tolist(), world.trained.tolist()
    prompt = [special.system, *words.encode(records.world_prompt(record.scene)), special.end]
    expected = [*prompt, *[special.pad] * (-len(prompt) % slot)]
    mask = [False] * len(expected)
    for turn in record.turns:
        action = [*words.encode(turn.action), special.end]
        action += [special.pad] * (-len(action) % slot)
        told = [*words.encode(turn.observation), getattr(special, turn.status)]
        told += [special.pad] * (-(len(expected) + len(action) + len(told)) % BLOCK)
        expected += action + told
        mask += [False] * len(action) + [True] * len(told)
        assert len(expected) % BLOCK == 0
    assert (ids, trained) == (expected, mask)


def test_the_last_status_may_be_written_several_times(words):
    record, shape = record_of(), {"block_length": BLOCK, "slot": 2 * BLOCK}
    once = batches.world_episode(words, record, **shape)
    often = batches.world_episode(words, record, **shape, end_tokens=6)
    status = getattr(words.special, record.turns[-1].status)
    end = np.flatnonzero(once.tokens == status)[-1]
    np.testing.assert_array_equal(often.tokens[:end], once.tokens[:end])
    assert often.tokens[end : end + 6].tolist() == [status] * 6
    assert set(often.tokens[end + 6 :].tolist()) <= {words.special.pad}
    assert often.trained[end:].all()
    assert len(often.tokens) % BLOCK == 0
    assert len(often.tokens) - end - 6 < BLOCK


def test_a_policy_episode_trains_gold_actions_and_their_end(words):
    record, special = record_of(), words.special
    policy = batches.policy_episode(words, record)
    ids = np.array(policy.tokens)
    written = ids[policy.trained]
    gold = [turn for turn in record.turns if turn.source == "gold"]
    assert 0 < len(gold) < len(record.turns)
    assert written.tolist() == [i for t in gold for i in (*words.encode(t.action), special.end)]
    rest = ids[~policy.trained].tolist()
    assert rest[-1] == special.solved
    assert words.decode(rest).startswith(records.policy_prompt(record.scene))


def test_a_message_is_left_aligned_and_refuses_what_does_not_fit():
    tokens, length = batches.message([[5, 6], [], [7, 8, 9]], width=3)
    np.testing.assert_array_equal(tokens, [[5, 6, 0], [0, 0, 0], [7, 8, 9]])
    np.testing.assert_array_equal(length, [2, 0, 3])
    with pytest.raises(ValueError, match="takes 4 tokens, but there is room for 3"):
        batches.message([[1], [1, 2, 3, 4]], width=3)
