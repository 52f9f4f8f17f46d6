"""Byte-level BPE with the special tokens of a text world. Special ids never come from text.

A text world repeats whole phrases ("that has nothing on it.") in nearly every episode. Each of
those becomes one token, which halves the length of an episode; names never do, because no single
name stands in most episodes, so a name is spelled the same way wherever it occurs and can be
copied.
"""

import collections
import dataclasses
import pathlib
import re
from collections.abc import Iterable, Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

SPECIALS = (
    "<|pad|>",
    "<|mask|>",
    "<|system|>",
    "<|end|>",
    "<|playing|>",
    "<|solved|>",
    "<|failed|>",
)


@dataclasses.dataclass(frozen=True)
class Specials:
    """Ids of the special tokens. A status token ends an observation, `end` every other message."""

    pad: int
    mask: int
    system: int
    end: int
    playing: int
    solved: int
    failed: int

    @property
    def statuses(self) -> tuple[int, int, int]:
        """The ids that end an observation."""
        return self.playing, self.solved, self.failed


class Tokenizer:
    """Text <-> ids, and the special ids."""

    def __init__(self, inner: tokenizers.Tokenizer):
        inner.encode_special_tokens = True  # "<|solved|>" in a user's text is just text
        self.inner = inner
        ids = [inner.token_to_id(token) for token in SPECIALS]
        missing = [token for token, i in zip(SPECIALS, ids, strict=True) if i is None]
        if missing:
            raise ValueError(f"the tokenizer lacks the special tokens {missing}; run sft again")
        self.special = Specials(*ids)

    @property
    def vocab_size(self) -> int:
        """Ids run from 0 to this, exclusive."""
        return self.inner.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text."""
        return self.inner.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; special tokens are left out."""
        return self.inner.decode([int(i) for i in ids], skip_special_tokens=True)

    def piece(self, token_id: int) -> str:
        """One token as a person would read it."""
        if token_id < len(SPECIALS):
            return SPECIALS[token_id]
        return self.decode([token_id])

    def save(self, path: pathlib.Path) -> None:
        """Writes a tokenizer.json."""
        self.inner.save(str(path))


LONGEST_PHRASE = 20  # words
SENTENCE_ENDS = (".", "!", "?", ":")


def common_phrases(texts: Sequence[str], *, share: float, most: int) -> list[str]:
    """Word sequences that stand in at least a `share` of the texts, at most `most`.

    Each round takes the phrase that saves the most tokens over all texts; from then on it is one
    unit, which a longer phrase may take in: "In one part of the room you see a" and, where it is
    common enough, the whole sentence. The tokenizer prefers the longest phrase that fits.
    """
    pieces = [re.findall(r" ?\S+|\s", text) for text in texts]
    phrases: list[str] = []
    while len(phrases) < most:
        counts, homes = collections.Counter(), collections.Counter()
        for units in pieces:
            runs = list(_runs(units))
            counts.update(runs)
            homes.update(set(runs))
        enough = share * len(pieces)
        saved = {run: n * (len(run) - 1) for run, n in counts.items() if homes[run] >= enough}
        if not saved:
            break
        best = max(sorted(saved), key=saved.__getitem__)
        phrases.append("".join(best))
        pieces = [_join(units, best) for units in pieces]
    return phrases


def _runs(units: list[str]) -> Iterable[tuple[str, ...]]:
    """All sequences of two units or more within a sentence, of at most LONGEST_PHRASE words.

    Units are words with the blank before them, phrases, or other white space, which none crosses.
    """
    for start in range(len(units)):
        words = 0
        for end in range(start, len(units)):
            words += len(units[end].split())
            if units[end].isspace() or words > LONGEST_PHRASE:
                break
            if end > start:
                yield tuple(units[start : end + 1])
            if units[end].endswith(SENTENCE_ENDS):
                break


def _join(units: list[str], phrase: tuple[str, ...]) -> list[str]:
    """Makes one unit of every occurrence of the phrase."""
    joined, i = [], 0
    while i < len(units):
        found = tuple(units[i : i + len(phrase)]) == phrase
        joined.append("".join(phrase) if found else units[i])
        i += len(phrase) if found else 1
    return joined


def train(texts: Iterable[str], *, vocab_size: int, phrases: Sequence[str] = ()) -> Tokenizer:
    """Learns the merges from text; the specials take the first ids, the phrases the last."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(phrases),
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    inner.add_tokens([tokenizers.AddedToken(phrase, normalized=False) for phrase in phrases])
    return Tokenizer(inner)


def load(path: pathlib.Path) -> Tokenizer:
    """Reads a tokenizer.json. Raises ValueError if it is missing or torn."""
    if not path.exists():
        raise ValueError(f"{path} is missing; `python -m mdlm_jax sft --what=world` makes it")
    try:
        return Tokenizer(tokenizers.Tokenizer.from_file(str(path)))
    except Exception as error:  # the library raises bare Exception on a torn file
        raise ValueError(f"{path} can't be read ({error}); delete it and run sft again") from error
