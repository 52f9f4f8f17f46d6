"""The loop over turns: by hand with speakers that follow rules, and in earnest with tiny models."""

import contextlib
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import (
    ACTION_WIDTH,
    BABBLE,
    END,
    PLAYING,
    SOLVED,
    SYSTEM,
    TinyModel,
    message,
    rule_memory,
    rule_policy,
    rule_world,
    sharp_params,
    texts,
)

from mdlm_jax.autoregressive import decode, score
from mdlm_jax.diffusion import denoise
from mdlm_jax.rl import reward, rollout
from mdlm_jax.structs import Speaker, Tasks
from mdlm_jax.train import mesh

judge = partial(reward.status_judge, solved_id=SOLVED, failed_id=99)


def keys_of(rows: int, seed: int = 0):
    return jax.random.split(jax.random.key(seed), rows)


def at(generations, turn: int):
    """One turn of generations that are stacked over the turns."""
    return jax.tree.map(lambda x: x[turn], generations)


# ---- by rule: the world repeats the action and says solved if it is the goal ---------------------

GOALS = [7, 8, 9]  # of the three tasks; two rows each
TURNS = 3


@partial(jax.jit, static_argnames=("turns",))
def rule_loop(script_BT, keys, tasks, memory, *, turns=TURNS):
    sides = (rule_policy, rule_world, judge, script_BT, None)
    return rollout.rollout(*sides, keys, tasks, memory, group=2, turns=turns)


def rule_tasks() -> Tasks:
    return Tasks(
        policy=message(*[[SYSTEM, 12, END]] * 3, width=3),
        world=message(*[[SYSTEM, goal, 13, END] for goal in GOALS], width=4),
    )


def play(script: list[list[int]], *, policy_size=16, world_size=20, seed=0):
    memory = rollout.Memory(rule_memory(6, policy_size), rule_memory(6, world_size))
    return rule_loop(jnp.asarray(script), keys_of(6, seed), rule_tasks(), memory)


@pytest.fixture(scope="module")
def scripted():
    return play(
        [
            [10, 7, 11],  # solves in turn 2
            [SOLVED, 10, SOLVED],  # writes the solved token itself
            [8, 10, 10],  # solves in turn 1
            [10, BABBLE, 8],  # brings the world out of its mind
            [10, 10, 9],  # solves in the last turn
            [7, 8, 10],  # other tasks' goals
        ]
    )[0]


def test_only_the_worlds_status_makes_a_success(scripted):
    solved = [True, False, True, False, True, False]
    np.testing.assert_array_equal(scripted.success, solved)
    np.testing.assert_array_equal(scripted.reward, np.array(solved, np.float32))
    np.testing.assert_array_equal(scripted.done, solved)
    np.testing.assert_array_equal(scripted.turns, [2, 3, 1, 2, 3, 3])
    assert not np.asarray(scripted.truncated).any()


def test_a_world_that_never_stops_makes_its_row_invalid(scripted):
    np.testing.assert_array_equal(scripted.invalid, np.arange(6) == 3)


def test_tokens_are_appended_once_and_the_mask_is_exactly_what_was_sampled(scripted):
    start, again = [SYSTEM, 12, END], [10, PLAYING]
    expected = [
        [*start, 10, END, *again, 7, END],  # a final observation is nothing to act on
        [*start, SOLVED, END, SOLVED, PLAYING, 10, END, *again, SOLVED, END, SOLVED, PLAYING],
        [*start, 8, END],
        [*start, 10, END, *again, BABBLE, END],
        [*start, 10, END, *again, 10, END, *again, 9, END],
        [*start, 7, END, 7, PLAYING, 8, END, 8, PLAYING, 10, END, *again],
    ]
    for row, ids in enumerate(expected):
        assert np.asarray(scripted.tokens[row, : scripted.length[row]]).tolist() == ids
        sampled = [(place - 3) % 4 in (0, 1) and place >= 3 for place in range(len(ids))]
        np.testing.assert_array_equal(scripted.action_mask[row, : len(ids)], sampled)
        assert not np.asarray(scripted.action_mask[row, len(ids) :]).any()
        turn = [(place + 1) // 4 for place in range(len(ids))]
        want = [-(ids[p] if (p - 3) % 4 == 0 else turn[p]) * sampled[p] for p in range(len(ids))]
        np.testing.assert_array_equal(scripted.logprobs[row, : len(ids)], want)


def test_a_row_that_has_ended_says_nothing_more(scripted):
    lengths = np.asarray(scripted.actions.length)  # [T, B]
    np.testing.assert_array_equal(lengths > 0, np.arange(TURNS)[:, None] < scripted.turns)
    np.testing.assert_array_equal(scripted.observations.length > 0, lengths > 0)
    assert scripted.actions.tokens.shape == (TURNS, 6, ACTION_WIDTH)


def test_a_row_is_truncated_where_a_context_is_full():
    endless = [[10, 10, 10]] * 6
    small_policy, _ = play(endless, policy_size=9)  # prompt 3, turn 4: no room behind the second
    np.testing.assert_array_equal(small_policy.truncated, True)
    np.testing.assert_array_equal(small_policy.turns, 2)
    np.testing.assert_array_equal(small_policy.length, 9)
    small_world, _ = play(endless, world_size=10)  # prompt 4, turn 4: no answer to the second
    np.testing.assert_array_equal(small_world.truncated, True)
    np.testing.assert_array_equal(small_world.turns, 1)
    assert not np.asarray(small_world.invalid).any()


def jitted(side: Speaker) -> Speaker:
    return Speaker(jax.jit(side.begin, static_argnums=3), jax.jit(side.read), jax.jit(side.write))


def test_the_loop_equals_its_turns_played_one_by_one():
    script, keys, tasks = jnp.full((6, TURNS), -1), keys_of(6, 3), rule_tasks()
    played, _ = play(script, seed=3)
    act, answer = (jitted(side) for side in (rule_policy, rule_world))
    policy = act.begin(script, tasks.policy, rule_memory(6, 16), 2)
    world = answer.begin(None, tasks.world, rule_memory(6, 20), 2)
    turn_keys = jax.jit(rollout.turn_keys)
    alive, won = np.ones(6, bool), np.zeros(6, bool)
    for turn in range(TURNS):
        act_keys, answer_keys = turn_keys(keys, turn)
        action, policy = act.write(script, act_keys, policy, jnp.asarray(alive))
        world = answer.read(None, world, rollout.said(action, to=jnp.asarray(alive)))
        observation, world = answer.write(None, answer_keys, world, jnp.asarray(alive))
        verdict = judge(observation)
        won |= alive & np.asarray(verdict.success)
        alive &= ~np.asarray(verdict.ended)
        policy = act.read(script, policy, rollout.said(observation, to=jnp.asarray(alive)))
        assert texts(at(played.actions, turn)) == texts(action)
        assert texts(at(played.observations, turn)) == texts(observation)
    np.testing.assert_array_equal(played.success, won)
    np.testing.assert_array_equal(played.tokens, policy.tokens)
    np.testing.assert_array_equal(played.length, policy.length)
    assert len({tuple(t) for t in texts(at(played.actions, 0))}) > 1  # rows draw apart


# ---- tiny models: decoding and unmasking inside one program --------------------------------------

ACT_STOPS, STATUSES = (3, 4, 10, 11), (1, 2, 5, 6, 7, 8, 9, 13, 15, 17, 19)
SIZES = {"policy": 40, "world": 56}
policy_model, world_model = TinyModel(1), TinyModel(4)


def speakers() -> tuple:
    act = partial(decode.generate, temperature=1.0, max_tokens=5, stop_ids=ACT_STOPS)
    plan = denoise.Plan(
        strategy="low_confidence_dynamic",
        block=4,
        steps=4,
        threshold=0.5,
        temperature=1.0,
        max_tokens=10,
        stop_ids=STATUSES,
        mask_id=22,
        pad_id=0,
    )
    answer = partial(denoise.generate, plan=plan)
    return (
        policy_model.speaker(lambda step, *args: act(step, *args)),
        world_model.speaker(lambda step, *args: answer(step, *args)),
    )


def model_tasks(order: tuple[int, ...] = (0, 1, 2, 3)) -> Tasks:
    policy = [[5, 6, 7], [9, 10, 11, 12, 13], [14, 15], [17]]
    world = [[5, 6, 7, 8, 9], [9, 10], [12, 13, 14, 15, 16, 17, 18], [19, 20, 21]]
    return Tasks(
        policy=message(*[policy[i] for i in order], width=6),
        world=message(*[world[i] for i in order], width=8),
    )


def model_memory() -> rollout.Memory:
    return rollout.Memory(
        policy_model.memory(8, SIZES["policy"]), world_model.memory(8, SIZES["world"])
    )


@pytest.fixture(scope="module")
def loop():
    sides = (*speakers(), partial(reward.status_judge, solved_id=2, failed_id=6))
    return jax.jit(partial(rollout.rollout, *sides, group=2, turns=TURNS), donate_argnums=4)


@pytest.fixture(scope="module")
def params():
    return sharp_params(32), sharp_params(84)


@pytest.fixture(scope="module")
def played(loop, params):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as: a donated buffer was not usable
        return loop(*params, keys_of(8), model_tasks(), model_memory())[0]


def test_a_policys_stream_is_prompt_actions_and_observations(played):
    prompts = texts(model_tasks().policy)
    rows = [list(prompts[row // 2]) for row in range(8)]
    masks = [[False] * len(row) for row in rows]
    said = [(at(played.actions, t), at(played.observations, t)) for t in range(TURNS)]
    for turn, (action, observation) in enumerate(said):
        for row in range(8):
            n = int(action.length[row])
            rows[row] += texts(action)[row]
            masks[row] += np.asarray(action.sampled[row, :n]).tolist()
            goes_on = turn + 1 < int(played.turns[row]) or (
                n and turn + 1 == TURNS and not played.done[row] and observation.stopped[row]
            )
            if goes_on:
                rows[row] += texts(observation)[row]
                masks[row] += [False] * len(texts(observation)[row])
    for row in range(8):
        assert np.asarray(played.tokens[row, : played.length[row]]).tolist() == rows[row]
        mask = masks[row] + [False] * (SIZES["policy"] - len(rows[row]))
        np.testing.assert_array_equal(played.action_mask[row], mask)
    assert int(played.turns.max()) == TURNS  # the draw shows every way to end
    for name in ("done", "invalid", "truncated", "success"):
        assert 0 < np.asarray(getattr(played, name)).sum() < 8, name


def test_logprobs_are_those_of_the_finished_stream(played, params):
    logits = policy_model.logits(params[0], played.tokens, played.length)
    expected = np.asarray(score.next_token_logprobs(logits, played.tokens))
    mask = np.asarray(played.action_mask)
    np.testing.assert_allclose(played.logprobs, np.where(mask, expected, 0.0), atol=2e-3)


def assert_same_rows(found, expected, order=range(8)) -> None:
    order = np.asarray(order)
    for name in ("length", "reward", "success", "turns", "done", "truncated", "invalid"):
        np.testing.assert_array_equal(
            getattr(found, name), np.asarray(getattr(expected, name))[order]
        )
    for row, old in enumerate(order):
        n = int(found.length[row])
        np.testing.assert_array_equal(found.tokens[row, :n], expected.tokens[old, :n])
    np.testing.assert_array_equal(found.action_mask, np.asarray(expected.action_mask)[order])


def test_a_row_does_not_depend_on_its_batch_mates(loop, params, played):
    rows = np.array([4, 5, 0, 1, 6, 7, 2, 3])
    tasks = model_tasks([2, 0, 3, 1])
    again, _ = loop(*params, keys_of(8)[rows], tasks, model_memory())
    assert_same_rows(again, played, rows)


@contextlib.contextmanager
def counted_compiles():
    """Counts XLA compilations by JAX's own events."""
    seen = []

    def listen(event: str, duration: float, **_) -> None:
        if "backend_compile" in event:
            seen.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_it_compiles_once_keeps_off_the_host_and_reuses_its_memory(params, loop, played):
    calls = [
        (keys_of(8, seed), model_tasks(order))
        for seed, order in enumerate([[0, 1, 2, 3], [3, 1, 1, 0], [2, 2, 0, 1]])
    ]
    memory, results = model_memory(), []
    jax.block_until_ready((calls, memory, params))
    with counted_compiles() as compiled, jax.transfer_guard("disallow"):
        for keys, tasks in calls:
            old = memory
            result, memory = loop(*params, keys, tasks, old)
            results.append(jax.block_until_ready(result))
            for side in (old.policy, old.world):
                assert all(x.is_deleted() for x in (side.tokens, side.cache.key, side.cache.value))
    assert compiled == []  # `played` has compiled it, for other memory and the same shapes
    assert loop._cache_size() == 1
    assert_same_rows(results[0], played)  # what an earlier rollout has left in memory is not seen
    assert not np.array_equal(results[1].tokens, results[2].tokens)


def test_eight_devices_give_what_one_gives(params, played):
    sides = (*speakers(), partial(reward.status_judge, solved_id=2, failed_id=6))
    loop = jax.jit(partial(rollout.rollout, *sides, group=2, turns=TURNS))
    on = mesh.make(data=4, fsdp=2, tensor=1)
    rows, everywhere = mesh.rows(on), mesh.replicated(on)
    by_rank = lambda x: mesh.row_axis(on, 1 if x.ndim == 5 else 0)  # noqa: E731
    memory = model_memory()
    with jax.set_mesh(on):
        sharded, after = loop(
            *jax.device_put(params, everywhere),
            jax.device_put(keys_of(8), rows),
            jax.device_put(model_tasks(), everywhere),
            jax.device_put(memory, jax.tree.map(by_rank, memory)),
        )
    assert len(after.world.cache.key.sharding.device_set) == 8
    assert_same_rows(sharded, played)
    np.testing.assert_allclose(sharded.logprobs, played.logprobs, atol=1e-4)
