"""Scores of generated texts against reference texts; each carries the settings it was made with."""

from collections.abc import Sequence
from dataclasses import dataclass

from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics import BLEU


@dataclass(frozen=True)
class Score:
    """One number, how it was made and, where it is a mean over pairs, what it is the mean of."""

    name: str
    value: float
    per_item: tuple[float, ...] | None  # one value per pair; None where the score has no such parts
    settings: str  # printed next to the number


def exact_match(predictions: Sequence[str], references: Sequence[str]) -> Score:
    """Share of pairs (0..1) whose texts are the same string, character by character.

    Two empty texts match. Raises ValueError for no pairs or lists of different lengths.
    """
    _check(predictions, references)
    hits = tuple(float(p == r) for p, r in zip(predictions, references, strict=True))
    return Score("exact_match", sum(hits) / len(hits), hits, "string equality|norm:none|scale:0-1")


def bleu1(predictions: Sequence[str], references: Sequence[str]) -> Score:
    """Corpus BLEU of order 1 (Papineni et al., 2002) on sacrebleu's 0..100 scale.

    `100 * BP * sum(clipped unigram matches) / sum(prediction tokens)`, with
    `BP = 1 if c >= r else exp(1 - r / c)`; c and r are token counts summed over the corpus.
    An empty prediction adds nothing to c and its reference's length to r. There is no smoothing.
    Raises ValueError for no pairs or lists of different lengths.
    """
    _check(predictions, references)
    metric = BLEU(max_ngram_order=1, smooth_method="none", tokenize="13a", lowercase=False)
    # sacrebleu wants streams of references, [[all first references]]; a transposed list would
    # be accepted and score the first pair alone.
    score = metric.corpus_score(list(predictions), [list(references)]).score
    # exp(log(100)) makes a perfect score 100.00000000000004.
    return Score("bleu1", min(score, 100.0), None, f"sacrebleu|order:1|{metric.get_signature()}")


def rouge_l(predictions: Sequence[str], references: Sequence[str]) -> Score:
    """Mean over pairs of ROUGE-L F1 (Lin, 2004), 0..1, as the rouge-score package counts it.

    `P = LCS / |prediction|`, `R = LCS / |reference|`, `F1 = 2 P R / (P + R)` over lower-cased runs
    of `[a-z0-9]`, no stemmer. A text without such a run (empty, punctuation, Chinese) scores 0,
    even against itself. Raises ValueError for no pairs or lists of different lengths.
    """
    _check(predictions, references)
    scorer = RougeScorer(["rougeL"], use_stemmer=False)
    values = tuple(
        float(scorer.score(target=r, prediction=p)["rougeL"].fmeasure)
        for p, r in zip(predictions, references, strict=True)
    )
    settings = "rouge-score|rougeL|F1|stemmer:no|mean over pairs|scale:0-1"
    return Score("rouge_l", sum(values) / len(values), values, settings)


def _check(predictions: Sequence[str], references: Sequence[str]) -> None:
    if len(predictions) != len(references):
        raise ValueError(f"{len(predictions)} predictions but {len(references)} references")
    if not predictions:
        raise ValueError("no pairs to score: predictions and references are empty")
