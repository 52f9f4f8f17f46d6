"""What a run tells: numbers to a file (and TensorBoard), one progress line to whoever watches."""

import json
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np
from tqdm import tqdm


class MetricsLog:
    """`metrics.jsonl` in a folder: one JSON object per line, each with its "step".

    Nothing in a line depends on when it was written, so a run that was killed and resumed leaves
    the same file as one that was not (if the caller logs no times). Only process 0 writes.

    Args:
        folder: made if it is not there.
        tensorboard: also write TensorBoard events there; needs tensorboardX.
    """

    def __init__(self, folder: str | Path, *, tensorboard: bool = False):
        self.path = Path(folder) / "metrics.jsonl"
        self._writes = jax.process_index() == 0
        self._board = None
        if self._writes:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if tensorboard:
                self._board = _open_board(self.path.parent)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Appends one line and flushes it. Values: numbers, arrays of one number, strings, lists.

        NaN and infinities become null, so that every line is JSON.
        """
        if not self._writes:
            return
        line = {"step": int(step)} | {name: _plain(value) for name, value in metrics.items()}
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
        if self._board is not None:
            for name, value in line.items():
                if name != "step" and isinstance(value, int | float):
                    self._board.add_scalar(name, value, line["step"])
            self._board.flush()

    def truncate(self, after_step: int) -> None:
        """Drops what a killed run wrote after its checkpoint, a torn last line too.

        Args:
            after_step: the step to resume from; -1 empties the log.
        """
        if not self._writes or not self.path.exists():
            return
        kept = [line for line in _whole_lines(self.path) if json.loads(line)["step"] <= after_step]
        new = self.path.with_suffix(".tmp")
        new.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        os.replace(new, self.path)  # a kill in between leaves the old file

    def read(self) -> list[dict[str, Any]]:
        """All lines, in the order written."""
        if not self.path.exists():
            return []
        return [json.loads(line) for line in _whole_lines(self.path)]

    def best(self, name: str) -> float:
        """The lowest value of a metric so far; infinity before there is one."""
        values = [line[name] for line in self.read() if line.get(name) is not None]
        return min(values, default=math.inf)

    def close(self) -> None:
        """Ends the TensorBoard writer, if there is one."""
        if self._board is not None:
            self._board.close()


class Progress:
    """How far a loop is: a bar on a terminal, else a plain line at least every few seconds.

        with Progress(3000, "sft world", start=step) as progress:
            ...
            progress.update(step, {"loss": loss})

    Args:
        total: steps in all.
        name: what is going on.
        start: steps that an earlier process did.
        every: seconds between plain lines (as far as the loop calls `update`).
        stream: default stdout.
    """

    def __init__(
        self,
        total: int,
        name: str,
        *,
        start: int = 0,
        every: float = 5.0,
        stream: TextIO | None = None,
    ):
        self._total, self._name = total, name
        self._stream = stream or sys.stdout
        self._bar = None
        self._every = every
        if self._stream.isatty():
            self._every = 0.2
            self._bar = tqdm(
                total=total, initial=start, desc=name, file=self._stream, dynamic_ncols=True
            )
        self._begin = time.monotonic()
        self._last = self._begin
        self._first: tuple[int, float] | None = None  # step and time of the first update
        if self._bar is None:
            self._print(f"{name}: {start}/{total}, starting")

    def update(self, step: int, metrics: Mapping[str, Any] | None = None) -> None:
        """Says that `step` steps are done.

        Metrics are only read when they are about to be shown, so arrays that the device still
        computes hold nothing up in between.
        """
        now = time.monotonic()
        early = now - self._last < self._every and step < self._total
        if self._first is None:
            self._first = (step, now)  # the time before it was compilation
        elif early:
            return
        self._last = now
        shown = ", ".join(f"{key} {_number(value)}" for key, value in (metrics or {}).items())
        if self._bar is not None:
            self._bar.set_postfix_str(shown, refresh=False)
            self._bar.update(step - self._bar.n)
            return
        parts = [f"{self._name}: {step}/{self._total}", shown, self._remaining(step, now)]
        self._print(", ".join(part for part in parts if part))

    def close(self) -> None:
        """Ends the bar's line."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _remaining(self, step: int, now: float) -> str:
        first_step, first_time = self._first
        if step >= self._total:
            return f"took {tqdm.format_interval(now - self._begin)}"
        if step == first_step:
            return ""
        seconds = (now - first_time) / (step - first_step) * (self._total - step)
        return f"{tqdm.format_interval(seconds)} left"

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


def _whole_lines(path: Path) -> list[str]:
    """The lines of a file that end; one that a kill cut short does not."""
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def _plain(value: Any) -> Any:
    """A JSON value: arrays of one number become that number, NaN and infinities null."""
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        value = np.asarray(value).tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _number(value: Any) -> str:
    value = _plain(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _open_board(folder: Path) -> Any:
    try:
        from tensorboardX import SummaryWriter  # an extra: only those who ask for it need it
    except ImportError as error:
        raise ImportError(
            "TensorBoard events were asked for: pip install tensorboardX, or turn them off"
        ) from error
    return SummaryWriter(str(folder))
