"""Who may import whom, and how long things may get (the floors of the design).

Floor 0 (files beside __main__.py) imports numpy, jax and flax.struct; floor 1 (the library folders)
imports floor 0 and its own folder; programs/ imports anything below; __main__ imports floor 0.
"""

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "mdlm_jax"
LIBRARIES = ("tokens", "models", "diffusion", "autoregressive", "rl", "envs", "metrics", "train")
FLOOR_0_MAY_IMPORT = {"numpy", "jax", "flax.struct"}
NOWHERE = {"torch", "tensorflow", "keras", "flax.nnx"}
PEER = "mdlm_jax.programs.bench_peer"  # what we are measured against; imported by a bench only
READS_CONFIG = ("programs", "__main__", "check")
VAGUE_NAMES = {"utils", "util", "helpers", "common", "misc"}
FILE_LINES = 400
FUNCTION_LINES = 60
RUN_LINES = 120  # the main function of a program
PARAMETERS = 10


def module_name(file: Path) -> str:
    """ "mdlm_jax.rl.loss"; a folder's __init__.py is the folder."""
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(file): file.read_text() for file in sorted(PACKAGE.rglob("*.py"))}


def imports(module: str, source: str) -> Iterator[str]:
    """Dotted names that a module imports; "from a import b" gives "a.b"."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = module.split(".")[: -node.level] if node.level else []
            prefix = ".".join([*parent, *([node.module] if node.module else [])])
            yield from (f"{prefix}.{alias.name}" for alias in node.names)


def place(module: str) -> str:
    """ "rl" of mdlm_jax.rl.loss, "ops" of mdlm_jax.ops, "" of mdlm_jax."""
    return (module.split(".") + [""])[1]


def is_under(name: str, roots: set[str]) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def import_violations(module: str, source: str) -> Iterator[str]:
    here = place(module)
    for name in imports(module, source):
        if is_under(name, NOWHERE) and module != PEER:
            yield f"{module} imports {name}"
        if is_under(name, {"ml_collections"}) and here not in READS_CONFIG:
            yield f"{module} imports {name}: only programs read a config"
        if name.startswith("mdlm_jax.") and not may_import(here, place(name)):
            yield f"{module} may not import {name}"
        is_foreign = not is_under(name, {"mdlm_jax", *sys.stdlib_module_names})
        if is_floor_0(here) and is_foreign and not is_under(name, FLOOR_0_MAY_IMPORT):
            yield f"{module} may not import {name}: floor 0 has numpy, jax and flax.struct"


def is_floor_0(place: str) -> bool:
    return place not in (*LIBRARIES, "programs", "__main__", "")


def may_import(here: str, there: str) -> bool:
    if here == "programs":
        return there != "__main__"
    if here in LIBRARIES:
        return there == here or is_floor_0(there)
    return is_floor_0(there)


def code_violations(module: str, source: str) -> Iterator[str]:
    if module.rpartition(".")[2] in VAGUE_NAMES:
        yield f"{module}: the name says nothing"
    if source.count("\n") > FILE_LINES:
        yield f"{module} has more than {FILE_LINES} lines"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from function_violations(module, node)
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield f"{module}:{node.lineno}: bare except"
        if isinstance(node, ast.Attribute | ast.Name | ast.alias):
            yield from name_violations(module, node)


def function_violations(module: str, function: ast.FunctionDef) -> Iterator[str]:
    name = f"{module}.{function.name}"
    is_run = place(module) == "programs" and function.name == "run"
    limit = RUN_LINES if is_run else FUNCTION_LINES
    if code_lines(function) > limit:
        yield f"{name} has more than {limit} lines"
    arguments = function.args
    if len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs) > PARAMETERS:
        yield f"{name} has more than {PARAMETERS} parameters"


def code_lines(function: ast.FunctionDef) -> int:
    """Lines from def to end; the docstring is free, so that nobody saves on it."""
    first = function.body[0]
    has_docstring = ast.get_docstring(function) is not None
    docstring = first.end_lineno - first.lineno + 1 if has_docstring else 0
    return function.end_lineno - function.lineno + 1 - docstring


def name_violations(module: str, node: ast.Attribute | ast.Name | ast.alias) -> Iterator[str]:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None) or node.name
    name = name.rpartition(".")[2]
    if name == "make_mesh" and module != "mdlm_jax.train.mesh" and is_jax_name(node):
        yield f"{module}:{node.lineno}: jax.make_mesh outside train/mesh.py (its axes are Explicit)"
    if name == "ConfigDict" and place(module) not in READS_CONFIG:
        yield f"{module}:{node.lineno}: only programs read a config"


def is_jax_name(node: ast.AST) -> bool:
    """jax.make_mesh, or make_mesh imported from somewhere; not train.mesh.make_mesh."""
    if isinstance(node, ast.Attribute):
        return isinstance(node.value, ast.Name) and node.value.id == "jax"
    return isinstance(node, ast.alias)


def import_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Which modules each module imports, among the given ones."""
    graph = {}
    for module, source in sources.items():
        names = set(imports(module, source))
        parents = {name.rpartition(".")[0] for name in names}
        graph[module] = (names | parents) & (sources.keys() - {module})
    return graph


def find_cycle(sources: dict[str, str]) -> list[str]:
    """Modules that import each other in a circle; [] where there are none."""
    try:
        TopologicalSorter(import_graph(sources)).prepare()
    except CycleError as error:
        return error.args[1]
    return []


@pytest.mark.parametrize("module", SOURCES)
def test_module_imports_only_what_its_floor_may(module: str):
    assert list(import_violations(module, SOURCES[module])) == []


@pytest.mark.parametrize("module", SOURCES)
def test_module_is_short_and_plain(module: str):
    assert list(code_violations(module, SOURCES[module])) == []


def test_no_modules_import_each_other_in_a_circle():
    assert find_cycle(SOURCES) == []


def test_every_folder_is_a_library_or_the_programs():
    folders = {file.parent.name for file in PACKAGE.glob("*/*.py")}
    assert folders == {*LIBRARIES, "programs"}


LONG = "def f():\n" + "    x = 1\n" * FUNCTION_LINES


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("mdlm_jax.rl.rollout", "from mdlm_jax.models import transformer"),
        ("mdlm_jax.rl.rollout", "import mdlm_jax.models.transformer"),
        ("mdlm_jax.rl.rollout", "from mdlm_jax import models"),
        ("mdlm_jax.rl.rollout", "from ..diffusion.denoise import generate"),
        ("mdlm_jax.rl.rollout", "def f():\n    from mdlm_jax.programs import build"),
        ("mdlm_jax.rl.rollout", "from ml_collections import ConfigDict"),
        ("mdlm_jax.rl.rollout", "import torch"),
        ("mdlm_jax.programs.sft", "import tensorflow as tf"),
        ("mdlm_jax.programs.sft", "from mdlm_jax.__main__ import main"),
        ("mdlm_jax.ops", "from mdlm_jax.rl import loss"),
        ("mdlm_jax.ops", "import optax"),
        ("mdlm_jax.ops", "from flax import linen as nn"),
        ("mdlm_jax.__main__", "from mdlm_jax.programs import sft"),
    ],
)
def test_a_planted_import_is_caught(module: str, source: str):
    assert list(import_violations(module, source))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "mdlm_jax.rl.rollout",
            "import jax\nfrom mdlm_jax import ops\nfrom mdlm_jax.rl import loss",
        ),
        (
            "mdlm_jax.ops",
            "from flax import struct\nimport numpy as np\nfrom mdlm_jax import structs",
        ),
        ("mdlm_jax.tokens.trajectory", "import tensorflow_datasets"),
        ("mdlm_jax.programs.sft", "from ml_collections import ConfigDict\nimport mdlm_jax.rl.loss"),
    ],
)
def test_an_allowed_import_passes(module: str, source: str):
    assert list(import_violations(module, source)) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("mdlm_jax.rl.utils", ""),
        ("mdlm_jax.rl.loss", "\n" * (FILE_LINES + 1)),
        ("mdlm_jax.rl.loss", LONG),
        ("mdlm_jax.programs.sft", LONG),
        (
            "mdlm_jax.programs.sft",
            LONG.replace("def f", "def run") + "    y = 1\n" * FUNCTION_LINES,
        ),
        ("mdlm_jax.rl.loss", "def f(a, b, c, d, e, *, f, g, h, i, j, k): ..."),
        ("mdlm_jax.rl.loss", "try:\n    x = 1\nexcept:\n    pass"),
        ("mdlm_jax.rl.loss", "import jax\nmesh = jax.make_mesh((1,), ('data',))"),
        ("mdlm_jax.rl.loss", "from jax import make_mesh"),
        ("mdlm_jax.rl.loss", "def f(config: ml_collections.ConfigDict): ..."),
    ],
)
def test_planted_code_is_caught(module: str, source: str):
    assert list(code_violations(module, source))


def test_the_run_of_a_program_may_be_longer():
    assert list(code_violations("mdlm_jax.programs.sft", LONG.replace("def f", "def run"))) == []


def test_a_planted_cycle_is_caught():
    sources = {
        "mdlm_jax.rl.loss": "from mdlm_jax.rl import rollout",
        "mdlm_jax.rl.rollout": "def f():\n    from mdlm_jax.rl.loss import grpo_loss",
    }
    assert find_cycle(sources)
