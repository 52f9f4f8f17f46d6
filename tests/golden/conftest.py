"""The golden-file harness: runs a test once for every golden folder of its family.

    @pytest.mark.golden("sdar")  # or several families
    def test_logits(golden: Path): ...

Folders are looked for in $MDLM_JAX_GOLDEN (default: here), so that another set of the same form
can be tried. A family without a folder is skipped by name.
"""

import os
from pathlib import Path

import pytest

PREFIXES = ("sdar", "wedlm", "qwen3", "mistral", "lfm2")  # a family: every folder "<prefix>_*"
NAMES = ("grpo", "sampling", "metrics", "models", "rope_variants")  # exactly one folder


def golden_root() -> Path:
    """The directory that holds the golden folders."""
    return Path(os.environ.get("MDLM_JAX_GOLDEN", Path(__file__).parent))


def golden_dirs(family: str) -> list[Path]:
    """The golden folders of one family, by name."""
    if family not in PREFIXES + NAMES:
        raise ValueError(f"unknown golden family {family!r}; known: {PREFIXES + NAMES}")
    return [folder for folder in _folders() if _family(folder.name) == family]


def _folders() -> list[Path]:
    root = golden_root()
    if not root.is_dir():
        raise pytest.UsageError(f"MDLM_JAX_GOLDEN={root} is not a directory")
    return sorted(path for path in root.iterdir() if path.is_dir() and path.name[0] not in "._")


def _family(folder: str) -> str | None:
    if folder in NAMES:
        return folder
    return next((prefix for prefix in PREFIXES if folder.startswith(f"{prefix}_")), None)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Gives a test that takes `golden` each folder of the family its marker names."""
    if "golden" not in metafunc.fixturenames:
        return
    families = metafunc.definition.get_closest_marker("golden").args
    params = [param for family in families for param in _params(family)]
    metafunc.parametrize("golden", params, scope="module")


def _params(family: str) -> list:
    folders = [pytest.param(path, id=path.name) for path in golden_dirs(family)]
    absent = pytest.mark.skip(reason=f"no golden folder of the family {family} in {golden_root()}")
    return folders or [pytest.param(None, id=family, marks=absent)]


@pytest.fixture
def golden_families() -> dict[str, list[str]]:
    """The names of all golden folders by family; those of no family under ""."""
    families: dict[str, list[str]] = {family: [] for family in (*PREFIXES, *NAMES, "")}
    for folder in _folders():
        families[_family(folder.name) or ""].append(folder.name)
    return families
