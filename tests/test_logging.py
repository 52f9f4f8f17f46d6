"""A resumed log equals a straight one; progress is told on a terminal and off it."""

import io
import json

import jax.numpy as jnp
import numpy as np
import pytest

from mdlm_jax.train.logging import MetricsLog, Progress


def test_each_line_is_json(tmp_path):
    log = MetricsLog(tmp_path / "run")
    log.write(1, {"loss": jnp.float32(0.5), "rows": np.int64(3), "note": "a", "per_group": (1, 2)})
    log.write(np.int32(2), {"loss": float("nan"), "peak": jnp.inf})
    lines = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert lines == log.read()
    assert lines[0] == {"step": 1, "loss": 0.5, "rows": 3, "note": "a", "per_group": [1, 2]}
    assert lines[1] == {"step": 2, "loss": None, "peak": None}


def test_a_resumed_log_equals_a_straight_one(tmp_path):
    straight, resumed = MetricsLog(tmp_path / "straight"), MetricsLog(tmp_path / "resumed")
    for step in range(1, 7):
        straight.write(step, {"loss": 1 / step})
    for step in range(1, 6):  # checkpoint at 3, killed while it wrote the line of step 5
        resumed.write(step, {"loss": 1 / step})
    resumed.path.write_bytes(resumed.path.read_bytes()[:-9])

    again = MetricsLog(tmp_path / "resumed")
    again.truncate(3)
    for step in range(4, 7):
        again.write(step, {"loss": 1 / step})
    assert again.path.read_bytes() == straight.path.read_bytes()
    assert sorted(path.name for path in again.path.parent.iterdir()) == ["metrics.jsonl"]


def test_truncating_to_nothing_and_nothing_to_truncate(tmp_path):
    log = MetricsLog(tmp_path)
    log.truncate(3)
    assert log.read() == []
    log.write(0, {"loss": 1.0})
    log.truncate(-1)
    assert log.path.read_text() == ""


def test_best_is_the_lowest_value_so_far(tmp_path):
    log = MetricsLog(tmp_path)
    assert log.best("dev_loss") == float("inf")
    for step, loss in enumerate([2.0, 1.5, float("nan"), 1.75]):
        log.write(step, {"dev_loss": loss})
    log.write(9, {"other": 0.0})
    assert log.best("dev_loss") == 1.5


def test_tensorboard_events_are_written_when_asked_for(tmp_path):
    pytest.importorskip("tensorboardX")
    log = MetricsLog(tmp_path, tensorboard=True)
    log.write(1, {"loss": 0.5, "note": "not a number"})
    log.close()
    assert list(tmp_path.glob("events*"))


def test_progress_without_a_terminal_prints_few_lines():
    stream = io.StringIO()
    with Progress(1000, "sft", every=3600.0, stream=stream) as progress:
        for step in range(1, 1001):
            progress.update(step, {"loss": jnp.float32(0.25), "rows": 3})
    first, one, last = stream.getvalue().splitlines()
    assert first == "sft: 0/1000, starting"
    assert one == "sft: 1/1000, loss 0.25, rows 3"
    assert last.startswith("sft: 1000/1000, loss 0.25, rows 3, took 00:")


def test_progress_tells_what_is_left():
    stream = io.StringIO()
    progress = Progress(10, "grpo", start=4, every=0.0, stream=stream)
    for step in range(5, 8):
        progress.update(step)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "grpo: 4/10, starting"
    assert lines[1] == "grpo: 5/10"
    assert lines[3] == "grpo: 7/10, 00:00 left"


def test_progress_reads_no_metric_that_it_does_not_show():
    class Unread:
        def __str__(self) -> str:
            raise AssertionError("was read")

    progress = Progress(10, "sft", every=3600.0, stream=io.StringIO())
    progress.update(1)
    progress.update(2, {"loss": Unread()})


def test_progress_on_a_terminal_is_a_bar():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with Progress(4, "sft", start=2, stream=stream) as progress:
        progress.update(3, {"loss": 0.5})
        progress.update(4, {"loss": 0.25})
    assert "4/4" in stream.getvalue()
    assert "loss 0.25" in stream.getvalue()
