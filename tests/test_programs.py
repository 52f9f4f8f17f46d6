"""The whole circle at toy size, on one device and on eight, and killed and started again."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

ROOT = Path(__file__).parent.parent
CIRCLE = (
    ["collect"],
    ["sft", "--what=world"],
    ["sft", "--what=world", "--config.world.kind=autoregressive"],
    ["sft", "--what=policy"],
    ["evaluate", "--what=world"],
    ["grpo"],
    ["evaluate", "--what=agent"],
    ["report"],
)


def environment(devices: int) -> dict[str, str]:
    flags = f"--xla_force_host_platform_device_count={devices}"
    return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}


def command(words: list[str], workdir: Path) -> list[str]:
    smoke = f"--config={ROOT / 'configs' / 'smoke.py'}"
    return [sys.executable, "-m", "mdlm_jax", *words, smoke, f"--workdir={workdir}"]


def run(words: list[str], workdir: Path, devices: int = 1) -> str:
    done = subprocess.run(
        command(words, workdir), env=environment(devices), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def circle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workdir in which every program ran, on one device."""
    workdir = tmp_path_factory.mktemp("circle")
    for words in CIRCLE:
        run(words, workdir)
    return workdir


def copy_inputs(circle: Path, workdir: Path, *names: str) -> Path:
    """A workdir with what earlier programs made."""
    for name in names:
        subprocess.run(["cp", "-r", str(circle / name), str(workdir / name)], check=True)
    return workdir


def last_checkpoint(folder: Path) -> tuple[int, list[np.ndarray]]:
    with ocp.training.Checkpointer(folder.absolute()) as checkpointer:
        step = checkpointer.latest.step
        state = checkpointer.load(step)
    return step, [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


def assert_equal_states(left: Path, right: Path) -> None:
    (step, ours), (other_step, theirs) = last_checkpoint(left), last_checkpoint(right)
    assert step == other_step
    assert len(ours) == len(theirs) > 10
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(mine, other)


def test_circle_writes_results(circle: Path):
    results = json.loads((circle / "results.json").read_text())
    assert {"diffusion", "ar"} <= set(results["world_exact_match"])
    for name in ("real_success_before", "real_success_after", "dream_success_after"):
        low, high = results[f"{name}_interval"]
        assert 0 <= low <= results[name] <= high <= 1
    assert results["wall_seconds"]["total"] > 0
    assert "<html" in (circle / "report.html").read_text()


def test_finished_training_is_left_alone(circle: Path):
    before = last_checkpoint(circle / "grpo" / "checkpoints")[0]
    assert "done already" in run(["grpo"], circle)
    assert "done already" in run(["sft", "--what=world"], circle)
    assert last_checkpoint(circle / "grpo" / "checkpoints")[0] == before


@pytest.mark.parametrize("mesh", [[], ["--config.mesh.fsdp=2", "--config.mesh.tensor=2"]])
def test_circle_on_eight_devices(circle: Path, tmp_path: Path, mesh: list[str]):
    workdir = copy_inputs(circle, tmp_path, "data", "tokenizer.json")
    for words in (["sft", "--what=world"], ["sft", "--what=policy"], ["grpo"]):
        run([*words, *mesh], workdir, devices=8)
    for name in ("world_diffusion", "policy"):
        ours, theirs = (last_checkpoint(w / name / "checkpoints")[1] for w in (circle, workdir))
        for one, eight in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(one, eight, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize(
    ("words", "folder", "inputs"),
    [
        (["sft", "--what=world"], "world_diffusion", ("data", "tokenizer.json")),
        (["grpo"], "grpo", ("data", "tokenizer.json", "world_diffusion", "policy")),
    ],
    ids=["sft", "grpo"],
)
def test_killed_and_resumed_is_straight(circle: Path, tmp_path: Path, words, folder, inputs):
    """SIGKILL right after the first checkpoint; the second start ends bit for bit where the straight
    run does."""
    workdir = copy_inputs(circle, tmp_path, *inputs)
    process = subprocess.Popen(
        command(words, workdir),
        env=environment(1),
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    checkpoints = workdir / folder / "checkpoints"
    deadline = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < deadline:
        if any(entry.name.isdigit() for entry in checkpoints.glob("*")):
            break
        time.sleep(0.01)
    assert process.poll() is None, "it ended before it could be killed"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    run(words, workdir)
    assert_equal_states(checkpoints, circle / folder / "checkpoints")
    timeless = lambda path: [  # noqa: E731
        {k: v for k, v in json.loads(line).items() if not k.startswith(("tokens", "step_time"))}
        for line in path.read_text().splitlines()
    ]
    assert timeless(workdir / folder / "metrics.jsonl") == timeless(
        circle / folder / "metrics.jsonl"
    )
