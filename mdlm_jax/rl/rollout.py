"""THE loop: policy actions and parallel unmasking steps alternate inside one compiled program."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from mdlm_jax import context as ctx
from mdlm_jax.structs import Context, Generation, Message, Rollout, Speaker, Tasks


@struct.dataclass
class Memory:
    """The two contexts. Donate them to the loop and keep what it returns: nothing is allocated twice."""

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


def said(generation: Generation) -> Message:
    """What one side wrote, as the message that the other side reads (same vocabulary, on the device)."""
    return Message(generation.tokens, generation.length)


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

    `judge(observation) -> Verdict` looks at environment turns only. A world that does not finish its
    observation makes its row invalid: no reward is invented for it. A row whose next turn no longer fits
    a context ends as truncated. Each row draws from its own key, folded with the turn, so its text does
    not depend on its batch mates.
    """
    rows = keys_B.shape[0]
    memory = Memory(
        policy=act.begin(policy_params, tasks.policy, memory.policy, group),
        world=answer.begin(world_params, tasks.world, memory.world, group),
    )

    def turn(state: Play, index: jax.Array) -> tuple[Play, tuple[Generation, Generation]]:
        keys_2B = jax.vmap(lambda key: jax.random.split(jax.random.fold_in(key, index)), out_axes=1)(keys_B)
        asked_B = state.memory.policy.length
        action, policy = act.write(policy_params, keys_2B[0], state.memory.policy, state.alive)
        world_fits_B = ctx.room(state.memory.world) > action.length
        plays_B = state.alive & (action.length > 0) & world_fits_B
        heard = said(action)
        heard = heard.replace(length=jnp.where(plays_B, heard.length, 0))
        world = answer.read(world_params, state.memory.world, heard)
        observation, world = answer.write(world_params, keys_2B[1], world, plays_B)
        verdict = judge(observation)
        answered_B = plays_B & observation.stopped
        goes_on_B = answered_B & ~verdict.ended
        rambled_B = plays_B & ~observation.stopped & (observation.length >= observation.tokens.shape[1])
        policy_fits_B = ctx.room(policy) > observation.length
        told = said(observation)
        told = told.replace(length=jnp.where(goes_on_B & policy_fits_B, told.length, 0))
        policy = act.read(policy_params, policy, told)
        places_BW = asked_B[:, None] + jnp.arange(action.tokens.shape[1])
        state = Play(
            memory=Memory(policy, world),
            action_mask=ctx.put(state.action_mask, action.sampled, places_BW, action.sampled),
            logprobs=ctx.put(state.logprobs, action.logprobs, places_BW, action.sampled),
            reward=state.reward + jnp.where(answered_B, verdict.reward, 0.0),
            success=state.success | (answered_B & verdict.success),
            turns=state.turns + plays_B,
            alive=goes_on_B & policy_fits_B,
            done=state.done | (answered_B & verdict.ended),
            truncated=state.truncated
            | (state.alive & ~plays_B)
            | (plays_B & ~action.stopped)
            | (goes_on_B & ~policy_fits_B)
            | (plays_B & ~observation.stopped & ~rambled_B),
            invalid=state.invalid | rambled_B,
        )
        return state, (action, observation)

    no_B = jnp.zeros((rows,), bool)
    shape_BL = memory.policy.tokens.shape
    state = Play(
        memory=memory,
        action_mask=jnp.zeros(shape_BL, bool),
        logprobs=jnp.zeros(shape_BL, jnp.float32),
        reward=jnp.zeros((rows,), jnp.float32),
        success=no_B,
        turns=jnp.zeros((rows,), jnp.int32),
        alive=~no_B,
        done=no_B,
        truncated=no_B,
        invalid=no_B,
    )
    state, (actions, observations) = jax.lax.scan(turn, state, jnp.arange(turns))
    played = Rollout(
        tokens=state.memory.policy.tokens,
        length=state.memory.policy.length,
        action_mask=state.action_mask,
        logprobs=state.logprobs,
        reward=state.reward,
        success=state.success,
        turns=state.turns,
        done=state.done,
        truncated=state.truncated,
        invalid=state.invalid,
        actions=actions,
        observations=observations,
    )
    return played, state.memory
