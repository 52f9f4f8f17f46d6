"""THE loop: policy actions and parallel unmasking steps alternate inside one compiled program."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from mdlm_jax import context as ctx
from mdlm_jax.rl.reward import Verdict
from mdlm_jax.structs import Context, Generation, Message, Rollout, Speaker, Tasks


@struct.dataclass
class Memory:
    """The two contexts. Donate them to the loop and keep what it returns: memory is made once."""

    policy: Context
    world: Context


@struct.dataclass
class Play:
    """State of the loop over turns. Row fields are [B]."""

    memory: Memory
    action_mask: jax.Array  # bool[B, L]
    logprobs: jax.Array  # f32[B, L]
    reward: jax.Array
    success: jax.Array
    turns: jax.Array
    alive: jax.Array  # bool  still playing
    done: jax.Array
    truncated: jax.Array
    invalid: jax.Array


@struct.dataclass
class Outcome:
    """What a turn meant for each row. All bool[B]."""

    played: jax.Array  # the row's action reached the world
    answered: jax.Array  # and the world finished its observation
    rambled: jax.Array  # or wrote all it may without an end
    goes_on: jax.Array  # the episode has a next turn


def rollout(
    act: Speaker,
    answer: Speaker,
    judge: Callable,
    policy_params: dict,
    world_params: dict,
    keys_B: jax.Array,
    tasks: Tasks,
    memory: Memory,
    *,
    group: int,
    turns: int,
) -> tuple[Rollout, Memory]:
    """Plays P x `group` episodes of at most `turns` turns of a policy inside a world model.

    `judge(observation) -> Verdict` looks at environment turns only. A world that does not finish
    its observation makes its row invalid: no reward is invented for it. A row whose next turn no
    longer fits a context ends as truncated. Each row draws from its own key, folded with the
    turn, so its text does not depend on its batch mates.
    """

    def turn(play: Play, index: jax.Array) -> tuple[Play, tuple[Generation, Generation]]:
        action_keys_B, answer_keys_B = turn_keys(keys_B, index)
        before = play.memory
        action, policy = act.write(policy_params, action_keys_B, before.policy, play.alive)
        played_B = play.alive & (action.length > 0) & (ctx.room(before.world) > action.length)
        world = answer.read(world_params, before.world, said(action, to=played_B))
        observation, world = answer.write(world_params, answer_keys_B, world, played_B)
        verdict = judge(observation)
        outcome = outcome_of(observation, verdict, played_B, ctx.room(policy))
        policy = act.read(policy_params, policy, said(observation, to=outcome.goes_on))
        play = record_action(play, action)
        play = record_outcome(play, action, outcome, verdict)
        return play.replace(memory=Memory(policy, world)), (action, observation)

    memory = Memory(
        policy=act.begin(policy_params, tasks.policy, memory.policy, group),
        world=answer.begin(world_params, tasks.world, memory.world, group),
    )
    play, (actions, observations) = jax.lax.scan(turn, start(memory), jnp.arange(turns))
    return summary(play, actions, observations), play.memory


def start(memory: Memory) -> Play:
    """Every row alive, nothing played."""
    rows, size = memory.policy.tokens.shape
    no_B = jnp.zeros((rows,), bool)
    return Play(
        memory=memory,
        action_mask=jnp.zeros((rows, size), bool),
        logprobs=jnp.zeros((rows, size), jnp.float32),
        reward=jnp.zeros((rows,), jnp.float32),
        success=no_B,
        turns=jnp.zeros((rows,), jnp.int32),
        alive=~no_B,
        done=no_B,
        truncated=no_B,
        invalid=no_B,
    )


def turn_keys(keys_B: jax.Array, turn: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Each row's keys for its action and its observation of this turn."""
    split = jax.vmap(lambda key: jax.random.split(jax.random.fold_in(key, turn)), out_axes=1)
    keys_2B = split(keys_B)
    return keys_2B[0], keys_2B[1]


def said(generation: Generation, *, to: jax.Array) -> Message:
    """What one side wrote, as a message to the other side in the rows `to`; silence elsewhere.

    Both sides have the same vocabulary, so ids pass over on the device.
    """
    return Message(generation.tokens, jnp.where(to, generation.length, 0))


def outcome_of(
    observation: Generation, verdict: Verdict, played_B: jax.Array, policy_room_B: jax.Array
) -> Outcome:
    """How the turn ended. A next turn needs room for the observation and one more token."""
    answered_B = played_B & observation.stopped
    full_B = observation.length >= observation.tokens.shape[1]
    return Outcome(
        played=played_B,
        answered=answered_B,
        rambled=played_B & ~observation.stopped & full_B,
        goes_on=answered_B & ~verdict.ended & (policy_room_B > observation.length),
    )


def record_action(play: Play, action: Generation) -> Play:
    """Marks an action's sampled tokens, which begin where the policy's context ended before."""
    places_BW = play.memory.policy.length[:, None] + jnp.arange(action.tokens.shape[1])
    return play.replace(
        action_mask=ctx.put(play.action_mask, action.sampled, places_BW, action.sampled),
        logprobs=ctx.put(play.logprobs, action.logprobs, places_BW, action.sampled),
    )


def record_outcome(play: Play, action: Generation, outcome: Outcome, verdict: Verdict) -> Play:
    """Books the turn. A row that stops for none of the world's reasons was cut short."""
    ended_B = outcome.answered & verdict.ended
    cut_B = play.alive & ~(outcome.goes_on | ended_B | outcome.rambled)
    forced_B = outcome.played & ~action.stopped
    return play.replace(
        reward=play.reward + jnp.where(outcome.answered, verdict.reward, 0.0),
        success=play.success | (outcome.answered & verdict.success),
        turns=play.turns + outcome.played,
        alive=outcome.goes_on,
        done=play.done | ended_B,
        truncated=play.truncated | cut_B | forced_B,
        invalid=play.invalid | outcome.rambled,
    )


def summary(play: Play, actions: Generation, observations: Generation) -> Rollout:
    """The finished episodes."""
    return Rollout(
        tokens=play.memory.policy.tokens,
        length=play.memory.policy.length,
        action_mask=play.action_mask,
        logprobs=play.logprobs,
        reward=play.reward,
        success=play.success,
        turns=play.turns,
        done=play.done,
        truncated=play.truncated,
        invalid=play.invalid,
        actions=actions,
        observations=observations,
    )
