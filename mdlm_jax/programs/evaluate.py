"""Evaluation on the held-out test fold: the world model's answers, and the agent in the real games.

`--what=world` gives every trained world the same (state, history, action) and compares its next
observation with the real one. `--what=agent` lets the policy before and after GRPO play the same real
games, and the same games inside the world model, so that a gap between dream and reality shows.
"""

import json
import pathlib
import time
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np
from ml_collections import ConfigDict

from mdlm_jax import check
from mdlm_jax.metrics import interval, tables, text
from mdlm_jax.programs import build, play, sft
from mdlm_jax.rl import rollout
from mdlm_jax.structs import Generation, Tasks
from mdlm_jax.tokens import batches
from mdlm_jax.tokens import trajectory as tj
from mdlm_jax.tokens.tokenizer import Tokenizer
from mdlm_jax.train import logging

# Systems of the world table: name -> (world kind, strategy or None for the config's own).
SYSTEMS = {
    "diffusion": ("diffusion", None),
    "diffusion_static": ("diffusion", "low_confidence_static"),
    "autoregressive": ("autoregressive", None),
}


def run(config: ConfigDict, workdir: pathlib.Path, what: str) -> None:
    """Evaluates the worlds or the agent; writes workdir/evaluate/."""
    (workdir / "evaluate").mkdir(parents=True, exist_ok=True)
    {"world": world, "agent": agent}[what](config, workdir)


# ---- the world ---------------------------------------------------------------------------------------


def world(config: ConfigDict, workdir: pathlib.Path) -> None:
    """Next-observation metrics of every trained world on the same held-out samples."""
    on, words = build.make_mesh(config), build.load_tokenizer(workdir)
    with check.user_errors():
        samples = test_samples(config, sft.read_file(workdir / "data" / "test.jsonl"))
    names = [name for name, (kind, _) in SYSTEMS.items() if (workdir / f"world_{kind}").exists()]
    if not names:
        raise check.UserError(
            f"no world model in {workdir}; `python -m mdlm_jax sft --what=world` makes one"
        )
    systems, lines = {}, []
    for name in names:
        answers, seconds = answer_all(
            system_config(config, name), workdir, samples, words, on, name
        )
        systems[name] = scores(config, samples, answers) | {"seconds": seconds}
        lines += [
            sample_line(name, *pair, words, config) for pair in zip(samples, answers, strict=True)
        ]
    settings = {
        "samples": len(samples),
        "fold": "test",
        "strategy": config.world.strategy,
        "threshold": config.world.threshold,
        "block_length": config.world.block_length,
        "denoising_steps": config.world.denoising_steps,
        "temperature": config.world.temperature,
    }
    write_lines(workdir / "evaluate" / "world_samples.jsonl", lines)
    write_json(workdir / "evaluate" / "world.json", {"settings": settings, "systems": systems})
    print(world_table(systems))


def system_config(config: ConfigDict, name: str) -> ConfigDict:
    """The config with the system's kind and strategy."""
    kind, strategy = SYSTEMS[name]
    changed = config.copy_and_resolve_references()
    changed.world.kind = kind
    changed.world.strategy = strategy or config.world.strategy
    return changed


def test_samples(config: ConfigDict, records: Sequence[tj.Trajectory]) -> list[tuple]:
    """(episode, turn number) pairs in a random order that the seed fixes."""
    pairs = [(record, turn) for record in records for turn in range(len(record.turns))]
    order = np.random.default_rng(config.seed).permutation(len(pairs))
    return [pairs[i] for i in order[: config.evaluate.world_samples]]


def history_ids(
    words: Tokenizer, record: tj.Trajectory, turn: int, *, block_length: int, slot: int
) -> list[int]:
    """All that the world has read before it answers this turn, exactly as it was trained to see it."""
    past = tj.before(record, turn)
    episode = batches.world_episode(words, past, block_length=block_length, slot=slot)
    action = batches.action_ids(words, record.turns[turn].action)
    return [*episode.tokens.tolist(), *batches.filled(action, slot, words.special.pad)]


def answer_all(config, workdir, samples, words, on, name) -> tuple[list[dict], float]:
    """The world's answer to every sample, and the seconds it took without compilation."""
    model = build.world_model(config, words.vocab_size)
    params = build.load_params(
        workdir / sft.name_of(config, "world") / "params", model, on,
        made_by="python -m mdlm_jax sft --what=world",
    )  # fmt: skip
    speaker = build.world_speaker(config, model, words.special)
    rows, width = config.evaluate.rows, config.world.context - config.world.max_tokens
    memory = build.memory(rows, size=config.world.context, model=model, on=on)

    @jax.jit
    def answer(params, keys, prompts, memory):
        context = speaker.begin(params, prompts, memory, 1)
        return speaker.write(params, keys, context, prompts.length > 0)[0]

    shape = {"block_length": model.order_length, "slot": config.world.slot}
    ids = [history_ids(words, *sample, **shape) for sample in samples]
    # What is too long to be read is answered by nothing and counts as wrong.
    ids = [row if len(row) <= width else [] for row in ids]
    answers, seconds = [], 0.0
    with jax.set_mesh(on), logging.Progress(len(ids), f"evaluate {name}") as progress:
        for start in range(0, len(ids), rows):
            part = ids[start : start + rows]
            padded = part + [[]] * (rows - len(part))
            keys = build.row_keys(jax.random.fold_in(jax.random.key(config.seed), start), rows, on)
            prompts = build.messages(padded, on, width=width)
            begun = time.perf_counter()
            generation = jax.device_get(answer(params, keys, prompts, memory))
            seconds += time.perf_counter() - begun if start else 0.0
            answers += [read_answer(words, generation, i, part[i]) for i in range(len(part))]
            progress.update(start + len(part))
    return answers, seconds


def read_answer(words: Tokenizer, generation: Generation, row: int, prompt: list[int]) -> dict:
    """One row of a generation as text, status, tokens and counts."""
    length = int(generation.length[row])
    ids = [int(i) for i in generation.tokens[row, :length]]
    told, status = play.split_status(words, ids)
    return {
        "text": told,
        "status": status,
        "ids": ids,
        "order": [int(i) for i in generation.order[row, :length]],
        "prompt_length": len(prompt),
        "overlong": not prompt,
        "forwards": int(generation.forwards[row]),
        "commits": int(generation.commits[row]),
    }


def scores(config: ConfigDict, samples: list[tuple], answers: list[dict]) -> dict:
    """Every metric of one system, with bootstrap intervals where the metric has items."""
    truth = [record.turns[turn] for record, turn in samples]
    told, real = [a["text"] for a in answers], [t.observation for t in truth]
    right_text = np.array(text.exact_match(told, real).per_item)
    right_status = np.array(
        [a["status"] == t.status for a, t in zip(answers, truth, strict=True)], float
    )
    both = right_text * right_status
    bleu, rouge = text.bleu1(told, real), text.rouge_l(told, real)
    count = lambda name: sum(a[name] for a in answers)  # noqa: E731
    tokens = sum(len(a["ids"]) for a in answers)
    sources = sorted({t.source for t in truth})
    return {
        "exact_match": with_interval(config, both),
        "observation_exact_match": with_interval(config, right_text),
        "status_accuracy": with_interval(config, right_status),
        "bleu1": {"value": bleu.value, "settings": bleu.settings},
        "rouge_l": with_interval(config, rouge.per_item) | {"settings": rouge.settings},
        "tokens_per_forward": tokens / max(1, count("forwards") + count("commits")),
        "tokens_per_denoise": tokens / max(1, count("forwards")),
        "samples": len(answers),
        "overlong": count("overlong"),
        "by_source": {
            s: float(np.mean([b for b, t in zip(both, truth, strict=True) if t.source == s]))
            for s in sources
        },
    }


def with_interval(config: ConfigDict, values: Iterable[float]) -> dict:
    """Mean and bootstrap interval."""
    values = np.asarray(values, float)
    low, high = interval.bootstrap(values, resamples=config.evaluate.bootstrap, seed=config.seed)
    return {"value": float(values.mean()), "interval": [low, high]}


def sample_line(
    name: str, sample: tuple, answer: dict, words: Tokenizer, config: ConfigDict
) -> dict:
    """One sample with both texts, and the order in which its tokens were unmasked."""
    record, turn = sample
    block = config.world.block_length if SYSTEMS[name][0] == "diffusion" else 1
    return {
        "system": name,
        "game": f"{record.game}:{record.params}",
        "fold": record.fold,
        "seed": record.seed,
        "turn": turn,
        "action": record.turns[turn].action,
        "reference": record.turns[turn].observation,
        "prediction": answer["text"],
        "status_reference": record.turns[turn].status,
        "status_prediction": answer["status"],
        "tokens": [words.piece(i) for i in answer["ids"]],
        "order": answer["order"],
        "block_length": block,
        "block_offset": answer["prompt_length"] % block,
    }


def world_table(systems: dict) -> str:
    """The systems side by side."""
    header = ("next observation, test fold", *systems)
    percent = lambda key: [tables.percent(s[key]["value"]) for s in systems.values()]  # noqa: E731
    number = lambda get: [f"{get(s):.2f}" for s in systems.values()]  # noqa: E731
    rows = (
        ("exact match", *percent("exact_match")),
        ("  observation only", *percent("observation_exact_match")),
        ("  status only", *percent("status_accuracy")),
        ("BLEU-1", *number(lambda s: s["bleu1"]["value"])),
        ("ROUGE-L", *number(lambda s: s["rouge_l"]["value"])),
        ("tokens per forward", *number(lambda s: s["tokens_per_forward"])),
    )
    return tables.as_text(tables.Table(header, rows))


# ---- the agent ---------------------------------------------------------------------------------------


def agent(config: ConfigDict, workdir: pathlib.Path) -> None:
    """The policy before and after GRPO, on the same test games, really and in the dream."""
    on, words = build.make_mesh(config), build.load_tokenizer(workdir)
    policies = {"before": workdir / "policy" / "params", "after": workdir / "grpo" / "params"}
    makers = {"before": "sft --what=policy", "after": "grpo"}
    model = build.policy_model(config, words.vocab_size)
    params = {
        name: build.load_params(folder, model, on, made_by=f"python -m mdlm_jax {makers[name]}")
        for name, folder in policies.items()
    }
    dream = Dream(config, workdir, words, on, temperature=config.evaluate.temperature)
    games, replays, result = [], [], {}
    with (
        jax.set_mesh(on),
        play.Stage(config, words, on, temperature=config.evaluate.temperature) as stage,
    ):
        starts = stage.panel("test", config.evaluate.games)
        expert = stage.replay(starts, [start.gold for start in starts])
        for name in policies:
            real = stage.play(params[name], starts, name=f"real games, {name}")
            imagined = dream.play(params[name], starts)
            actions = [[turn["action"] for turn in episode["turns"]] for episode in imagined]
            checked = stage.replay(starts, actions)
            result[name] = summary(config, real, imagined, checked)
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
        "temperature": config.evaluate.temperature,
        "turns": config.env.turns,
        "world": config.world.kind,
    }
    write_lines(workdir / "evaluate" / "agent_games.jsonl", games)
    write_lines(workdir / "evaluate" / "agent_replay.jsonl", replays)
    write_json(
        workdir / "evaluate" / "agent.json",
        {
            "settings": settings,
            "policies": result,
            "difference": {"value": gain, "interval": [low, high]},
            "expert_success": with_interval(config, [e["success"] for e in expert]),
        },
    )
    print(agent_table(result))


class Dream:
    """Plays given games inside the trained world model."""

    def __init__(self, config, workdir, words: Tokenizer, on, *, temperature: float):
        self.config, self.words, self.on, self.rows = config, words, on, config.evaluate.rows
        policy = build.policy_model(config, words.vocab_size)
        world = build.world_model(config, words.vocab_size)
        self.world_params = build.load_params(
            workdir / sft.name_of(config, "world") / "params", world, on,
            made_by="python -m mdlm_jax sft --what=world",
        )  # fmt: skip
        self.loop = build.play_fn(
            config, policy, world, words.special,
            group=1, turns=config.env.turns, temperature=temperature,
        )  # fmt: skip
        self.memory = rollout.Memory(
            policy=build.memory(self.rows, size=config.policy.context, model=policy, on=on),
            world=build.memory(self.rows, size=config.world.context, model=world, on=on),
        )

    def play(self, policy_params: dict, starts: Sequence) -> list[dict]:
        """One episode per start: success, and the turns as text."""
        episodes = []
        for first in range(0, len(starts), self.rows):
            part = list(starts[first : first + self.rows])
            scenes = [play.scene_of(s) for s in part + [part[-1]] * (self.rows - len(part))]
            keys = build.row_keys(
                jax.random.fold_in(jax.random.key(self.config.seed), first), self.rows, self.on
            )
            tasks = play.tasks(self.config, self.words, scenes, self.on)
            played, self.memory = self.loop(
                policy_params, self.world_params, keys, tasks, self.memory
            )
            played = jax.device_get(played)
            episodes += [play.episode(self.words, played, row) for row in range(len(part))]
        return episodes


def summary(config: ConfigDict, real: list[dict], dream: list[dict], checked: list[dict]) -> dict:
    """One policy's numbers. `checked`: the dreamed actions replayed in the real games."""
    same = [
        told["observation"] == true["observation"] and told["status"] == true["status"]
        for d, c in zip(dream, checked, strict=True)
        for told, true in zip(d["turns"], c["turns"], strict=False)
    ]
    actions = [turn for episode in real for turn in episode["turns"]]
    return {
        "real_success": with_interval(config, [e["success"] for e in real]),
        "dream_success": with_interval(config, [e["success"] for e in dream]),
        "replayed_success": with_interval(config, [e["success"] for e in checked]),
        "turn_agreement": float(np.mean(same)) if same else 0.0,
        "dream_invalid": float(np.mean([e["invalid"] for e in dream])),
        "real_turns": float(np.mean([len(e["turns"]) for e in real])),
        "real_valid_action_ratio": float(np.mean([turn["valid"] for turn in actions])),
        "games": len(real),
    }


def game_line(policy: str, where: str, start, episode: dict) -> dict:
    """One episode for agent_games.jsonl."""
    turns = [{k: t[k] for k in ("action", "observation", "status")} for t in episode["turns"]]
    return game_id(start) | {
        "policy": policy,
        "where": where,
        "success": bool(episode["success"]),
        "turns": turns,
    }


def replay_line(policy: str, start, dream: dict, checked: dict) -> dict:
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


def game_id(start) -> dict:
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


# ---- files -------------------------------------------------------------------------------------------


def write_json(path: pathlib.Path, value: dict) -> None:
    """Writes the whole file or nothing."""
    _replace(path, json.dumps(value, indent=1) + "\n")


def write_lines(path: pathlib.Path, values: Iterable[dict]) -> None:
    """Writes a JSON object per line, all or nothing."""
    _replace(path, "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values))


def _replace(path: pathlib.Path, content: str) -> None:
    partial_path = path.with_name(path.name + ".partial")
    partial_path.write_text(content, encoding="utf-8")
    partial_path.replace(path)
