"""The policy in the real games, and text on both sides of a rollout."""

from collections.abc import Callable, Sequence

import jax
import numpy as np
from ml_collections import ConfigDict

from mdlm_jax import check
from mdlm_jax.envs import pool
from mdlm_jax.envs.base import EnvFailure, Start, Step, Task, parse_game
from mdlm_jax.programs import build
from mdlm_jax.structs import Message, Rollout, Tasks
from mdlm_jax.tokens import batches
from mdlm_jax.tokens import trajectory as tj
from mdlm_jax.tokens.tokenizer import Tokenizer
from mdlm_jax.train import logging

SEEDS_PER_GAME = 10  # how many seeds are looked at, per game wanted, to find distinct games
INVALID = "Unknown action"  # how the engine's answer to an impossible action begins


def scene_of(start: Start, directives: str = "") -> tj.Scene:
    """What both prompts need of a game's start."""
    return tj.Scene(
        instruction=start.instruction,
        state=start.state,
        goal=start.goal,
        actions=start.actions,
        rules=start.rules,
        directives=directives,
        observation=start.observation,
    )


def tasks(config: ConfigDict, words: Tokenizer, scenes: Sequence[tj.Scene], on) -> Tasks:
    """Prompts of both sides, on the device."""
    policy = [batches.prompt_ids(words, tj.policy_prompt(scene)) for scene in scenes]
    world = [batches.prompt_ids(words, tj.world_prompt(scene)) for scene in scenes]
    return Tasks(
        policy=build.messages(policy, on, width=config.policy.prompt),
        world=build.messages(world, on, width=config.world.prompt),
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
        with check.user_errors():
            self.pool = pool.Pool(config.env.name, self.rows, config.env.workers)

    def __enter__(self) -> "Stage":
        return self

    def __exit__(self, *_) -> None:
        self.pool.close()

    def panel(self, fold: str, games: int) -> list[Start]:
        """The first `games` distinct games of a fold, by seed; fewer if the fold has no more."""
        kinds = [parse_game(game) for game in self.config.env.games]
        found: dict[tuple[str, str], Start] = {}
        for first in range(0, games * SEEDS_PER_GAME, self.rows):
            numbers = range(first, first + self.rows)
            wanted = [
                Task(*kinds[n % len(kinds)], fold=fold, seed=n // len(kinds)) for n in numbers
            ]
            for start in self._call(self.pool.reset, list(range(self.rows)), wanted):
                found.setdefault((start.state, start.goal), start)
            if len(found) >= games:
                break
        return list(found.values())[:games]

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
        try:
            return ask(slots, arguments)
        except (EnvFailure, ValueError, ImportError) as error:
            raise check.UserError(str(error)) from error


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
