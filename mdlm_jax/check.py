"""The user's errors: a config is checked whole, before anything is compiled.

Nothing here imports jax, so that a typo is answered at once.
"""

import contextlib
import runpy
import traceback
from collections.abc import Iterator
from pathlib import Path

from mdlm_jax.rules import CIRCLE, Book


class UserError(ValueError):
    """An error that the user can mend; shown as one message, without a traceback."""


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turns what reading the user's files raises (ValueError, OSError) into a UserError."""
    try:
        yield
    except UserError:
        raise
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error


def load_config(path: str):
    """The locked config that `get_config` of a file returns; "file.py:x" calls get_config("x")."""
    file, *argument = path.split(":", 1)
    if not Path(file).is_file():
        raise UserError(f"config file {file}: no such file")
    try:
        get_config = runpy.run_path(file).get("get_config")
        config = get_config(*argument) if callable(get_config) else None
    except SyntaxError as error:
        raise UserError(f"{error.filename}:{error.lineno}: {error.msg}") from error
    except Exception as error:  # A config file is the user's code: it may raise anything.
        where = _last_line_beside(Path(file), error)
        raise UserError(f"{where}: {type(error).__name__}: {error}") from error
    if not hasattr(config, "lock"):
        raise UserError(f"config file {file}: needs a get_config() that returns a ConfigDict")
    return config.lock()


def _last_line_beside(file: Path, error: Exception) -> str:
    """Deepest "file:line" of the traceback in the folder of the config file."""
    folder = file.resolve().parent
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).resolve().parent == folder]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else str(file)


def check(config, book: Book = CIRCLE) -> None:
    """Raises one UserError that names every problem of a config (an ml_collections ConfigDict)."""
    values, rules = leaves(config), book.rules
    problems = {key: "missing" for key in rules if key not in values}
    for key, value in values.items():
        if key not in rules:
            problems[key] = f"{value!r}: unknown key"
        elif not rules[key].allows(value):
            problems[key] = f"{value!r}: must be {rules[key].allowed}"
    lines = [f"config.{key} = {text}" for key, text in problems.items()]
    for keys, holds, allowed in book.relations:
        # A relation between wrong values would only repeat their own errors.
        if problems.keys().isdisjoint(keys) and not holds(*(values[key] for key in keys)):
            shown = ", ".join(f"config.{key} = {values[key]!r}" for key in keys)
            lines.append(f"{shown}: {allowed}")
    if lines:
        noun = "problem" if len(lines) == 1 else "problems"
        raise UserError("\n  ".join([f"{len(lines)} {noun} in the config", *lines]))


def leaves(config, prefix: str = "") -> dict[str, object]:
    """All values of a nested config by key path, as {"env.name": ..., "world.context": ...}."""
    flat = {}
    for key, value in config.items():
        path = f"{prefix}{key}"
        flat |= leaves(value, f"{path}.") if hasattr(value, "items") else {path: value}
    return flat
