"""Supervised training: the world model (diffusion or autoregressive) or the policy's warm start.

Diffusion follows SDAR's supervised fine-tuning (one masking rate per episode, 1/p weights, clean
and noisy halves), from scratch, with the noisy half cut down to the blocks that hold an
observation; `world.objective` chooses another one. The autoregressive world and the policy are
trained by next-token prediction of their own turns.
"""

import pathlib
import time
from collections.abc import Callable, Iterator
from functools import partial

import jax
import numpy as np
from ml_collections import ConfigDict

from mdlm_jax import check, ops
from mdlm_jax.envs.base import FOLDS
from mdlm_jax.programs import build, files, objectives
from mdlm_jax.structs import Mean, TokenBatch, TrainState
from mdlm_jax.tokens import batches, tokenizer
from mdlm_jax.tokens import trajectory as tj
from mdlm_jax.train import augment, checkpoint, logging, mesh, state

DEV_BATCHES = 4  # the dev loss is a mean over this many fixed batches
# Trajectory files to train on, and to measure the dev loss on.
SOURCES = {"world": ("train", "dev"), "policy": ("expert", "dev")}
CONTENT_EPISODES = 1000  # enough to tell content words from grammar
PHRASE_EPISODES = 100  # enough to tell which phrases stand in most episodes


def run(config: ConfigDict, workdir: pathlib.Path, what: str) -> None:
    """Trains `what` ("world" or "policy"), from the last checkpoint on."""
    on, plan, name = build.make_mesh(config), config.sft[what], name_of(config, what)
    check_rows(plan.rows, on)
    records = read_records(workdir, what)
    with check.user_errors():
        saved = checkpoint.Checkpoints(
            workdir / name / "checkpoints", fingerprint(config, workdir, what)
        )
    with saved, jax.set_mesh(on):
        if saved.latest() == plan.steps:
            print(f"sft {name}: {plan.steps} steps are done already")
        else:
            train(config, workdir, what, records, saved, on)


def train(
    config: ConfigDict,
    workdir: pathlib.Path,
    what: str,
    records: dict[str, list[tj.Trajectory]],
    saved: checkpoint.Checkpoints,
    on: jax.sharding.Mesh,
) -> None:
    """Puts batches, losses and optimiser together, and runs the loop."""
    plan, words = config.sft[what], the_tokenizer(config, workdir, records)
    model, loss_fn_of, encode = recipe(config, what, words)
    train_rows, dev_rows = (
        pack(records[source], encode, plan, model, name=name)
        for name, source in zip(("train", "dev"), SOURCES[what], strict=True)
    )
    with check.user_errors():
        train_batches = batches.Batches(train_rows, size=plan.rows, seed=config.seed)
        dev_batches = batches.Batches(dev_rows, size=plan.rows, seed=0)
    segments = batches.most_segments([*train_rows, *dev_rows])
    dev_fn = loss_fn_of(segments=segments)
    content_V = content_of(config, words, records)
    loss_fn = renamed(dev_fn, content_V, share=plan.rename, segments=segments)

    init_key, run_key, dev_key = jax.random.split(jax.random.key(config.seed), 3)
    curve = partial(state.warmup_cosine, steps=plan.steps, warmup=plan.warmup)
    optimizer = state.muon(
        curve(plan.learning_rate),
        adam_learning_rate=curve(plan.adam_learning_rate),
        clip_norm=plan.clip_norm,
        weight_decay=plan.weight_decay,
    )
    first = jax.jit(partial(state.create, optimizer=optimizer))(
        build.init_params(init_key, model, on)
    )
    step_fn = jax.jit(partial(state.update, loss_fn=loss_fn, optimizer=optimizer), donate_argnums=0)
    dev_loss_fn = jax.jit(lambda params, piece: dev_fn(params, piece)[0])
    dev_pieces = [
        (jax.random.fold_in(dev_key, i), place(dev_batches[i], on)) for i in range(DEV_BATCHES)
    ]

    def update(now: TrainState, step: int) -> tuple[TrainState, dict, int]:
        batch = train_batches[step]
        piece = (jax.random.fold_in(run_key, step), place(batch, on))
        now, metrics = step_fn(now, jax.tree.map(lambda x: x[None], piece))
        means = {name: ops.mean_value(mean) for name, mean in metrics.items()}
        return now, means, int(np.count_nonzero(batch.segment))

    dev_loss = partial(mean_loss, dev_loss_fn, dev_pieces)
    loop(plan, workdir / name_of(config, what), saved, first, update, dev_loss)


def loop(
    plan: ConfigDict,
    folder: pathlib.Path,
    saved: checkpoint.Checkpoints,
    first: TrainState,
    update: Callable,
    dev_loss: Callable,
) -> None:
    """Update, log, save; every step is a function of (state, step number) alone.

    The checkpoint is written last: what a kill loses is done again, and written over.
    """
    restored = saved.restore(checkpoint.abstract(first))
    start, now = restored if restored else (0, first)
    log = logging.MetricsLog(folder)
    log.truncate(start)
    progress = logging.Progress(plan.steps, f"sft {folder.name}", start=start)
    best = log.best("dev_loss")
    since, seen = time.perf_counter(), 0
    for step in range(start, plan.steps):
        now, metrics, tokens = update(now, step)
        seen += tokens
        progress.update(step + 1, metrics)
        last = step + 1 == plan.steps
        if (step + 1) % plan.eval_every and (step + 1) % plan.save_every and not last:
            continue
        row = {name: float(value) for name, value in metrics.items()}
        row |= {"tokens": seen, "tokens_per_second": seen / (time.perf_counter() - since)}
        row["dev_loss"] = dev_loss(now.params)
        if row["dev_loss"] < best:
            best = row["dev_loss"]
            checkpoint.save_params(folder / "params", now.params)
        log.write(step + 1, row)
        saved.save(step + 1, now)
        since, seen = time.perf_counter(), 0
    progress.close()


def name_of(config: ConfigDict, what: str) -> str:
    """Folder of a trained model under the workdir."""
    return build.trained_world(config) if what == "world" else "policy"


def files_of(workdir: pathlib.Path, what: str) -> dict[str, pathlib.Path]:
    """Every trajectory file that this training depends on, by name.

    The policy learns from the few expert episodes only; the text of all folds tells either side
    its words.
    """
    names = dict.fromkeys((*FOLDS, *SOURCES[what]))
    return {name: workdir / "data" / f"{name}.jsonl" for name in names}


def read_records(workdir: pathlib.Path, what: str) -> dict[str, list[tj.Trajectory]]:
    """The episodes of `files_of`. Raises UserError if a file is missing or torn."""
    with check.user_errors():
        return {name: read_file(path) for name, path in files_of(workdir, what).items()}


def read_file(path: pathlib.Path) -> list[tj.Trajectory]:
    """A trajectory file's episodes. Raises ValueError if it is missing or torn."""
    if not path.exists():
        raise ValueError(f"{path} is missing; `python -m mdlm_jax collect` makes it")
    return tj.read_jsonl(path)


def the_tokenizer(
    config: ConfigDict, workdir: pathlib.Path, records: dict[str, list[tj.Trajectory]]
) -> tokenizer.Tokenizer:
    """The run's tokenizer; the first training makes it.

    It learns words from the text of all folds, as a released model's tokenizer knows all words; a
    held-out name is then no string of letters. Models are trained on the train fold alone.
    """
    path = workdir / "tokenizer.json"
    if path.exists():
        return build.load_tokenizer(workdir)
    plan = config.tokenizer
    phrases = tokenizer.common_phrases(
        ["\n".join(world_texts(record)) for record in records["train"][:PHRASE_EPISODES]],
        share=plan.phrase_share,
        most=plan.phrases,
    )
    words = tokenizer.train(texts(records), vocab_size=plan.vocab_size, phrases=phrases)
    partial_path = path.with_suffix(".partial")
    words.save(partial_path)
    partial_path.rename(path)
    print(f"tokenizer: {words.vocab_size} tokens, {len(phrases)} of them phrases -> {path}")
    return words


def world_texts(record: tj.Trajectory) -> Iterator[str]:
    """All that the world reads and writes in an episode."""
    yield tj.world_prompt(record.scene)
    for turn in record.turns:
        yield turn.action
        yield turn.observation


def texts(records: dict[str, list[tj.Trajectory]]) -> Iterator[str]:
    """All text that either side reads or writes, in all folds."""
    for fold in FOLDS:
        for record in records[fold]:
            yield from world_texts(record)
            yield tj.policy_prompt(record.scene)


def recipe(config: ConfigDict, what: str, words: tokenizer.Tokenizer):
    """The model, its loss (waiting for the number of segments), and how an episode is written."""
    if what == "policy":
        model = build.policy_model(config, words.vocab_size)
        loss = objectives.autoregressive(model)
        return model, lambda **_: loss, partial(batches.policy_episode, words)
    model = build.world_model(config, words.vocab_size)
    loss = partial(objectives.world, config, model, words.special)
    encode = partial(
        batches.world_episode,
        words,
        block_length=model.order_length,
        slot=config.world.slot,
        end_tokens=config.sft.end_tokens,
    )
    return model, loss, encode


def pack(records, encode, plan: ConfigDict, model: build.Model, *, name: str) -> list[dict]:
    """Packed rows of the records, with a line about what was packed and what was left out."""
    episodes = [encode(record) for record in records]
    rows, dropped = batches.pack(
        episodes,
        row_length=plan.row_length,
        answer_length=plan.answer_length,
        block_length=model.order_length,
    )
    filled = sum(int(np.count_nonzero(row["segment"])) for row in rows)
    share = filled / max(1, len(rows) * plan.row_length)
    print(
        f"{name}: {len(episodes) - dropped} episodes, {filled} tokens in {len(rows)} rows "
        f"({share:.0%} full); {dropped} too long, left out"
    )
    return rows


def content_of(
    config: ConfigDict, words: tokenizer.Tokenizer, records: dict[str, list[tj.Trajectory]]
) -> np.ndarray:
    """The tokens that renaming moves, bool[V]: the same for the world, the policy and GRPO."""
    ids = {text: words.encode(text) for text in set(texts(records))}
    return augment.content_tokens(
        [
            [i for text in world_texts(record) for i in ids[text]]
            for record in records["train"][:CONTENT_EPISODES]
        ],
        known={i for spelled in ids.values() for i in spelled},
        vocab_size=words.vocab_size,
        share=config.sft.rename_below,
    )


def renamed(loss_fn: Callable, content_V: np.ndarray, *, share: float, segments: int) -> Callable:
    """The loss on episodes of which a share is renamed."""
    print(f"renaming {share:.0%} of the episodes: {content_V.sum()} content tokens")

    def loss(params: dict, piece: tuple[jax.Array, TokenBatch]):
        key, batch = piece
        rename_key, loss_key = jax.random.split(key)
        batch = augment.rename(
            rename_key, batch, content_V=content_V, share=share, segments=segments
        )
        return loss_fn(params, (loss_key, batch))

    return loss


def check_rows(rows: int, on: jax.sharding.Mesh) -> None:
    """Rows must split evenly over the mesh."""
    shards = mesh.row_shards(on)
    if rows % shards:
        raise check.UserError(f"rows={rows} does not divide by the {shards} row shards of the mesh")


def place(batch: TokenBatch, on: jax.sharding.Mesh) -> TokenBatch:
    """A host batch on the device, rows split."""
    return jax.device_put(batch, mesh.rows(on))


def mean_loss(dev_loss: Callable, pieces: list, params: dict) -> float:
    """Mean loss over fixed batches and fixed masks."""
    total = sum((dev_loss(params, piece) for piece in pieces), start=Mean(0.0, 0.0))
    return float(ops.mean_value(total))


def fingerprint(config: ConfigDict, workdir: pathlib.Path, what: str) -> dict:
    """Everything that changes the numbers of this training."""
    data = {name: files.digest(path) for name, path in files_of(workdir, what).items()}
    side = {"world": config.world, "policy": config.policy}[what].to_dict()
    if what == "world":
        side = {n: side[n] for n in ("kind", "objective", "block_length", "slot", "model")}
    else:
        side = {"model": side["model"]}
    plan = config.sft[what].to_dict()
    shared = {name: value for name, value in config.sft.items() if name not in SOURCES}
    whole = {"seed": config.seed, **shared, "data": data}
    return whole | {"tokenizer": config.tokenizer.to_dict(), what: side, "sft": plan}
