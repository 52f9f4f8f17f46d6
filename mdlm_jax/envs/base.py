"""What every real text environment says and takes: plain, picklable values and one protocol."""

import dataclasses
from typing import Protocol

STATUSES = ("playing", "solved", "failed")
FOLDS = ("train", "dev", "test")


class EnvFailure(RuntimeError):
    """An environment or its worker died, hung or answered nonsense; names both and what to do."""


@dataclasses.dataclass(frozen=True)
class Task:
    """One game instance; the same task always starts the same game."""

    game: str
    params: str
    fold: str  # one of FOLDS
    seed: int


@dataclasses.dataclass(frozen=True)
class Start:
    """The beginning of an episode. `state` and `goal` are hidden from the agent."""

    task: Task
    instruction: str
    state: str
    goal: str
    actions: tuple[str, ...]  # the action grammar, such as "take OBJECT"
    rules: str
    observation: str
    valid: tuple[str, ...]  # sorted
    gold: tuple[str, ...]  # actions that solve the game


@dataclasses.dataclass(frozen=True)
class Step:
    """The environment's answer to one action."""

    observation: str
    status: str  # one of STATUSES
    score: float
    valid: tuple[str, ...]  # sorted


class TextEnv(Protocol):
    """One episode at a time. `distribution` is the Python package whose version fixes the text."""

    distribution: str

    def reset(self, task: Task) -> Start:
        """Starts `task`. Raises ValueError for an unknown game or parameter."""

    def step(self, action: str) -> Step:
        """Takes one action. Raises RuntimeError after the end of the episode."""

    def close(self) -> None:
        """Frees the environment; may be called twice."""


def clean(text: str) -> str:
    """An engine's text on one line: every run of white space becomes one space."""
    return " ".join(text.split())


def parse_game(text: str) -> tuple[str, str]:
    """Splits "name:parameters" (or "name") as written in a config into its two parts."""
    name, _, params = text.partition(":")
    if not name.strip():
        raise ValueError(f"game {text!r} has no name; write 'name' or 'name:parameter=value,...'")
    return name.strip(), params.strip()
