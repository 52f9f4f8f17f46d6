"""Which golden families our code is held against, and which come with a later issue."""

import pytest

COVERED = ("sampling", "grpo", "metrics", "sdar", "wedlm")
LATER = ("qwen3", "mistral", "lfm2", "models", "rope_variants")


def test_every_golden_folder_belongs_to_a_known_family(golden_families: dict[str, list[str]]):
    assert golden_families[""] == []


def test_every_family_is_covered_or_listed_as_coming(golden_families: dict[str, list[str]]):
    assert set(golden_families) - {""} == {*COVERED, *LATER}


@pytest.mark.parametrize("family", LATER)
def test_family(family: str, golden_families: dict[str, list[str]]):
    folders = ", ".join(golden_families[family]) or "no folder here"
    pytest.skip(f"not yet covered: {family} ({folders})")
