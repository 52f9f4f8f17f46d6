"""TextWorldExpress at the size of twx_small.

python -m mdlm_jax collect --config=configs/twx_small.py --workdir=runs/twx_small
"""

from pathlib import Path
from runpy import run_path

from ml_collections import ConfigDict

base = run_path(str(Path(__file__).with_name("base.py")))


def get_config() -> ConfigDict:
    """The defaults."""
    return base["get_config"]()
