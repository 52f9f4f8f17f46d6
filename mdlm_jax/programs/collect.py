"""Program `collect`: plays games of the real environment and writes them as trajectory files.

    python -m mdlm_jax collect --config=configs/quickstart.py --workdir=runs/quickstart

Writes workdir/data/{train,dev,test,expert}.jsonl. Every draw follows from (seed, fold, episode), so
the files depend neither on the number of workers nor on how often the program was killed: finished
episodes are kept in `*.jsonl.partial` and a second run continues there.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from ml_collections import ConfigDict
from tqdm import tqdm

from mdlm_jax import check
from mdlm_jax.envs.base import EnvFailure, Start, Task, TextEnv, parse_game
from mdlm_jax.envs.pool import Pool
from mdlm_jax.envs.registry import version
from mdlm_jax.programs import files
from mdlm_jax.tokens import trajectory as records
from mdlm_jax.tokens.trajectory import Scene, Trajectory, Turn

IDLE = ("look around", "inventory", "look")  # long answers, always possible: together one draw
VOCABULARY_GAMES = 40  # games whose actions lend their words to invalid ones
LINE_EVERY_S = 3.0  # progress lines where there is no terminal
# An agent may claim success, or write the very marks that the environment's turn carries.
CHATTER = (
    "",
    "help",
    "I have solved the task.",
    "The task is done. <|solved|>",
    "You put the {object} in the {place}.",
    "put {object} in {place} <|solved|>",
    "I think that I should take the {object} first",
    "{object}",
)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How actions are drawn in one file's episodes."""

    env: str
    kind: str  # "mixture" or "expert"
    gold: float  # chance of following the gold path
    valid: float  # chance of a random valid action
    turns: int
    vocabulary: tuple[str, ...]  # actions of other games of this fold


@dataclasses.dataclass(frozen=True)
class Job:
    """One episode: its game and the seed of its draws."""

    task: Task
    draw: tuple[int, ...]


def run(config: ConfigDict, workdir: pathlib.Path) -> None:
    """Plays what is still missing of the four files and prints a table of them."""
    folder = pathlib.Path(workdir) / "data"
    paths = {name: folder / f"{name}.jsonl" for name in _counts(config)}
    with env_errors():
        folder.mkdir(parents=True, exist_ok=True)
        _check_settings(folder, _settings(config))
        with Pool(config.env.name, config.env.workers, config.env.workers) as pool:
            for name, path in paths.items():
                if not path.exists():
                    _collect(config, pool, name, path)
        episodes = {name: records.read_jsonl(path) for name, path in paths.items()}
    print(_table(episodes))


@contextlib.contextmanager
def env_errors() -> Iterator[None]:
    """Turns what a real environment or its files raise into a UserError."""
    try:
        with check.user_errors():
            yield
    except (EnvFailure, ImportError) as error:
        raise check.UserError(str(error)) from error


# ---------------------------------------------------------------- files


def _counts(config: ConfigDict) -> dict[str, int]:
    names = ("train", "dev", "test", "expert")
    return {name: config.collect[f"{name}_episodes"] for name in names}


def _settings(config: ConfigDict) -> dict:
    """Everything that changes the files; the number of workers is not of it."""
    return {
        "format": records.FORMAT,
        "seed": config.seed,
        "env": config.env.name,
        "engine": version(config.env.name),
        "games": list(config.env.games),
        "turns": config.env.turns,
        "collect": config.collect.to_dict(),
    }


def _check_settings(folder: pathlib.Path, settings: dict) -> None:
    """Notes the settings, or raises ValueError where `folder` was begun with others."""
    path = folder / "collect.json"
    if not path.exists() or not any(folder.glob("*.jsonl*")):
        files.write_json(path, settings)
        return
    before = json.loads(path.read_text())
    changed = [key for key in settings if settings[key] != before.get(key)]
    if changed:
        told = "; ".join(f"{key}: {before.get(key)} -> {settings[key]}" for key in changed)
        raise ValueError(
            f"{folder} was collected with other settings ({told}); "
            f"choose another --workdir or delete {folder}"
        )


def _collect(config: ConfigDict, pool: Pool, name: str, path: pathlib.Path) -> None:
    """Appends the missing episodes to the partial file, then gives it its name."""
    play = functools.partial(play_episode, recipe=_recipe(config, pool, name))
    jobs = _jobs(config, name)
    partial = path.with_name(path.name + ".partial")
    partial.touch()
    done = records.repair(partial)
    played = _progress(pool.map(play, jobs[done:]), name, done, len(jobs))
    with partial.open("a", encoding="utf-8", newline="\n") as file:
        for episode in played:
            file.write(records.to_line(episode))
            file.flush()  # a killed run keeps every finished episode
    os.replace(partial, path)


def _jobs(config: ConfigDict, name: str) -> list[Job]:
    fold = "train" if name == "expert" else name
    number = ("train", "dev", "test", "expert").index(name)
    tasks = games_of(config, fold, range(_counts(config)[name]))
    return [Job(task, (config.seed, number, episode)) for episode, task in enumerate(tasks)]


def games_of(config: ConfigDict, fold: str, numbers: Iterable[int]) -> list[Task]:
    """Game number 0, 1, 2, ... of a fold: the config's games in turn, each with the next seed."""
    kinds = [parse_game(game) for game in config.env.games]
    return [Task(*kinds[i % len(kinds)], fold, seed=i // len(kinds)) for i in numbers]


def _recipe(config: ConfigDict, pool: Pool, name: str) -> Recipe:
    kind = "expert" if name == "expert" else "mixture"
    fold = "train" if name == "expert" else name
    vocabulary = ()
    if kind == "mixture":
        known = pool.map(known_actions, games_of(config, fold, range(VOCABULARY_GAMES)))
        vocabulary = tuple(sorted(set(itertools.chain.from_iterable(known)) - set(IDLE)))
    shares = config.collect
    return Recipe(config.env.name, kind, shares.gold, shares.valid, config.env.turns, vocabulary)


# ---------------------------------------------------------------- one episode, in a worker


def known_actions(env: TextEnv, task: Task) -> tuple[str, ...]:
    """Actions that make sense somewhere in this game."""
    start = env.reset(task)
    return start.valid + start.gold


def play_episode(env: TextEnv, job: Job, recipe: Recipe) -> Trajectory:
    """Plays one game to its end or to the turn limit."""
    start = env.reset(job.task)
    player = _Player(start, recipe, np.random.default_rng(job.draw))
    turns: list[Turn] = []
    limit = recipe.turns if recipe.kind == "mixture" else min(recipe.turns, len(start.gold))
    while len(turns) < limit and (not turns or turns[-1].status == "playing"):
        action, source = player.choose()
        step = env.step(action)
        player.saw(action, step.valid)
        turns.append(Turn(action, step.observation, step.status, step.score, source))
    return Trajectory(
        env=recipe.env,
        **dataclasses.asdict(job.task),
        kind=recipe.kind,
        scene=scene_of(start),
        turns=tuple(turns),
        success=turns[-1].status == "solved",
        score=turns[-1].score,
    )


def scene_of(start: Start, directives: str = "") -> Scene:
    """An environment's start as the scene that both prompts are written from."""
    fields = {field.name for field in dataclasses.fields(Scene)} - {"directives"}
    return Scene(**{name: getattr(start, name) for name in fields}, directives=directives)


class _Player:
    """Draws the actions of one episode and follows where it stands on the gold path."""

    def __init__(self, start: Start, recipe: Recipe, rng: np.random.Generator):
        self._recipe = recipe
        self._rng = rng
        self._gold = list(start.gold)  # what is left of the path
        self._valid = start.valid
        self._known = set(start.valid + start.gold)  # valid at some time in this game

    def choose(self) -> tuple[str, str]:
        """The next action and its source."""
        if self._recipe.kind == "expert":
            return self._gold[0], "gold"
        draw = self._rng.random()
        if draw < self._recipe.gold:
            return self._next_gold() or self._random_valid(idle=False)
        if draw < self._recipe.gold + self._recipe.valid:
            return self._random_valid(idle=True)
        return self._invalid(), "invalid"

    def saw(self, action: str, valid: tuple[str, ...]) -> None:
        """Notes an action that was taken and what is possible after it."""
        if action in self._gold and action in self._valid or self._recipe.kind == "expert":
            self._gold = self._gold[self._gold.index(action) + 1 :]
        self._valid = valid
        self._known |= set(valid)

    def _next_gold(self) -> tuple[str, str] | None:
        """The first action left of the gold path that is possible now."""
        possible = [action for action in self._gold if action in self._valid]
        return (possible[0], "gold") if possible else None

    def _random_valid(self, idle: bool) -> tuple[str, str]:
        choices: list[str] = [action for action in self._valid if action not in IDLE]
        waits = [action for action in self._valid if action in IDLE]
        if waits and (idle or not choices):
            choices.append(self._pick(waits))
        return self._pick(choices), "valid"

    def _invalid(self) -> str:
        """An action that is not possible now, made of the game's own words.

        Half of them are all but right: a policy that is learning to spell says such things, and a
        world that lets them pass teaches it nothing.
        """
        near = (self._garbled, self._garbled, self._garbled, self._stale)
        far = (self._swapped, self._foreign, self._cut, self._chat)
        ways = near + far
        while (action := self._pick(ways)()) in self._valid:
            pass
        return action

    def _stale(self) -> str:
        """Possible at another time of this game: the closed box, the thing not yet taken."""
        return self._pick(sorted(self._known - set(self._valid)) or [""])

    def _foreign(self) -> str:
        """Possible in another game."""
        return self._pick(self._recipe.vocabulary)

    def _swapped(self) -> str:
        """One part of an action of this game replaced by a thing or place of another one."""
        verb, *things = _parse(self._pick(sorted(self._known - set(IDLE)) or ["take"]))
        others = _parse(self._foreign())[1:] or ("",)
        things = list(things) or [""]
        things[self._rng.integers(len(things))] = self._pick(others)
        return f"{verb} {' in '.join(things)}".strip()

    def _garbled(self) -> str:
        """An action of this game in which one thing's name has a word wrong, missing or moved."""
        action = self._pick(sorted(self._valid_things()) or ["take"])
        verb, *things = _parse(action)
        if not things:
            return f"{verb} {self._pick(self._words())}"
        place = self._rng.integers(len(things))
        things[place] = self._misspelt(things[place].split())
        return f"{verb} {' in '.join(things)}".strip()

    def _valid_things(self) -> set[str]:
        return set(self._valid) - set(IDLE)

    def _misspelt(self, words: list[str]) -> str:
        """A name with a word replaced by a known one, left out, or two words exchanged."""
        place, draw = self._rng.integers(len(words)), self._rng.random()
        if len(words) > 1 and draw < 0.2:
            del words[place]
        elif len(words) > 1 and draw < 0.4:
            other = (place + 1) % len(words)
            words[place], words[other] = words[other], words[place]
        else:
            words[place] = self._pick(self._words())
        return " ".join(words)

    def _words(self) -> list[str]:
        """The words of the names of another game."""
        return " ".join(_parse(self._foreign())[1:]).split() or ["thing"]

    def _cut(self) -> str:
        """An action without its end."""
        words = self._pick(sorted(self._known)).split()
        return " ".join(words[: self._rng.integers(1, max(2, len(words)))])

    def _chat(self) -> str:
        """Talk, and claims of success."""
        things = [_parse(action)[1:] for action in sorted(self._known) if " in " in action]
        named = self._pick(things) if things else ("coin", "kitchen")
        return self._pick(CHATTER).format(object=named[0], place=named[-1])

    def _pick(self, choices: Sequence):
        return choices[self._rng.integers(len(choices))]


def _parse(action: str) -> tuple[str, ...]:
    """Verb and things: put A in B -> ("put", "A", "B")."""
    verb, _, rest = action.partition(" ")
    return (verb, *filter(None, rest.split(" in ")))


# ---------------------------------------------------------------- what the user sees


def _progress(played: Iterable[Trajectory], name: str, done: int, total: int) -> Iterator:
    """A bar on a terminal, else a line every few seconds."""
    if sys.stderr.isatty():
        yield from tqdm(played, f"collect {name}", total, initial=done, unit="game")
        return
    began = told = time.monotonic()
    for number, episode in enumerate(played, start=1):
        yield episode
        now = time.monotonic()
        if now - told >= LINE_EVERY_S or done + number == total:
            told = now
            rate = number / max(now - began, 1e-9)
            print(f"collect {name}: {done + number}/{total} games, {rate:.0f} games/s", flush=True)


def _table(episodes: dict[str, list[Trajectory]]) -> str:
    """What was collected, how much the folds share, and one short episode."""
    lines = ["file      episodes  starts  turns  solved  invalid  words"]
    lines += [_row(name, each) for name, each in episodes.items()]
    train, test = starts_of(episodes["train"]), starts_of(episodes["test"])
    lines.append(
        f"starts: distinct games (state and goal). {len(test & train)} of the {len(test)} "
        "test starts are also train starts, and left out of every evaluation. words: of the world "
        "prompt."
    )
    return "\n".join([*lines, *_sample(episodes["train"])])


def start_of(game: Scene | Start) -> tuple[str, str]:
    """What tells games apart: hidden state and goal."""
    return game.state, game.goal


def starts_of(episodes: Iterable[Trajectory]) -> set[tuple[str, str]]:
    """The distinct games among the episodes."""
    return {start_of(episode.scene) for episode in episodes}


def _row(name: str, episodes: list[Trajectory]) -> str:
    turns = [turn for episode in episodes for turn in episode.turns]
    count = max(1, len(episodes))
    solved = sum(episode.success for episode in episodes) / count
    invalid = sum(turn.source == "invalid" for turn in turns) / max(1, len(turns))
    words = sum(len(records.world_prompt(e.scene).split()) for e in episodes) / count
    return (
        f"{name:8}{len(episodes):>10}{len(starts_of(episodes)):>8}{len(turns) / count:>7.1f}"
        f"{solved:>8.0%}{invalid:>9.0%}{words:>7.0f}"
    )


def _sample(episodes: list[Trajectory]) -> list[str]:
    """A short solved episode of a few turns."""
    fitting = [e for e in episodes if e.success and 3 <= len(e.turns) <= 5] or episodes
    if not fitting:
        return []
    first = fitting[0]
    head = f"\n{first.game} {first.fold} {first.seed}: {first.scene.observation}"
    return [head, *(f"> {t.action}\n{t.observation} [{t.status}]" for t in first.turns)]
