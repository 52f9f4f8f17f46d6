"""The text metrics equal the reference libraries' numbers, over every golden folder `metrics`."""

import json
from pathlib import Path

import pytest

from mdlm_jax.metrics.text import bleu1, exact_match, rouge_l

pytestmark = pytest.mark.golden("metrics")


def _pairs(folder: Path) -> tuple[list[str], list[str], list[str]]:
    """Ids, hypotheses and first references."""
    lines = (folder / "pairs.jsonl").read_text(encoding="utf-8").split("\n")
    pairs = [json.loads(line) for line in lines if line]
    return tuple(zip(*((pair["id"], pair["hyp"], pair["refs"][0]) for pair in pairs), strict=True))


def _values(folder: Path) -> dict:
    return json.loads((folder / "golden.json").read_text(encoding="utf-8"))


def test_bleu1_equals_sacrebleu(golden):
    _, predictions, references = _pairs(golden)
    score = bleu1(predictions, references)
    expected = _values(golden)["bleu"]["sacrebleu"]["bleu1_13a_mixed"]
    assert score.value == pytest.approx(expected["score_0_100"], abs=1e-9)
    # The library's version may move on; every other setting may not.
    assert expected["signature"].rsplit("|", 1)[0] in score.settings


def test_rouge_l_equals_rouge_score_for_every_pair_and_in_the_mean(golden):
    names, predictions, references = _pairs(golden)
    score = rouge_l(predictions, references)
    table = _values(golden)["rouge"]["default_nostem"]["per_pair_PRF"]
    expected = [table[name]["rougeL"][2] for name in names]
    assert score.per_item == pytest.approx(expected, abs=1e-12)
    assert score.value == pytest.approx(sum(expected) / len(expected), abs=1e-12)


def test_exact_match_counts_equal_strings(golden):
    _, predictions, references = _pairs(golden)
    equal = [p == r for p, r in zip(predictions, references, strict=True)]
    assert exact_match(predictions, references).value == sum(equal) / len(equal)
