"""The shapes of a config's models, memory and rollout, without computing anything."""

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from mdlm_jax import context as ctx
from mdlm_jax.models import transformer
from mdlm_jax.programs import build
from mdlm_jax.rl import rollout
from mdlm_jax.structs import Message, Tasks
from mdlm_jax.tokens.tokenizer import Specials


def shapes(config: ConfigDict) -> dict:
    """Shapes of both models, the rollout and its memory, without computing anything."""
    vocab, special = config.tokenizer.vocab_size, Specials(*range(7))
    policy, world = build.policy_model(config, vocab), build.world_model(config, vocab)
    rows = config.rollout.tasks * config.rollout.group
    params = {
        name: jax.eval_shape(lambda m=m: transformer.init(jax.random.key(0), m.config))
        for name, m in (("policy", policy), ("world", world))
    }
    room = {
        name: jax.eval_shape(
            lambda m=m, size=size: ctx.empty(rows, size, m.config.cache_shape, jnp.float32)
        )
        for name, m, size in (
            ("policy", policy, config.policy.context),
            ("world", world, config.world.context),
        )
    }
    prompts = lambda size: Message(  # noqa: E731
        jax.ShapeDtypeStruct((config.rollout.tasks, size), np.int32),
        jax.ShapeDtypeStruct((config.rollout.tasks,), np.int32),
    )
    tasks = Tasks(prompts(config.policy.prompt), prompts(config.world.prompt))
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))
    played, _ = jax.eval_shape(
        build.play_fn(
            config,
            policy,
            world,
            special,
            group=config.rollout.group,
            turns=config.rollout.turns,
            temperature=config.policy.temperature,
        ),
        params["policy"],
        params["world"],
        keys,
        tasks,
        rollout.Memory(**room),
    )
    return {"params": params, "memory": room, "rollout": played}
