"""Games for the policy to play: real ones, and dreamed ones inside the world model."""

import pathlib
from collections.abc import Callable, Sequence, Set

import jax
import numpy as np
from ml_collections import ConfigDict

from mdlm_jax import check
from mdlm_jax.envs import pool
from mdlm_jax.envs.base import Start, Step
from mdlm_jax.programs import build
from mdlm_jax.programs.collect import env_errors, games_of, scene_of, start_of
from mdlm_jax.rl import rollout
from mdlm_jax.structs import Message, Rollout, Tasks
from mdlm_jax.tokens import batches
from mdlm_jax.tokens import trajectory as tj
from mdlm_jax.tokens.tokenizer import Tokenizer
from mdlm_jax.train import logging

SEEDS_PER_GAME = 10  # how many seeds are looked at, per game wanted, to find distinct games
INVALID = "Unknown action"  # how the engine's answer to an impossible action begins
NOTHING_NEW = (
    "every {fold} game is a train game, too; make the games of config.env.games larger, or "
    "config.collect.train_episodes smaller"
)


PROMPTS = {"policy": tj.policy_prompt, "world": tj.world_prompt}


def tasks(config: ConfigDict, words: Tokenizer, scenes: Sequence[tj.Scene], on) -> Tasks:
    """Prompts of both sides, on the device."""
    sides = {}
    for side in PROMPTS:
        ids = [side_ids(config, words, side, scene) for scene in scenes]
        sides[side] = build.messages(ids, on, width=config[side].prompt)
    return Tasks(**sides)


def side_ids(config: ConfigDict, words: Tokenizer, side: str, scene: tj.Scene) -> list[int]:
    """One side's prompt; the world's is filled up to whole slots, as it was trained to see it."""
    ids = batches.prompt_ids(words, PROMPTS[side](scene))
    return batches.filled(ids, config.world.slot, words.special.pad) if side == "world" else ids


def check_room(config: ConfigDict, words: Tokenizer, scenes: Sequence[tj.Scene]) -> None:
    """Every prompt must have room, said before hours of work and not in the middle of them."""
    for side in PROMPTS:
        longest = max(len(side_ids(config, words, side, scene)) for scene in scenes)
        if longest > config[side].prompt:
            raise check.UserError(
                f"config.{side}.prompt = {config[side].prompt}: the longest {side} prompt takes "
                f"{longest} tokens; raise it (and config.{side}.context), choose smaller games, or "
                "a larger config.tokenizer.vocab_size"
            )


def split_status(words: Tokenizer, ids: Sequence[int]) -> tuple[str, str]:
    """An observation's text and status; the status is "" if the world did not finish."""
    names = {getattr(words.special, name): name for name in tj.STATUSES}
    status = names.get(ids[-1], "") if ids else ""
    return words.decode(ids[:-1] if status else ids), status


def episode(words: Tokenizer, played: Rollout, row: int) -> dict:
    """One row of a rollout as text."""
    turns = []
    for turn in range(int(played.turns[row])):
        said, told = (
            [int(i) for i in side.tokens[turn, row, : int(side.length[turn, row])]]
            for side in (played.actions, played.observations)
        )
        observation, status = split_status(words, told)
        turns.append({"action": words.decode(said), "observation": observation, "status": status})
    return {
        "success": bool(played.success[row]),
        "invalid": bool(played.invalid[row]),
        "turns": turns,
    }


class Dream:
    """The games inside the trained world model: one compiled rollout, and its memory."""

    def __init__(
        self,
        config: ConfigDict,
        workdir: pathlib.Path,
        words: Tokenizer,
        on: jax.sharding.Mesh,
        *,
        tasks: int,
        group: int,
        turns: int,
        temperature: float,
    ):
        self.config, self.words, self.on, self.rows = config, words, on, tasks * group
        policy = build.policy_model(config, words.vocab_size)
        world = build.world_model(config, words.vocab_size)
        self.world_params = build.load_world(workdir, config, world, on)
        self.loop = build.play_fn(
            config, policy, world, words.special, group=group, turns=turns, temperature=temperature
        )
        self.memory = rollout.Memory(
            policy=build.memory(self.rows, size=config.policy.context, model=policy, on=on),
            world=build.memory(self.rows, size=config.world.context, model=world, on=on),
        )

    def __call__(
        self,
        policy_params: dict,
        scenes: Sequence[tj.Scene],
        key: jax.Array,
        renaming: Callable[[Tasks], Tasks] = lambda prompts: prompts,
    ) -> Rollout:
        """Plays `group` episodes of each scene; the rollout stays on the device."""
        prompts = renaming(tasks(self.config, self.words, scenes, self.on))
        keys = build.row_keys(key, self.rows, self.on)
        played, self.memory = self.loop(
            policy_params, self.world_params, keys, prompts, self.memory
        )
        return played


class Stage:
    """The real games, and one compiled policy that plays many of them at once."""

    def __init__(self, config: ConfigDict, words: Tokenizer, on, *, temperature: float):
        self.config, self.words, self.on, self.rows = config, words, on, config.evaluate.rows
        model = build.policy_model(config, words.vocab_size)
        speaker = build.policy_speaker(config, model, words.special, temperature=temperature)
        self.begin = jax.jit(
            lambda params, prompts, memory: speaker.begin(params, prompts, memory, 1)
        )
        self.write = jax.jit(speaker.write)
        self.read = jax.jit(speaker.read)
        self.memory = build.memory(self.rows, size=config.policy.context, model=model, on=on)
        with env_errors():
            self.pool = pool.Pool(config.env.name, self.rows, config.env.workers)

    def __enter__(self) -> "Stage":
        return self

    def __exit__(self, *_) -> None:
        self.pool.close()

    def panel(self, fold: str, games: int, *, known: Set[tuple[str, str]]) -> list[Start]:
        """The first `games` distinct games of a fold, by seed; fewer if the fold has no more.

        Games that start as one of the `known` (state, goal) are left out: they were trained on.
        """
        found: dict[tuple[str, str], Start] = {}
        for first in range(0, games * SEEDS_PER_GAME, self.rows):
            wanted = games_of(self.config, fold, range(first, first + self.rows))
            for start in self._call(self.pool.reset, list(range(self.rows)), wanted):
                if start_of(start) not in known:
                    found.setdefault(start_of(start), start)
            if len(found) >= games:
                break
        starts = list(found.values())[:games]
        if not starts:
            raise check.UserError(NOTHING_NEW.format(fold=fold))
        check_room(self.config, self.words, [scene_of(start) for start in starts])
        return starts

    def play(self, params: dict, starts: Sequence[Start], *, name: str, key: int = 0) -> list[dict]:
        """One episode of the policy per game."""
        episodes = []
        with logging.Progress(len(starts), name) as progress:
            for first in range(0, len(starts), self.rows):
                part = starts[first : first + self.rows]
                episodes += self._play_part(
                    params, part, jax.random.key(self.config.seed + key + first)
                )
                progress.update(
                    len(episodes), {"success": np.mean([e["success"] for e in episodes])}
                )
        return episodes

    def _play_part(self, params: dict, starts: Sequence[Start], key: jax.Array) -> list[dict]:
        games = Games(self, starts)
        ids = [batches.prompt_ids(self.words, tj.policy_prompt(scene_of(s))) for s in starts]
        ids += [[self.words.special.system]] * (self.rows - len(ids))
        prompts = build.messages(ids, self.on, width=self.config.policy.prompt)
        context = self.begin(params, prompts, self.memory)
        for turn in range(self.config.env.turns):
            if not games.active.any():
                break
            keys = build.row_keys(jax.random.fold_in(key, turn), self.rows, self.on)
            active = jax.device_put(games.active, build.rows_sharding(self.on))
            action, context = self.write(params, keys, context, active)
            said = jax.device_get((action.tokens, action.length))
            games.step([self.words.decode(t[:n]) for t, n in zip(*said, strict=True)])
            context = self.read(params, context, games.heard(context))
        return games.episodes

    def replay(self, starts: Sequence[Start], actions: Sequence[Sequence[str]]) -> list[dict]:
        """The real answers to given actions, up to the end of the game or of the actions."""
        episodes = []
        for first in range(0, len(starts), self.rows):
            part = slice(first, first + self.rows)
            games = Games(self, starts[part])
            planned = [list(a) for a in actions[part]] + [[]] * (self.rows - len(starts[part]))
            for turn in range(max(map(len, planned))):
                games.active &= np.array([turn < len(a) for a in planned])
                games.step([a[turn] if turn < len(a) else "" for a in planned])
            episodes += games.episodes
        return episodes

    def _call(self, ask: Callable, slots: list[int], arguments: Sequence) -> list:
        with env_errors():
            return ask(slots, arguments)


class Games:
    """The episodes of one batch as they unfold."""

    def __init__(self, stage: Stage, starts: Sequence[Start]):
        self.stage = stage
        slots = list(range(len(starts)))
        stage._call(stage.pool.reset, slots, [start.task for start in starts])
        self.episodes = [{"success": False, "invalid": False, "turns": []} for _ in starts]
        self.active = np.arange(stage.rows) < len(starts)
        self.answers: dict[int, Step] = {}

    def step(self, actions: Sequence[str]) -> None:
        """Takes one action in every active game."""
        slots = [int(slot) for slot in np.flatnonzero(self.active)]
        steps = self.stage._call(self.stage.pool.step, slots, [actions[slot] for slot in slots])
        self.answers = dict(zip(slots, steps, strict=True))
        for slot, answer in self.answers.items():
            self.episodes[slot]["turns"].append(
                {
                    "action": actions[slot],
                    "observation": answer.observation,
                    "status": answer.status,
                    "valid": not answer.observation.startswith(INVALID),
                }
            )
            self.episodes[slot]["success"] = answer.status == "solved"
            self.active[slot] = answer.status == "playing"

    def heard(self, context) -> Message:
        """The observations of the games that go on; a game whose context is full ends here."""
        stage = self.stage
        width = stage.config.world.max_tokens
        room = np.asarray(context.tokens.shape[1] - jax.device_get(context.length))
        ids: list[list[int]] = [[] for _ in range(stage.rows)]
        for slot in np.flatnonzero(self.active):
            answer = self.answers[int(slot)]
            row = batches.observation_ids(stage.words, answer.observation, answer.status)
            if len(row) < room[slot] and len(row) <= width:
                ids[slot] = row
            else:
                self.active[slot] = False
        return build.messages(ids, stage.on, width=width)
