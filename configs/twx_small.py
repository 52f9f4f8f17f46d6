"""The quickstart's circle, larger: more of the same games, a larger world, longer training.

    CONFIG=configs/twx_small.py WORKDIR=runs/twx_small launch/quickstart.sh

Cost: meant for about two hours on two CPU cores; not yet measured in full.
"""

from pathlib import Path
from runpy import run_path

from ml_collections import ConfigDict

base = run_path(str(Path(__file__).with_name("base.py")))


def get_config() -> ConfigDict:
    """base.py with more games, a larger world and more of every step."""
    config = base["get_config"]()
    config.collect.train_episodes = 10_000
    config.collect.expert_episodes = 40
    config.world.model = base["model"](width=256, layers=4, heads=4, mlp=704)
    config.sft.world.steps = 3000
    config.grpo.steps = 100
    return config
