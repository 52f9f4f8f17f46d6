"""The quickstart's circle, larger: two things to put away, and rooms to search for a coin.

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
        "twc:numLocations=1,numItemsToPutAway=1,includeDoors=0,limitInventorySize=0",
        "twc:numLocations=1,numItemsToPutAway=2,includeDoors=0,limitInventorySize=0",
        "coin:numLocations=2,numDistractorItems=1,includeDoors=0,limitInventorySize=0",
    )
    config.env.turns = 10
    config.collect.train_episodes = 12_000
    config.collect.expert_episodes = 200
    config.world.prompt = 288
    config.world.context = 768
    config.world.model = base["model"](width=256, layers=5, heads=4, mlp=704)
    config.policy.prompt = 224
    config.policy.context = 512
    config.policy.model = base["model"](width=192, layers=4, heads=3, mlp=512)
    config.sft.world.steps = 7000
    config.sft.world.row_length = 512
    config.sft.world.answer_length = 256
    config.sft.policy.steps = 1200
    config.sft.policy.row_length = 512
    config.rollout.turns = 10
    config.grpo.steps = 120
    return config
