"""Files that are there whole or not at all, whenever the program is killed."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Replaces a file by one rename."""
    partial_path = path.with_name(path.name + ".partial")
    partial_path.write_text(text, encoding="utf-8")
    partial_path.replace(path)


def write_json(path: Path, value: dict) -> None:
    """One JSON object, indented."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_lines(path: Path, values: Iterable[dict]) -> None:
    """A JSON object per line."""
    write_text(path, "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values))


def digest(path: Path) -> str:
    """What tells this file's content from another's."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
