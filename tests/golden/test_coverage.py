"""Which golden families our code is held against."""

COVERED = {
    *("sampling", "grpo", "metrics", "models", "rope_variants"),
    *("qwen3", "mistral", "lfm2", "sdar", "wedlm"),
}


def test_every_golden_folder_belongs_to_a_known_family(golden_families: dict[str, list[str]]):
    assert golden_families[""] == []


def test_every_family_is_covered(golden_families: dict[str, list[str]]):
    assert set(golden_families) - {""} == COVERED
