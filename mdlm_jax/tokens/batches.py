"""Episodes as ids, packed into rows, served as batches."""

import dataclasses
from collections.abc import Iterable, Sequence

import grain
import numpy as np

from mdlm_jax.structs import TokenBatch
from mdlm_jax.tokens import trajectory as tj
from mdlm_jax.tokens.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Episode:
    """One episode's ids, and which of them the model is trained to write."""

    tokens: np.ndarray  # i32[n]
    trained: np.ndarray  # bool[n]


class Writer:
    """Collects ids and their mask side by side: a mask is never guessed from ids."""

    def __init__(self):
        self.tokens: list[int] = []
        self.trained: list[bool] = []

    def add(self, ids: Sequence[int], *, trained: bool) -> None:
        """Appends ids."""
        self.tokens.extend(ids)
        self.trained.extend([trained] * len(ids))

    def episode(self) -> Episode:
        """What was collected."""
        return Episode(np.array(self.tokens, np.int32), np.array(self.trained, bool))


def prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The start of every context."""
    return [tokenizer.special.system, *tokenizer.encode(text), tokenizer.special.end]


def action_ids(tokenizer: Tokenizer, action: str) -> list[int]:
    """A policy's turn."""
    return [*tokenizer.encode(action), tokenizer.special.end]


def observation_ids(tokenizer: Tokenizer, observation: str, status: str) -> list[int]:
    """A world's turn: the text, then its status as the token that ends it."""
    return [*tokenizer.encode(observation), getattr(tokenizer.special, status)]


def world_episode(
    tokenizer: Tokenizer,
    record: tj.Trajectory,
    *,
    block_length: int,
    slot: int,
    end_tokens: int = 1,
) -> Episode:
    """Prompt with the hidden state, then the turns; observations are trained.

    What the world reads (prompt, actions) is filled up to whole slots, so that an answer always
    begins the same distance behind its action: "take the coin" is copied by looking a fixed way
    back. Each observation is filled up with trained padding to a whole block, as SDAR does with a
    sample, so that the next turn starts at a block border here as in generation. The last status
    is written `end_tokens` times, as WeDLM does it: so a model learns what lies behind an end.
    """
    pad = tokenizer.special.pad
    writer = Writer()
    prompt = prompt_ids(tokenizer, tj.world_prompt(record.scene))
    writer.add(filled(prompt, slot, pad), trained=False)
    for turn in record.turns:
        writer.add(filled(action_ids(tokenizer, turn.action), slot, pad), trained=False)
        told = observation_ids(tokenizer, turn.observation, turn.status)
        ends = end_tokens if turn is record.turns[-1] else 1
        writer.add([*told, *told[-1:] * (ends - 1)], trained=True)
        writer.add([pad] * (-len(writer.tokens) % block_length), trained=True)
    return writer.episode()


def filled(ids: list[int], slot: int, pad: int) -> list[int]:
    """The ids and padding up to a whole number of slots."""
    return [*ids, *[pad] * (-len(ids) % slot)]


def policy_episode(tokenizer: Tokenizer, record: tj.Trajectory) -> Episode:
    """Prompt with the task and the first observation, then the turns; gold actions are trained."""
    writer = Writer()
    writer.add(prompt_ids(tokenizer, tj.policy_prompt(record.scene)), trained=False)
    for turn in record.turns:
        writer.add(action_ids(tokenizer, turn.action), trained=turn.source == "gold")
        writer.add(observation_ids(tokenizer, turn.observation, turn.status), trained=False)
    return writer.episode()


@dataclasses.dataclass
class Bin:
    """A row that is being filled."""

    episodes: list[Episode]
    length: int = 0
    answers: int = 0


def pack(
    episodes: Iterable[Episode], *, row_length: int, answer_length: int, block_length: int
) -> tuple[list[dict[str, np.ndarray]], int]:
    """First-fit packing into rows of `row_length` tokens and `answer_length` answer places at most.

    Returns rows (the fields of a TokenBatch without the batch axis) and how many episodes were too
    long for a row of their own and were left out.
    """
    bins: list[Bin] = []
    dropped = 0
    for episode in episodes:
        length, answers = len(episode.tokens), len(answer_places(episode.trained, block_length))
        if length > row_length or answers > answer_length:
            dropped += 1
            continue
        open_bins = bins[-32:]  # looking further back fills rows hardly better
        for candidate in open_bins:
            if (
                candidate.length + length <= row_length
                and candidate.answers + answers <= answer_length
            ):
                break
        else:
            candidate = Bin([])
            bins.append(candidate)
        candidate.episodes.append(episode)
        candidate.length += length
        candidate.answers += answers
    rows = [
        row_of(
            full.episodes,
            row_length=row_length,
            answer_length=answer_length,
            block_length=block_length,
        )
        for full in bins
    ]
    return rows, dropped


def answer_places(trained: np.ndarray, block_length: int) -> np.ndarray:
    """Places, inside an episode, of all tokens of the blocks that hold a trained token."""
    blocks = np.unique(np.flatnonzero(trained) // block_length)
    places = (blocks[:, None] * block_length + np.arange(block_length)).reshape(-1)
    return places[places < len(trained)]


def row_of(
    episodes: Sequence[Episode], *, row_length: int, answer_length: int, block_length: int
) -> dict[str, np.ndarray]:
    """One packed row."""
    row = {
        "tokens": np.zeros(row_length, np.int32),
        "segment": np.zeros(row_length, np.int32),
        "position": np.zeros(row_length, np.int32),
        "loss_mask": np.zeros(row_length, bool),
        "answer_index": np.full(answer_length, -1, np.int32),
    }
    start = answers = 0
    for number, episode in enumerate(episodes, 1):
        end = start + len(episode.tokens)
        row["tokens"][start:end] = episode.tokens
        row["segment"][start:end] = number
        row["position"][start:end] = np.arange(end - start)
        row["loss_mask"][start:end] = episode.trained
        places = start + answer_places(episode.trained, block_length)
        row["answer_index"][answers : answers + len(places)] = places
        start, answers = end, answers + len(places)
    return row


def most_segments(rows: Sequence[dict[str, np.ndarray]]) -> int:
    """The largest number of episodes in a row."""
    return max(int(row["segment"].max()) for row in rows)


class Batches:
    """Shuffled batches by step number: `batches[step]` is the same whenever it is asked for."""

    def __init__(self, rows: Sequence[dict[str, np.ndarray]], *, size: int, seed: int):
        if not rows:
            raise ValueError("there is no episode to train on: every one was too long for a row")
        data = grain.MapDataset.source(rows).seed(seed).shuffle().repeat()
        self.data = data.batch(size)

    def __getitem__(self, step: int) -> TokenBatch:
        return TokenBatch(**self.data[step])


def message(ids: Sequence[Sequence[int]], *, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of ids as (tokens i32[B, width], length i32[B]). ValueError if a row is too long."""
    tokens = np.zeros((len(ids), width), np.int32)
    for row, row_ids in zip(tokens, ids, strict=True):
        if len(row_ids) > width:
            raise ValueError(f"a text takes {len(row_ids)} tokens, but there is room for {width}")
        row[: len(row_ids)] = row_ids
    return tokens, np.array([len(row_ids) for row_ids in ids], np.int32)
