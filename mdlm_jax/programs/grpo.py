"""GRPO inside the world model.

    repeat: sample tasks -> roll out in the dream -> rewards -> group advantages -> clipped updates
    now and then: play the real dev games, and keep the parameters that do best there

The variant is TRL's GRPO (default loss "dapo", clip-higher, no reference model). Every action token
of every turn is trained, its end token included; observations never are. Rows whose world model
failed carry no signal. One jitted call rolls out, one updates; only metrics come to the host.
"""

import math
import pathlib
import time
from collections.abc import Callable, Set
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from ml_collections import ConfigDict

from mdlm_jax import check, ops
from mdlm_jax.programs import build, collect, files, play, sft
from mdlm_jax.rl import advantage, loss, reward
from mdlm_jax.structs import Mean, Rollout, TrainState
from mdlm_jax.tokens import trajectory as tj
from mdlm_jax.tokens.tokenizer import Tokenizer
from mdlm_jax.train import augment, checkpoint, logging, state

CUTS = (0.25, 0.5, 0.75, 1.0)  # shares of the policy's context that an update may be cut to


@struct.dataclass
class Piece:
    """What the update needs of a rollout's rows."""

    tokens: jax.Array  # i32[B, L]
    length: jax.Array  # i32[B]
    batch: loss.PolicyBatch


def run(config: ConfigDict, workdir: pathlib.Path) -> None:
    """Trains the warm-started policy to config.grpo.steps, from the last checkpoint on."""
    on, words = build.make_mesh(config), build.load_tokenizer(workdir)
    rows = config.rollout.tasks * config.rollout.group
    sft.check_rows(rows, on)
    records = sft.read_records(workdir, "world")
    with check.user_errors():
        saved = checkpoint.Checkpoints(
            workdir / "grpo" / "checkpoints", fingerprint(config, workdir)
        )
    with saved, jax.set_mesh(on):
        if saved.latest() == config.grpo.steps:
            print(f"grpo: {config.grpo.steps} steps are done already")
        else:
            play.check_room(config, words, distinct_scenes(records["train"]))
            train(config, workdir, words, records, saved, on)


def train(
    config: ConfigDict,
    workdir: pathlib.Path,
    words: Tokenizer,
    records: dict[str, list[tj.Trajectory]],
    saved: checkpoint.Checkpoints,
    on: jax.sharding.Mesh,
) -> None:
    """Puts policy, dream, update and real games together, and runs the loop."""
    policy = build.policy_model(config, words.vocab_size)
    optimizer = state.optimizer(
        config.grpo.learning_rate, clip_norm=config.grpo.clip_norm, weight_decay=0.0
    )
    first = build.load_params(
        workdir / "policy" / "params", policy, on, layout="train",
        made_by="python -m mdlm_jax sft --what=policy",
    )  # fmt: skip
    first = jax.jit(partial(state.create, optimizer=optimizer))(first)
    dream = play.Dream(
        config, workdir, words, on,
        tasks=config.rollout.tasks,
        group=config.rollout.group,
        turns=config.rollout.turns,
        temperature=config.policy.temperature,
    )  # fmt: skip
    to_rollout = jax.jit(lambda params: params, out_shardings=build.rollout_shardings(policy, on))
    learn_fn = jax.jit(
        partial(learn, config=config, model=policy, words=words, optimizer=optimizer),
        donate_argnums=0,
    )
    scenes, key = distinct_scenes(records["train"]), jax.random.key(config.seed)
    rename = jax.jit(
        partial(
            augment.rename_tasks,
            content_V=sft.content_of(config, words, records),
            share=config.grpo.rename,
        )
    )

    def update(now: TrainState, step: int) -> tuple[TrainState, dict]:
        play_key, rename_key = jax.random.split(jax.random.fold_in(key, step))
        played = dream(
            to_rollout(now.params),
            sample(scenes, config, step),
            play_key,
            partial(rename, rename_key),
        )
        return learn_fn(now, played)

    with play.Stage(config, words, on, temperature=config.evaluate.temperature) as stage:
        real = RealDev(stage, config.grpo.eval_games, known=collect.starts_of(records["train"]))
        loop(
            config.grpo, workdir / "grpo", saved, first, update,
            lambda params: real(to_rollout(params)),
        )  # fmt: skip


def loop(
    plan: ConfigDict,
    folder: pathlib.Path,
    saved: checkpoint.Checkpoints,
    first: TrainState,
    update: Callable,
    real: Callable,
) -> None:
    """Update, log, save; every step is a function of (state, step number) alone.

    The checkpoint is written last: what a kill loses is done again, and written over.
    """
    restored = saved.restore(checkpoint.abstract(first))
    start, now = restored if restored else (0, first)
    log = logging.MetricsLog(folder)
    log.truncate(start if restored else -1)
    if not restored:
        keep_if_best(folder, log, 0, now.params, {"eval_real_success": real(now.params)})
    with logging.Progress(plan.steps, "grpo", start=start) as progress:
        for step in range(start, plan.steps):
            begun = time.perf_counter()
            now, metrics = update(now, step)
            metrics = {name: float(value) for name, value in jax.device_get(metrics).items()}
            metrics["step_time"] = time.perf_counter() - begun
            last = step + 1 == plan.steps
            if (step + 1) % plan.eval_every == 0 or last:
                metrics["eval_real_success"] = real(now.params)
            keep_if_best(folder, log, step + 1, now.params, metrics)
            progress.update(step + 1, {k: metrics[k] for k in ("reward", "entropy", "step_time")})
            if (step + 1) % plan.save_every == 0 or last:
                saved.save(step + 1, now)


def keep_if_best(
    folder: pathlib.Path, log: logging.MetricsLog, step: int, params: dict, metrics: dict
) -> None:
    """Logs a step, and keeps its parameters if none did better on the real dev games before."""
    if "eval_real_success" in metrics:
        before = [row["eval_real_success"] for row in log.read() if "eval_real_success" in row]
        if metrics["eval_real_success"] >= max(before, default=-math.inf):
            checkpoint.save_params(folder / "params", params)
    log.write(step, metrics)


class RealDev:
    """Success of a policy on a fixed panel of real dev games."""

    def __init__(self, stage: play.Stage, games: int, *, known: Set[tuple[str, str]]):
        self.stage, self.starts = stage, stage.panel("dev", games, known=known)

    def __call__(self, params: dict) -> float:
        episodes = self.stage.play(params, self.starts, name="grpo: real dev games")
        return float(np.mean([episode["success"] for episode in episodes]))


def distinct_scenes(records: list[tj.Trajectory]) -> list[tj.Scene]:
    """Every training game once, in the order of the file."""
    return list({collect.start_of(r.scene): r.scene for r in records}.values())


def sample(scenes: list[tj.Scene], config: ConfigDict, step: int) -> list[tj.Scene]:
    """The tasks of one step: walks through a new permutation of all scenes in every epoch."""
    count = config.rollout.tasks
    places = range(step * count, (step + 1) * count)
    order = {
        epoch: np.random.default_rng((config.seed, epoch)).permutation(len(scenes))
        for epoch in {place // len(scenes) for place in places}
    }
    return [scenes[order[place // len(scenes)][place % len(scenes)]] for place in places]


def learn(
    now: TrainState,
    played: Rollout,
    *,
    config: ConfigDict,
    model: build.Model,
    words: Tokenizer,
    optimizer,
) -> tuple[TrainState, dict]:
    """Rewards -> advantages -> `num_iterations` clipped updates; metrics under TRL's names."""
    plan = config.grpo
    advantages_B, group_metrics = advantage.group_advantage(
        reward.discounted(played.reward, played.turns, discount=plan.discount),
        group=config.rollout.group,
        scale=plan.scale_rewards,
        valid_B=~played.invalid,
    )
    mask_BL = played.action_mask & ~played.invalid[:, None]
    rows = Piece(
        tokens=played.tokens,
        length=played.length,
        batch=loss.PolicyBatch(mask=mask_BL, advantages=advantages_B, old_logprobs=played.logprobs),
    )
    count = max(1, played.tokens.shape[0] // plan.micro_rows)
    by_length_B = jnp.argsort(rows.length)  # rows of one length come together, and are cut alike
    pieces = jax.tree.map(lambda x: x[by_length_B].reshape(count, -1, *x.shape[1:]), rows)
    loss_fn = cut(policy_loss(config, model, words))
    for _ in range(plan.num_iterations):
        now, metrics = state.update(now, pieces, loss_fn=loss_fn, optimizer=optimizer)
    means = {name: ops.mean_value(mean) for name, mean in metrics.items()}
    return now, means | group_metrics | rollout_metrics(played)


def cut(loss_fn: Callable) -> Callable:
    """The loss on rows cut to the shortest of a few lengths that holds them all.

    What is cut off is padding: the result is the same. Every length is compiled once.
    """

    def loss(params: dict, piece: Piece) -> tuple[Mean, dict]:
        size = piece.tokens.shape[1]
        lengths = [math.ceil(size * share) for share in CUTS]
        first = lambda n: lambda x: x[:, :n] if x.ndim > 1 else x  # noqa: E731
        cases = [lambda p, x, n=n: loss_fn(p, jax.tree.map(first(n), x)) for n in lengths]
        case = jnp.searchsorted(jnp.array(lengths), piece.length.max())
        return jax.lax.switch(case, cases, params, piece)

    return loss


def policy_loss(config: ConfigDict, model: build.Model, words: Tokenizer) -> Callable:
    """(params, Piece) -> (Mean, metrics)."""
    plan = config.grpo
    score = build.action_logprobs(model, words.special)

    def policy_loss(params: dict, piece: Piece) -> tuple[Mean, dict]:
        logprobs_BL, entropy_BL = score(
            params, piece.tokens, piece.length, config.policy.temperature
        )
        total, metrics = loss.grpo_loss(
            logprobs_BL,
            piece.batch,
            loss_type=plan.loss_type,
            epsilon=plan.epsilon,
            epsilon_high=plan.epsilon_high,
            max_completion_length=config.policy.max_tokens * config.rollout.turns,
        )
        gap_BL = jnp.abs(logprobs_BL - piece.batch.old_logprobs)
        return total, metrics | {
            "entropy": ops.masked_mean(entropy_BL, piece.batch.mask),
            "sampling/sampling_logp_difference/mean": ops.masked_mean(gap_BL, piece.batch.mask),
        }

    return policy_loss


def rollout_metrics(played: Rollout) -> dict:
    """Shares over the rows of a rollout."""
    mean = lambda values: jnp.mean(values.astype(jnp.float32))  # noqa: E731
    return {
        "episode/success_rate": mean(played.success),
        "episode/turns_mean": mean(played.turns),
        "completions/mean_length": mean(played.action_mask.sum(1)),
        "completions/clipped_ratio": mean(played.truncated),
        "env/wm_error_ratio": mean(played.invalid),
    }


def fingerprint(config: ConfigDict, workdir: pathlib.Path) -> dict:
    """Everything that changes the numbers of this training."""
    data = {name: files.digest(path) for name, path in sft.files_of(workdir, "world").items()}
    parts = ("seed", "world", "policy", "rollout", "grpo", "evaluate")
    values = {name: config[name] for name in parts}
    plain = {n: v.to_dict() if isinstance(v, ConfigDict) else v for n, v in values.items()}
    return plain | {"data": data, "rename_below": config.sft.rename_below}
