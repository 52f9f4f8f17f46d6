"""Devices of the tests: eight pretended CPU devices, chosen before anything imports jax."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
