"""Episodes as records, and the only place where a prompt's template is written.

A trajectory file is JSONL, one episode a line. Keys, all required:

    format       int, 1
    env          str, the environment's name
    game params  str, the game and its parameters in the engine's words
    fold         str, "train", "dev" or "test"
    seed         int; (env, game, params, fold, seed) restarts the same game
    kind         str, "mixture" (gold, random valid and invalid actions) or "expert" (gold only)
    scene        object: what both sides may read at the start
        instruction  str, the task
        state        str, hidden from the agent: every room and what is in it
        goal         str, hidden from the agent: what solves the task
        actions      list of str, the action grammar
        rules        str, domain rules
        directives   str, steering directives; may be empty
        observation  str, the first observation
    turns        list of objects, in order
        action       str
        observation  str, the environment's answer
        status       str, "playing", "solved" or "failed"
        score        number, the engine's score after the action
        source       str, who chose the action: "gold", "valid", "invalid", "policy" or "unknown"
    success      bool, the last status is "solved"
    score        number, the last score (0 without turns)

`to_messages` writes one turn as the paper's record, `{"messages": [system, user, assistant]}`:
system is the world prompt, user the chat so far as JSON and the action, assistant the observation
and a trailing status line. `from_messages` reads such records back (the source of an action is not
part of them: "unknown").
"""

import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

FORMAT = 1
KINDS = ("mixture", "expert")
STATUSES = ("playing", "solved", "failed")
SOURCES = ("gold", "valid", "invalid", "policy", "unknown")

# The paper's sections, in its order. Short: every token of it is in every training row.
_WORLD = """## ENVIRONMENT STATE
{state}
## TASK CONTEXT
{instruction} Solved by: {goal}
## TOOL SCHEMAS
{actions}
## DOMAIN RULES
{rules}
## STEERING DIRECTIVES
{directives}
PREDICTION TARGET: the next observation and its status."""
_POLICY = "{instruction} Actions: {actions}\n{observation}"
_USER = "State: {chat}\n\nAction: {action}"
_ANSWER = "{observation}\n[status: {status}, score: {score}]"


@dataclasses.dataclass(frozen=True)
class Scene:
    """The start of an episode, for both prompts."""

    instruction: str
    state: str
    goal: str
    actions: tuple[str, ...]
    rules: str
    directives: str
    observation: str


@dataclasses.dataclass(frozen=True)
class Turn:
    """One action and the environment's answer."""

    action: str
    observation: str
    status: str  # one of STATUSES
    score: float
    source: str  # one of SOURCES


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """One episode; see the module's docstring for each field."""

    env: str
    game: str
    params: str
    fold: str
    seed: int
    kind: str  # one of KINDS
    scene: Scene
    turns: tuple[Turn, ...]
    success: bool
    score: float
    format: int = FORMAT


def before(trajectory: Trajectory, turn: int) -> Trajectory:
    """The episode as it stood before turn number `turn` (from 0)."""
    past = trajectory.turns[:turn]
    score = past[-1].score if past else 0.0
    return dataclasses.replace(trajectory, turns=past, success=False, score=score)


# ---------------------------------------------------------------- prompts


def world_prompt(scene: Scene) -> str:
    """What the world model reads first: the hidden state, the task and the rules."""
    fields = dataclasses.asdict(scene) | {"actions": "; ".join(scene.actions)}
    return _WORLD.format_map(fields)


def policy_prompt(scene: Scene) -> str:
    """What the agent reads first: never the state or the goal."""
    fields = {"instruction": scene.instruction, "observation": scene.observation}
    return _POLICY.format_map(fields | {"actions": "; ".join(scene.actions)})


# ---------------------------------------------------------------- files


def to_line(trajectory: Trajectory) -> str:
    """One line of a trajectory file, line end included."""
    return json.dumps(dataclasses.asdict(trajectory), ensure_ascii=False) + "\n"


def from_line(line: str) -> Trajectory:
    """Reads one line. Raises ValueError naming the key that is missing or wrong."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"no whole JSON object ({error})") from error
    fields = _checked(Trajectory, record, "")
    scene = _checked(Scene, fields["scene"], "scene.")
    scene["actions"] = tuple(_typed(str, a, "scene.actions[]") for a in scene["actions"])
    turns = tuple(_turn(turn, f"turns[{i}].") for i, turn in enumerate(fields["turns"]))
    _one_of(fields, "kind", KINDS, "")
    _one_of(fields, "format", (FORMAT,), "")
    return Trajectory(**fields | {"scene": Scene(**scene), "turns": turns})


def write_jsonl(path: pathlib.Path, trajectories: Iterable[Trajectory]) -> None:
    """Writes the whole file or nothing: a temporary file takes its name at the end."""
    _write_lines(path, (to_line(trajectory) for trajectory in trajectories))


def read_jsonl(path: pathlib.Path) -> list[Trajectory]:
    """All episodes of a file. Raises ValueError naming file, line and key of the first fault."""
    return list(_read_lines(path, from_line))


def repair(path: pathlib.Path) -> int:
    """Cuts a torn last line off a file that was being appended to; returns the lines it keeps."""
    with path.open("rb+") as file:
        data = file.read()
        whole = data.rfind(b"\n") + 1
        file.truncate(whole)
    return data.count(b"\n")


def _write_lines(path: pathlib.Path, lines: Iterable[str]) -> None:
    path = pathlib.Path(path)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(lines)
    os.replace(temporary, path)


def _read_lines(path: pathlib.Path, parse: Any) -> Iterator[Any]:
    with pathlib.Path(path).open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                yield parse(raw.decode("utf-8"))
            except ValueError as error:
                raise ValueError(
                    f"{path}, line {number}: {error}; delete the line or write the file again"
                ) from error


_JSON_TYPES = {"str": str, "int": int, "bool": bool, "float": (int, float), "Scene": dict}


def _checked(kind: type, record: Any, where: str) -> dict[str, Any]:
    """The fields of dataclass `kind` from `record`: all there, each of its type, no others."""
    _typed(dict, record, where.rstrip(".") or "record")
    fields = {}
    for field in dataclasses.fields(kind):
        if field.name not in record:
            raise ValueError(f"key {where + field.name!r} is missing")
        name = getattr(field.type, "__name__", "")
        expected = _JSON_TYPES.get(name, list)
        fields[field.name] = _typed(expected, record[field.name], where + field.name)
    return fields


def _typed(expected: Any, value: Any, key: str) -> Any:
    right = isinstance(value, expected) and (expected is bool or not isinstance(value, bool))
    if not right:
        names = expected if isinstance(expected, tuple) else (expected,)
        wanted = " or ".join(kind.__name__ for kind in names)
        raise ValueError(f"key {key!r} must be {wanted}, found {type(value).__name__}")
    return value


def _turn(record: Any, where: str) -> Turn:
    fields = _checked(Turn, record, where)
    _one_of(fields, "status", STATUSES, where)
    _one_of(fields, "source", SOURCES, where)
    return Turn(**fields)


def _one_of(fields: dict[str, Any], key: str, allowed: Sequence[Any], where: str) -> None:
    if fields[key] not in allowed:
        choices = ", ".join(map(repr, allowed))
        raise ValueError(f"key {where + key!r} is {fields[key]!r}; allowed: {choices}")


# ---------------------------------------------------------------- the paper's message records


def to_messages(trajectory: Trajectory, turn: int) -> dict[str, list[dict[str, str]]]:
    """Turn number `turn` (from 0) as the paper's three-message record."""
    chat = [_message("user", trajectory.scene.observation)]
    for past in trajectory.turns[:turn]:
        chat += [_message("assistant", past.action), _message("user", _answer(past))]
    now = trajectory.turns[turn]
    user = _USER.format(chat=json.dumps(chat, ensure_ascii=False), action=now.action)
    system = world_prompt(trajectory.scene)
    roles = (("system", system), ("user", user), ("assistant", _answer(now)))
    return {"messages": [_message(role, content) for role, content in roles]}


def from_messages(records: Sequence[dict[str, Any]]) -> tuple[Scene, tuple[Turn, ...]]:
    """One episode from its records in order. Raises ValueError where they are not of our form."""
    if not records:
        raise ValueError("an episode needs at least one record")
    parts = [_parts(record) for record in records]
    system, chat, _, _ = parts[0]
    scene = _read_scene(system, chat[0]["content"])
    return scene, tuple(_read_turn(action, answer) for _, _, action, answer in parts)


def export_messages(path: pathlib.Path, trajectories: Iterable[Trajectory]) -> None:
    """Writes every turn of every episode as one record a line."""
    records = (to_messages(t, turn) for t in trajectories for turn in range(len(t.turns)))
    _write_lines(path, (json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def import_messages(path: pathlib.Path) -> list[tuple[Scene, tuple[Turn, ...]]]:
    """The episodes of an exported file; one begins wherever the chat holds a single message."""
    episodes: list[list[dict[str, Any]]] = []
    for record, first in _read_lines(path, _parse_record):
        if first or not episodes:
            episodes.append([])
        episodes[-1].append(record)
    return [from_messages(episode) for episode in episodes]


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _answer(turn: Turn) -> str:
    return _ANSWER.format_map(dataclasses.asdict(turn))


def _parse_record(line: str) -> tuple[dict[str, Any], bool]:
    record = json.loads(line)
    _, chat, _, answer = _parts(record)
    _read_turn("", answer)
    return record, len(chat) == 1


def _parts(record: dict[str, Any]) -> tuple[str, list[dict[str, str]], str, str]:
    """System text, chat so far, action and answer of a record."""
    messages = _checked_messages(record)
    system, user, answer = (message["content"] for message in messages)
    chat, separator, action = user.removeprefix("State: ").partition("\n\nAction: ")
    if not separator:
        raise ValueError("the user message is not 'State: [...]', an empty line, 'Action: ...'")
    return system, json.loads(chat), action, answer


def _checked_messages(record: Any) -> list[dict[str, str]]:
    messages = record.get("messages") if isinstance(record, dict) else None
    roles = [message.get("role") for message in messages] if isinstance(messages, list) else None
    if roles != ["system", "user", "assistant"]:
        raise ValueError("key 'messages' must hold system, user and assistant, in this order")
    return messages


def _pattern(template: str) -> re.Pattern[str]:
    """A template turned round: matches its own output and gives the fields back."""
    escaped = re.sub(r"\\{(\w+)\\}", r"(?P<\1>.*?)", re.escape(template))
    return re.compile(escaped, re.DOTALL)


def _read_scene(system: str, observation: str) -> Scene:
    match = _pattern(_WORLD).fullmatch(system)
    if match is None:
        raise ValueError("the system message lacks a section of the world prompt")
    fields = match.groupdict()
    actions = tuple(fields.pop("actions").split("; "))
    return Scene(**fields, actions=actions, observation=observation)


def _read_turn(action: str, answer: str) -> Turn:
    match = re.fullmatch(r"(.*)\n\[status: (\w+), score: (\S+)\]", answer, re.DOTALL)
    if match is None or match[2] not in STATUSES:
        raise ValueError(f"the answer ends without a status line: {answer[-60:]!r}")
    return Turn(action, match[1], match[2], float(match[3]), "unknown")
