"""Devices of the tests: eight pretended CPU devices, chosen before anything imports jax."""

import os
from pathlib import Path

import pytest
from circle import FAST_COMPILE, Circle, quickstart

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count=8 {FAST_COMPILE}")


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where programs that tests start keep what they compiled."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="session")
def circle(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Circle:
    """Every program, run once by launch/quickstart.sh."""
    return quickstart(tmp_path_factory.mktemp("circle"), cache)
