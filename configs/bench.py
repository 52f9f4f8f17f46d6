"""What this machine does with a released shape.

    python -m mdlm_jax bench load

writes a random checkpoint in the shape of Qwen3-1.7B (3.4 GB of disk, removed afterwards), loads it
in a process of its own, and prints how long that took and how much memory it held at most. Cost: a
minute or two.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Qwen3-1.7B, as it is published."""
    config = ConfigDict()
    load = config.load = ConfigDict()
    load.repeats = 3  # loads, each in a process of its own
    load.dtype = "bfloat16"  # of the parameters in memory
    load.folder = ""  # where the checkpoint is written for the time of the bench; "" = temporary
    load.layers = 28
    load.width = 2048
    load.heads = 16
    load.kv_heads = 8
    load.mlp = 6144
    load.vocab = 151936
    return config
