"""How tests run whole programs: as a user does, in processes of their own, at toy size."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
SMOKE = ROOT / "configs" / "smoke.py"
# Code that is compiled fast and runs slowly; programs at toy size do little but compile.
FAST_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


class Circle(NamedTuple):
    """A workdir in which every program ran, on one device, and what was said meanwhile."""

    workdir: Path
    said: str


def environment(devices: int, cache: Path) -> dict[str, str]:
    """Of a program on pretended devices. Compiled programs are shared by all that name `cache`."""
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {FAST_COMPILE}",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        "PYTHONPATH": str(ROOT),
    }


def command(words: list[str], workdir: Path) -> list[str]:
    """A program's command line at toy size."""
    where = [f"--config={SMOKE}", f"--workdir={workdir}"]
    return [sys.executable, "-m", "mdlm_jax", *words, *where]


def run(words: list[str], workdir: Path, environment: dict[str, str]) -> str:
    """Runs a program to its end and returns what it said."""
    return completed(command(words, workdir), environment)


def completed(command: list[str], environment: dict[str, str]) -> str:
    """What a command wrote to stdout; fails with its last words where it fails."""
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


def quickstart(folder: Path, cache: Path) -> Circle:
    """Runs launch/quickstart.sh at toy size, with this Python in place of a new installation."""
    workdir = folder / "run"
    script = str(ROOT / "launch" / "quickstart.sh")
    venv = {"VENV": str(installed_venv(folder)), "CONFIG": str(SMOKE), "WORKDIR": str(workdir)}
    return Circle(workdir, completed([script], environment(1, cache) | venv))


def installed_venv(folder: Path) -> Path:
    """A virtual environment, as far as launch/venv.sh looks, whose Python is this one.

    Its pip fails: what is installed already must not be installed again.
    """
    venv = folder / "venv"
    (venv / "bin").mkdir(parents=True)
    files = {
        "activate": f'PATH="{venv}/bin:$PATH"\n',
        "python": f'#!/bin/sh\nexec "{sys.executable}" "$@"\n',
        "pip": "#!/bin/sh\nexit 1\n",
    }
    for name, text in files.items():
        (venv / "bin" / name).write_text(text)
        (venv / "bin" / name).chmod(0o755)
    (venv / "installed-").touch()
    return venv
