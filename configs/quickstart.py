"""TextWorldExpress at the size of quickstart.

python -m mdlm_jax collect --config=configs/quickstart.py --workdir=runs/quickstart
"""

from pathlib import Path
from runpy import run_path

from ml_collections import ConfigDict

base = run_path(str(Path(__file__).with_name("base.py")))


def get_config() -> ConfigDict:
    """The defaults."""
    return base["get_config"]()
