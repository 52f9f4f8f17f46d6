"""Evaluation on the held-out test fold: the world model's answers, and the agent in real games.

`--what=world` gives every trained world the same (state, history, action) and compares its next
observation with the real one. `--what=agent` lets the policy before and after GRPO play the same
games in reality and inside the world model, so that a gap between dream and reality shows.
"""

import pathlib

from ml_collections import ConfigDict

from mdlm_jax.programs import evaluate_agent, evaluate_world


def run(config: ConfigDict, workdir: pathlib.Path, what: str) -> None:
    """Evaluates the worlds or the agent; writes workdir/evaluate/."""
    (workdir / "evaluate").mkdir(parents=True, exist_ok=True)
    {"world": evaluate_world.world, "agent": evaluate_agent.agent}[what](config, workdir)
