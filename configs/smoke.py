"""The whole circle at toy size, for tests: seconds, not quality.

    CONFIG=configs/smoke.py WORKDIR=runs/smoke launch/quickstart.sh

Cost: under a minute on two CPU cores after the install. Expected: every number is written, and
none is good. Eight rows everywhere, so that eight devices have one each.
"""

from pathlib import Path
from runpy import run_path

from ml_collections import ConfigDict

base = run_path(str(Path(__file__).with_name("base.py")))


def get_config() -> ConfigDict:
    """The defaults with everything that takes time made tiny."""
    config = base["get_config"]()
    config.env.turns = 4
    config.collect.train_episodes = 24
    config.collect.dev_episodes = 6
    config.collect.test_episodes = 6
    config.collect.expert_episodes = 6
    config.tokenizer.vocab_size = 1024
    config.world.temperature = 1.0
    config.world.model = base["model"](width=32, layers=2, heads=2, mlp=64)
    config.policy.model = base["model"](width=32, layers=1, heads=2, mlp=64)
    for part in (config.sft.world, config.sft.policy):
        part.steps = 4
        part.rows = 8
        part.eval_every = 2
        part.save_every = 2
    config.sft.world.steps = 12
    config.sft.world.eval_every = 6
    config.sft.world.save_every = 6
    config.rollout.tasks = 2
    config.rollout.group = 8
    config.rollout.turns = 2
    config.grpo.steps = 2
    config.grpo.micro_rows = 8
    config.grpo.save_every = 1
    config.grpo.eval_every = 2
    config.grpo.eval_games = 8
    config.evaluate.rows = 8
    config.evaluate.world_samples = 8
    config.evaluate.games = 4
    config.evaluate.bootstrap = 50
    return config
