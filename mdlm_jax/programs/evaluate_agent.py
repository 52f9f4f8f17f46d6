"""`evaluate --what=agent`: the policy before and after GRPO, in real games and in the dream."""

import pathlib
from collections.abc import Callable, Sequence
from functools import partial

import jax
import numpy as np
from ml_collections import ConfigDict

from mdlm_jax import check
from mdlm_jax.envs.base import Start
from mdlm_jax.metrics import interval, tables
from mdlm_jax.programs import build, collect, files, play, sft
from mdlm_jax.programs.collect import scene_of


def agent(config: ConfigDict, workdir: pathlib.Path) -> None:
    """The policy before and after GRPO, on the same test games, really and in the dream."""
    on, words = build.make_mesh(config), build.load_tokenizer(workdir)
    with check.user_errors():
        known = collect.starts_of(sft.read_file(workdir / "data" / "train.jsonl"))
    policies = {"before": workdir / "policy" / "params", "after": workdir / "grpo" / "params"}
    makers = {"before": "sft --what=policy", "after": "grpo"}
    model = build.policy_model(config, words.vocab_size)
    params = {
        name: build.load_params(folder, model, on, made_by=f"python -m mdlm_jax {makers[name]}")
        for name, folder in policies.items()
    }
    measure = partial(interval.measure, resamples=config.evaluate.bootstrap, seed=config.seed)
    temperature = config.evaluate.temperature
    dream = play.Dream(
        config, workdir, words, on,
        tasks=config.evaluate.rows, group=1, turns=config.env.turns, temperature=temperature,
    )  # fmt: skip
    games, replays, result = [], [], {}
    with jax.set_mesh(on), play.Stage(config, words, on, temperature=temperature) as stage:
        starts = stage.panel("test", config.evaluate.games, known=known)
        expert = stage.replay(starts, [start.gold for start in starts])
        for name in policies:
            real = stage.play(params[name], starts, name=f"real games, {name}")
            imagined = dreamed(dream, params[name], starts)
            actions = [[turn["action"] for turn in episode["turns"]] for episode in imagined]
            checked = stage.replay(starts, actions)
            result[name] = summary(measure, real, imagined, checked)
            games += [game_line(name, "real", s, e) for s, e in zip(starts, real, strict=True)]
            games += [game_line(name, "dream", s, e) for s, e in zip(starts, imagined, strict=True)]
            replays += [
                replay_line(name, *both) for both in zip(starts, imagined, checked, strict=True)
            ]
    wins = {
        name: [g["success"] for g in games if g["policy"] == name and g["where"] == "real"]
        for name in policies
    }
    gain, low, high = interval.paired_difference(
        np.array(wins["before"], float), np.array(wins["after"], float),
        resamples=config.evaluate.bootstrap, seed=config.seed,
    )  # fmt: skip
    settings = {
        "games": len(starts),
        "fold": "test",
        "temperature": temperature,
        "turns": config.env.turns,
        "world": config.world.kind,
    }
    files.write_lines(workdir / "evaluate" / "agent_games.jsonl", games)
    files.write_lines(workdir / "evaluate" / "agent_replay.jsonl", replays)
    files.write_json(
        workdir / "evaluate" / "agent.json",
        {
            "settings": settings,
            "policies": result,
            "difference": {"value": gain, "interval": [low, high]},
            "expert_success": measure([e["success"] for e in expert]),
        },
    )
    print(agent_table(result))


def dreamed(dream: play.Dream, params: dict, starts: Sequence[Start]) -> list[dict]:
    """One imagined episode per game, as text."""
    config, episodes = dream.config, []
    for first in range(0, len(starts), dream.rows):
        part = starts[first : first + dream.rows]
        scenes = [scene_of(start) for start in part]
        scenes += scenes[-1:] * (dream.rows - len(scenes))
        key = jax.random.fold_in(jax.random.key(config.seed), first)
        played = jax.device_get(dream(params, scenes, key))
        episodes += [play.episode(dream.words, played, row) for row in range(len(part))]
    return episodes


def summary(measure: Callable, real: list[dict], dream: list[dict], checked: list[dict]) -> dict:
    """One policy's numbers. `checked`: the dreamed actions replayed in the real games."""
    same = [
        told["observation"] == true["observation"] and told["status"] == true["status"]
        for d, c in zip(dream, checked, strict=True)
        for told, true in zip(d["turns"], c["turns"], strict=False)
    ]
    actions = [turn for episode in real for turn in episode["turns"]]
    return {
        "real_success": measure([e["success"] for e in real]),
        "dream_success": measure([e["success"] for e in dream]),
        "replayed_success": measure([e["success"] for e in checked]),
        "turn_agreement": float(np.mean(same)) if same else 0.0,
        "dream_invalid": float(np.mean([e["invalid"] for e in dream])),
        "real_turns": float(np.mean([len(e["turns"]) for e in real])),
        "real_valid_action_ratio": float(np.mean([turn["valid"] for turn in actions])),
        "games": len(real),
    }


def game_line(policy: str, where: str, start: Start, episode: dict) -> dict:
    """One episode for agent_games.jsonl."""
    turns = [{k: t[k] for k in ("action", "observation", "status")} for t in episode["turns"]]
    return game_id(start) | {
        "policy": policy,
        "where": where,
        "success": bool(episode["success"]),
        "turns": turns,
    }


def replay_line(policy: str, start: Start, dream: dict, checked: dict) -> dict:
    """One dreamed episode with the real answers to the same actions beside the imagined ones."""
    turns = [
        {
            "action": told["action"],
            "imagined": told["observation"],
            "imagined_status": told["status"],
            "real": true["observation"],
            "real_status": true["status"],
        }
        for told, true in zip(dream["turns"], checked["turns"], strict=False)
    ]
    return game_id(start) | {"policy": policy, "turns": turns}


def game_id(start: Start) -> dict:
    """Names one game."""
    task = start.task
    return {"game": f"{task.game}:{task.params}", "fold": task.fold, "seed": task.seed}


def agent_table(result: dict) -> str:
    """Before and after, real and dreamed."""
    header = ("success on held-out games", *result)
    names = {
        "real_success": "real games",
        "dream_success": "inside the world model",
        "replayed_success": "dreamed actions, replayed for real",
    }
    shown = lambda score: f"{tables.percent(score['value'])} {tables.brackets(score['interval'])}"  # noqa: E731
    rows = tuple((label, *(shown(r[key]) for r in result.values())) for key, label in names.items())
    return tables.as_text(tables.Table(header, rows))
