"""The whole circle at toy size, on one device and on eight, and killed and started again."""

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from circle import Circle, command, environment, run
from orbax.checkpoint import v1 as ocp

TRAINED = {"world_diffusion": ["sft", "--what=world"], "grpo": ["grpo"]}
EIGHT = {
    "data": ([], ("sft --what=world",)),
    "data_fsdp_tensor": (
        ["--config.mesh.fsdp=2", "--config.mesh.tensor=2"],
        (
            *("sft --what=world", "sft --what=policy"),
            *("evaluate --what=world", "grpo", "evaluate --what=agent"),
        ),
    ),
}


def copy_inputs(circle: Circle, workdir: Path, *names: str) -> None:
    """Puts what earlier programs made into another workdir."""
    for name in names:
        subprocess.run(["cp", "-r", str(circle.workdir / name), str(workdir / name)], check=True)


def last_checkpoint(folder: Path) -> tuple[int, list[np.ndarray]]:
    with ocp.training.Checkpointer(folder.absolute()) as checkpointer:
        step = checkpointer.latest.step
        state = checkpointer.load(step)
    return step, [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


def assert_equal(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    """Bit for bit."""
    assert len(ours) == len(theirs) > 10
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(mine, other)


def metrics_without_times(folder: Path) -> list[dict]:
    log = folder / "metrics.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    times = {"step_time", "tokens_per_second"}
    return [{k: v for k, v in json.loads(line).items() if k not in times} for line in lines]


def test_circle_writes_results(circle: Circle):
    results = json.loads((circle.workdir / "results.json").read_text())
    assert {"diffusion", "ar"} <= set(results["world_exact_match"])
    for name in ("real_success_before", "real_success_after", "dream_success_after"):
        low, high = results[f"{name}_interval"]
        assert 0 <= low <= results[name] <= high <= 1
    assert results["wall_seconds"]["total"] > 0
    assert "<html" in (circle.workdir / "report.html").read_text()


def test_every_training_changes_its_parameters(circle: Circle):
    """Else equal results of two runs would say nothing."""
    for name in ("world_diffusion", "world_autoregressive", "policy", "grpo"):
        assert any(
            row.get("grad_norm", 0) > 0 for row in metrics_without_times(circle.workdir / name)
        )


def test_finished_training_is_left_alone(circle: Circle, cache: Path):
    for folder, words in TRAINED.items():
        before = last_checkpoint(circle.workdir / folder / "checkpoints")[0]
        assert "done already" in run(words, circle.workdir, environment(1, cache))
        assert last_checkpoint(circle.workdir / folder / "checkpoints")[0] == before


@pytest.mark.parametrize(("mesh", "steps"), EIGHT.values(), ids=EIGHT)
def test_circle_on_eight_devices(circle: Circle, cache: Path, tmp_path: Path, mesh, steps):
    """Trained from scratch on eight devices, a model is the one that a single device trains."""
    copy_inputs(circle, tmp_path, "data", "tokenizer.json", "world_autoregressive", "policy")
    trained = {"world_diffusion": "sft --what=world", "policy": "sft --what=policy"}
    for name, step in trained.items():
        if step in steps:
            shutil.rmtree(tmp_path / name, ignore_errors=True)
    for step in steps:
        run([*step.split(), *mesh], tmp_path, environment(8, cache))
    for name in trained:
        one, eight = (
            last_checkpoint(workdir / name / "checkpoints")[1]
            for workdir in (circle.workdir, tmp_path)
        )
        for left, right in zip(one, eight, strict=True):
            np.testing.assert_allclose(left, right, rtol=2e-3, atol=2e-4)


SYSTEMS = {"semi-ar": {"diffusion", "diffusion_static"}, "wedlm": {"diffusion"}}


@pytest.mark.parametrize("objective", SYSTEMS)
def test_a_world_of_another_objective_is_trained_and_answers(
    circle: Circle, cache: Path, tmp_path: Path, objective: str
):
    copy_inputs(circle, tmp_path, "data", "tokenizer.json")
    chosen = [f"--config.world.objective={objective}"]
    run([*TRAINED["world_diffusion"], *chosen], tmp_path, environment(1, cache))
    first, last = metrics_without_times(tmp_path / "world_diffusion")
    assert last["dev_loss"] < first["dev_loss"]
    assert ("ar_loss" in last) == (objective == "wedlm")
    run(["evaluate", "--what=world", *chosen], tmp_path, environment(1, cache))
    world = json.loads((tmp_path / "evaluate" / "world.json").read_text())
    assert world["systems"].keys() == SYSTEMS[objective]
    assert ("window" in world["settings"]) == (objective == "wedlm")
    samples = (tmp_path / "evaluate" / "world_samples.jsonl").read_text().splitlines()
    assert any(json.loads(sample)["tokens"] for sample in samples)


def processes_of(workdir: Path) -> list[str]:
    """Command lines of the living processes that were started for this workdir."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"TEST_WORKDIR={workdir}\0".encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().decode())
        except OSError:  # it ended, or is somebody else's
            continue
    return [line for line in found if line]


def kill_when_there(folder: Path, words: list[str], workdir: Path, env: dict[str, str]) -> None:
    """SIGKILL to the program alone as soon as `folder` holds a finished checkpoint.

    Its workers and their JVMs have to notice by themselves.
    """
    process = subprocess.Popen(command(words, workdir), env=env, stdout=subprocess.DEVNULL)
    while not any(entry.name.isdigit() for entry in folder.glob("*")):
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.002)
    living = processes_of(workdir)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it ended before it could be killed"
    if words == ["grpo"]:
        assert any("java" in line for line in living)
    deadline = time.monotonic() + 20
    while processes_of(workdir) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_of(workdir) == []


INPUTS = {
    "world_diffusion": ("data", "tokenizer.json"),
    "grpo": ("data", "tokenizer.json", "world_diffusion", "policy"),
}


@pytest.mark.parametrize("moment", ["checkpoints", "params"])
@pytest.mark.parametrize("name", INPUTS)
def test_killed_and_resumed_is_straight(
    circle: Circle, cache: Path, tmp_path: Path, name: str, moment: str
):
    """Killed when its first checkpoint is there, or when parameters are and no checkpoint is."""
    copy_inputs(circle, tmp_path, *INPUTS[name])
    ours, straight = tmp_path / name, circle.workdir / name
    env = environment(1, cache) | {"TEST_WORKDIR": str(tmp_path)}
    kill_when_there(ours / moment, TRAINED[name], tmp_path, env)
    assert metrics_without_times(ours) != metrics_without_times(straight)
    run(TRAINED[name], tmp_path, env)
    (step, state), (last, true_state) = (
        last_checkpoint(folder / "checkpoints") for folder in (ours, straight)
    )
    assert step == last
    assert_equal(state, true_state)
    assert_equal(*(last_checkpoint(folder / "params")[1] for folder in (ours, straight)))
    assert metrics_without_times(ours) == metrics_without_times(straight)
