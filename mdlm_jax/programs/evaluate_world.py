"""`evaluate --what=world`: next observations of every trained world on held-out games."""

import pathlib
import time
from collections.abc import Callable, Sequence, Set
from functools import partial

import jax
import numpy as np
from ml_collections import ConfigDict

from mdlm_jax import check
from mdlm_jax.metrics import interval, tables, text
from mdlm_jax.programs import build, collect, files, play, sft
from mdlm_jax.structs import Generation
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


def world(config: ConfigDict, workdir: pathlib.Path) -> None:
    """Next-observation metrics of every trained world on the same held-out samples."""
    on, words = build.make_mesh(config), build.load_tokenizer(workdir)
    with check.user_errors():
        train, test = (sft.read_file(workdir / "data" / f"{n}.jsonl") for n in ("train", "test"))
    samples = test_samples(config, test, known=collect.starts_of(train))
    names = [name for name in systems_of(config) if trained(workdir, name)]
    if not names:
        raise check.UserError(
            f"no world model in {workdir}; `python -m mdlm_jax sft --what=world` makes one"
        )
    ask = partial(answer_all, workdir=workdir, samples=samples, words=words, on=on)
    systems, lines = {}, []
    for name in names:
        answers, seconds = ask(system_config(config, name), name)
        systems[name] = scores(config, samples, answers) | {"seconds": seconds}
        lines += [
            sample_line(name, *pair, words, config) for pair in zip(samples, answers, strict=True)
        ]
    settings = {"samples": len(samples), "fold": "test", **decoding(config)}
    files.write_lines(workdir / "evaluate" / "world_samples.jsonl", lines)
    files.write_json(
        workdir / "evaluate" / "world.json", {"settings": settings, "systems": systems}
    )
    print(world_table(systems))


def systems_of(config: ConfigDict) -> list[str]:
    """The systems that differ: a stream has no strategy to change."""
    one_strategy = config.world.objective == "wedlm"
    return [name for name, (_, strategy) in SYSTEMS.items() if not (one_strategy and strategy)]


def trained(workdir: pathlib.Path, name: str) -> bool:
    """Whether the system's world is there."""
    return (workdir / f"world_{SYSTEMS[name][0]}").exists()


def decoding(config: ConfigDict) -> dict:
    """How the diffusion world writes, as the report prints it."""
    names = ("strategy", "threshold", "block_length", "denoising_steps")
    plan = {name: config.world[name] for name in names}
    if config.world.objective == "wedlm":
        plan = {"objective": "wedlm", **config.world.stream.to_dict()}
    return plan | {"temperature": config.world.temperature}


def system_config(config: ConfigDict, name: str) -> ConfigDict:
    """The config with the system's kind and strategy."""
    kind, strategy = SYSTEMS[name]
    changed = config.copy_and_resolve_references()
    changed.world.kind = kind
    changed.world.strategy = strategy or config.world.strategy
    return changed


def test_samples(
    config: ConfigDict, records: Sequence[tj.Trajectory], *, known: Set[tuple[str, str]]
) -> list[tuple]:
    """(episode, turn number) pairs of games that are not `known`, in an order the seed fixes."""
    new = [record for record in records if collect.start_of(record.scene) not in known]
    if not new:
        raise check.UserError(play.NOTHING_NEW.format(fold="test"))
    pairs = [(record, turn) for record in new for turn in range(len(record.turns))]
    order = np.random.default_rng(config.seed).permutation(len(pairs))
    return [pairs[i] for i in order[: config.evaluate.world_samples]]


def history_ids(
    words: Tokenizer, record: tj.Trajectory, turn: int, *, block_length: int, slot: int
) -> list[int]:
    """All that the world has read before it answers this turn, as it was trained to see it."""
    past = tj.before(record, turn)
    episode = batches.world_episode(words, past, block_length=block_length, slot=slot)
    action = batches.action_ids(words, record.turns[turn].action)
    return [*episode.tokens.tolist(), *batches.filled(action, slot, words.special.pad)]


def answer_all(
    config: ConfigDict,
    name: str,
    *,
    workdir: pathlib.Path,
    samples: list[tuple],
    words: Tokenizer,
    on: jax.sharding.Mesh,
) -> tuple[list[dict], float]:
    """The world's answer to every sample, and the seconds it took without compilation."""
    model = build.world_model(config, words.vocab_size)
    rows, width = config.evaluate.rows, config.world.context - config.world.max_tokens
    shape = {"block_length": model.order_length, "slot": config.world.slot}
    ids = [history_ids(words, *sample, **shape) for sample in samples]
    # What is too long to be read is answered by nothing and counts as wrong.
    ids = [row if len(row) <= width else [] for row in ids]
    params = build.load_world(workdir, config, model, on)
    answer = answer_fn(config, model, words)
    memory = build.memory(rows, size=config.world.context, model=model, on=on)
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


def answer_fn(config: ConfigDict, model: build.Model, words: Tokenizer) -> Callable:
    """(params, keys, histories, memory) -> Generation, jitted."""
    speaker = build.world_speaker(config, model, words.special)

    @jax.jit
    def answer(params, keys, histories, memory):
        context = speaker.begin(params, histories, memory, 1)
        return speaker.write(params, keys, context, histories.length > 0)[0]

    return answer


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
    games = [(record.scene.state, record.scene.goal) for record, _ in samples]
    measure = partial(
        interval.measure, resamples=config.evaluate.bootstrap, seed=config.seed, groups=games
    )
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
        "exact_match": measure(both),
        "observation_exact_match": measure(right_text),
        "status_accuracy": measure(right_status),
        "bleu1": {"value": bleu.value, "settings": bleu.settings},
        "rouge_l": measure(rouge.per_item) | {"settings": rouge.settings},
        "tokens_per_forward": tokens / max(1, count("forwards") + count("commits")),
        "tokens_per_denoise": tokens / max(1, count("forwards")),
        "samples": len(answers),
        "overlong": count("overlong"),
        "by_source": {
            s: float(np.mean([b for b, t in zip(both, truth, strict=True) if t.source == s]))
            for s in sources
        },
    }


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
