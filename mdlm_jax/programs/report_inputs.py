"""What the report reads: the files that the other programs write under a workdir."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMMANDS = {  # the whole circle, in order
    "collect": "collect {common}",
    "world diffusion": "sft --what=world {common} --config.world.kind=diffusion",
    "world autoregressive": "sft --what=world {common} --config.world.kind=autoregressive",
    "policy": "sft --what=policy {common}",
    "evaluate world": "evaluate --what=world {common}",
    "grpo": "grpo {common}",
    "evaluate agent": "evaluate --what=agent {common}",
    "report": "report {common}",
}
FILES = {  # what is read, the command that writes it, the keys of every record
    "wall.jsonl": ("collect", ("program", "what", "kind", "seconds")),
    "world_diffusion/metrics.jsonl": ("world diffusion", ("step",)),
    "world_autoregressive/metrics.jsonl": ("world autoregressive", ("step",)),
    "policy/metrics.jsonl": ("policy", ("step",)),
    "grpo/metrics.jsonl": ("grpo", ("step",)),  # step 0 has no rollout
    "evaluate/world.json": ("evaluate world", ("settings", "systems")),
    "evaluate/world_samples.jsonl": (
        "evaluate world",
        (
            *("system", "game", "seed", "turn", "action", "reference", "prediction"),
            *("status_reference", "status_prediction"),
            *("tokens", "order", "block_length", "block_offset"),
        ),
    ),
    "evaluate/agent.json": ("evaluate agent", ("settings", "policies", "difference")),
    "evaluate/agent_games.jsonl": (
        "evaluate agent",
        ("policy", "where", "game", "fold", "seed", "success"),
    ),
    "evaluate/agent_replay.jsonl": ("evaluate agent", ("policy", "game", "seed", "turns")),
}
SYSTEMS = {  # column titles of the world-model table
    "diffusion": "Diffusion",
    "diffusion_static": "Diffusion, static",
    "autoregressive": "Autoregressive",
}
POLICIES = {"before": "Before GRPO", "after": "After GRPO"}


@dataclass(frozen=True)
class Inputs:
    """Everything the report is made from."""

    world: dict
    samples: list[dict]
    agent: dict
    games: list[dict]
    replays: list[dict]
    wall: list[dict]
    curves: dict[str, list[dict]]  # "world_diffusion", "world_autoregressive", "policy", "grpo"


def read_inputs(workdir: Path) -> Inputs:
    """All of `FILES`. Raises ValueError for files that are missing, empty, torn or incomplete."""
    missing = [name for name in FILES if not (workdir / name).is_file()]
    if missing:
        lines = (f"  {name}: made by  {_command(FILES[name][0], workdir)}" for name in missing)
        raise ValueError("\n".join(["the report needs files that do not exist yet:", *lines]))
    read = {name: list(_read(workdir, name)) for name in FILES}
    for name, records in read.items():
        if not records:
            raise ValueError(f"{workdir / name} is empty; run {_command(FILES[name][0], workdir)}")
    inputs = Inputs(
        world=read["evaluate/world.json"][0],
        samples=read["evaluate/world_samples.jsonl"],
        agent=read["evaluate/agent.json"][0],
        games=read["evaluate/agent_games.jsonl"],
        replays=read["evaluate/agent_replay.jsonl"],
        wall=read["wall.jsonl"],
        curves={
            name.split("/")[0]: _last_of_each_step(rows)
            for name, rows in read.items()
            if name.endswith("metrics.jsonl")
        },
    )
    systems, policies = inputs.world["systems"], inputs.agent["policies"]
    _check_members(workdir, "evaluate/world.json", systems, ("diffusion", "autoregressive"))
    _check_members(workdir, "evaluate/agent.json", policies, tuple(POLICIES))
    return inputs


def _read(workdir: Path, name: str) -> Iterator[dict]:
    """The records of a JSON or JSONL file, each checked to have its keys."""
    text = (workdir / name).read_text(encoding="utf-8")
    # Only "\n" ends a record: str.splitlines would also cut at a U+2028 inside a string.
    pieces = text.removesuffix("\n").split("\n") if name.endswith(".jsonl") and text else [text]
    for number, piece in enumerate(pieces, start=1):
        place = f"{workdir / name}, line {number}"
        try:
            record = json.loads(piece)
        except json.JSONDecodeError as error:
            raise ValueError(f"{place}: not JSON ({error})") from error
        absent = [key for key in FILES[name][1] if key not in record]
        if absent:
            raise ValueError(f"{place}: no {', '.join(absent)}")
        yield record


def _check_members(workdir: Path, name: str, found: dict, wanted: tuple[str, ...]) -> None:
    absent = [key for key in wanted if key not in found]
    if absent:
        command = _command(FILES[name][0], workdir)
        raise ValueError(f"{workdir / name} has no {', '.join(absent)}; run {command}")


def _last_of_each_step(rows: list[dict]) -> list[dict]:
    """A run that was killed and resumed logs some steps twice; the later line is the one kept."""
    return [row for _, row in sorted({row["step"]: row for row in rows}.items())]


def _command(step: str, workdir: Path) -> str:
    return command_line(step, "...", str(workdir))


def command_line(step: str, config_file: str, workdir: str) -> str:
    """What a user types for one of `COMMANDS`."""
    common = f"--config={config_file} --workdir={workdir}"
    return f"python -m mdlm_jax {COMMANDS[step].format(common=common)}"
