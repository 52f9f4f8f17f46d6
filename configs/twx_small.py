"""The quickstart's circle, larger: two things in the way of the coin, a larger world, more of all.

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
    config.env.games = (
        "coin:numLocations=4,numDistractorItems=2,includeDoors=0,limitInventorySize=0",
    )
    config.env.turns = 10
    config.collect.train_episodes = 10_000
    config.collect.expert_episodes = 40
    config.world.model = base["model"](width=256, layers=4, heads=4, mlp=704)
    config.world.context = 320
    config.policy.context = 256
    config.sft.world.steps = 4000
    config.sft.world.rows = 4
    config.rollout.turns = 10
    config.grpo.steps = 100
    return config
