"""The one command of mdlm_jax: checks everything that can be checked, then runs one program.

python -m mdlm_jax PROGRAM --config=configs/x.py [--config.a.b=value ...] --workdir=DIR [--what=...]

The steps of the circle share a workdir. Programs that stand alone need none.
"""

import difflib
import importlib
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from absl import flags
from ml_collections import ConfigDict, config_flags

from mdlm_jax import check, rules
from mdlm_jax.check import UserError
from mdlm_jax.rules import Book


class Program(NamedTuple):
    """One entry of the command: a module with `run(config, workdir)` or `run(..., what)`.

    A program with a `config` of its own stands outside the circle: `run(config)` or
    `run(config, what)`, without a workdir.
    """

    module: str
    help: str
    whats: tuple[str, ...] = ()
    book: Book = rules.CIRCLE
    config: str = ""  # the file in configs/ that is taken where none is given


PROGRAMS = {
    "collect": Program(
        "mdlm_jax.programs.collect", "play the real environment, write trajectory files"
    ),
    "sft": Program(
        "mdlm_jax.programs.sft",
        "train the world model, or warm-start the policy",
        ("world", "policy"),
    ),
    "evaluate": Program(
        "mdlm_jax.programs.evaluate",
        "score the world model on held-out games, or play them with the agent",
        ("world", "agent"),
    ),
    "grpo": Program(
        "mdlm_jax.programs.grpo", "improve the policy on rollouts inside the world model"
    ),
    "report": Program("mdlm_jax.programs.report", "write report.html and results.json"),
    "generate": Program(
        "mdlm_jax.programs.generate",
        "let a released policy or world model write",
        book=rules.GENERATE,
        config="generate.py",
    ),
    "convert": Program(
        "mdlm_jax.programs.convert",
        "turn a GGUF file into a checkpoint folder",
        book=rules.CONVERT,
        config="convert.py",
    ),
    "bench": Program(
        "mdlm_jax.programs.bench",
        "measure what this machine does with released shapes",
        ("load", "decode"),
        book=rules.BENCH,
        config="bench.py",
    ),
}


class Step(NamedTuple):
    """One step of the circle; `kind` is the world model's, where the step depends on it."""

    program: str
    what: str = ""
    kind: str = ""


CIRCLE = (
    Step("collect"),
    Step("sft", "world", "diffusion"),
    Step("sft", "world", "autoregressive"),
    Step("sft", "policy"),
    Step("evaluate", "world"),
    Step("grpo"),
    Step("evaluate", "agent"),
    Step("report"),
)

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
KIND_OVERRIDE = "--config.world.kind"
HELP_WORDS = {"-h", "-help", "--help", "--helpfull", "--helpshort"}


class Command(NamedTuple):
    """A command line that passed every check."""

    program: str
    what: str
    config_path: str
    overrides: list[str]
    config: ConfigDict
    workdir: Path | None  # None for programs that stand alone

    @property
    def step(self) -> Step:
        """The place of this command in the circle."""
        trains_world = (self.program, self.what) == ("sft", "world")
        return Step(self.program, self.what, self.config.world.kind if trains_world else "")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code: 0, 2 (the user's error) or 130 (Ctrl-C)."""
    words = list(sys.argv[1:] if argv is None else argv)
    if HELP_WORDS.intersection(words):
        print(usage(), file=sys.stderr)
        return 2
    try:
        _run(_parse(words))
    except UserError as error:
        print(f"mdlm-jax: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        again = shlex.join(["python", "-m", "mdlm_jax", *words])
        print(f"\nmdlm-jax: interrupted; to continue: {again}", file=sys.stderr)
        return 130
    return 0


def usage() -> str:
    """What the command is and does: every program in a line, and an example."""
    lines = ["python -m mdlm_jax PROGRAM --config=FILE [--config.KEY=VALUE ...] --workdir=DIR", ""]
    for name, program in PROGRAMS.items():
        what = f" --what={'|'.join(program.whats)}" if program.whats else ""
        lines.append(f"  {name + what:<30}{program.help}")
    example = "python -m mdlm_jax collect --config=configs/quickstart.py --workdir=runs/quickstart"
    return "\n".join([*lines, "", f"for example: {example}"])


def _parse(words: list[str]) -> Command:
    """Checks a command line from left to right; the workdir comes last because it is created."""
    options, rest = _parse_options(words)
    if not rest or rest[0].startswith("-"):
        raise UserError(f"no program given\n{usage()}")
    name, *overrides = rest
    if name not in PROGRAMS:
        raise UserError(f"unknown program {name!r}{_did_you_mean(name, PROGRAMS)}\n{usage()}")
    program = PROGRAMS[name]
    what, overrides = _take_what(program, options.what, overrides)
    what = _checked_what(name, what)
    file = options.config or _default_config(program)
    if not options.workdir and not program.config:
        raise UserError("--workdir is missing: the folder where this run's files go")
    if options.workdir and program.config:
        raise UserError(f"{name} takes no --workdir (got {options.workdir!r})")
    config = check.load_config(file)
    _override(config, overrides, program.book)
    check.check(config, program.book)
    workdir = None if program.config else _checked_workdir(options.workdir)
    return Command(name, what, file, overrides, config, workdir)


def _take_what(
    program: Program, what: str | None, words: list[str]
) -> tuple[str | None, list[str]]:
    """`bench load` says the same as `bench --what=load`."""
    if what is None and words and words[0] in program.whats:
        return words[0], words[1:]
    return what, words


def _default_config(program: Program) -> str:
    file = CONFIGS / program.config
    if not program.config or not file.is_file():
        raise UserError(f"--config is missing; {_known_configs()}")
    return str(file)


def _parse_options(words: list[str]) -> tuple[flags.FlagValues, list[str]]:
    """Takes --config, --workdir and --what; gives back all other words in order."""
    # An own FlagValues: the global one belongs to whoever imports this module.
    options = flags.FlagValues()
    options.set_gnu_getopt(True)
    for name in ("config", "workdir", "what"):
        flags.DEFINE_string(name, None, "", flag_values=options)
    try:
        _, *rest = options(["mdlm-jax", *words], known_only=True)
    except flags.Error as error:
        raise UserError(str(error)) from error
    return options, rest


def _checked_what(name: str, what: str | None) -> str:
    allowed = PROGRAMS[name].whats
    if what is None and allowed:
        raise UserError(f"{name} needs --what={'|'.join(allowed)}")
    if what is not None and not allowed:
        raise UserError(f"{name} takes no --what (got {what!r})")
    if what is not None and what not in allowed:
        raise UserError(f"--what={what}: {name} knows {', '.join(allowed)}")
    return what or ""


def _known_configs() -> str:
    if not CONFIGS.is_dir():
        return "give the path of a config file"
    names = ", ".join(f"configs/{file.name}" for file in sorted(CONFIGS.glob("*.py")))
    return f"there are {names}"


def _override(config: ConfigDict, words: list[str], book: Book) -> None:
    """Writes --config.a.b=value words into the config."""
    _check_overrides(words, check.leaves(config))
    overrides = flags.FlagValues()
    try:
        config_flags.DEFINE_config_dict("config", config, flag_values=overrides, sys_argv=words)
        _, *rest = overrides(["mdlm-jax", *words])
    except flags.IllegalFlagValueError as error:
        raise UserError(_wrong_type(str(error), book)) from error
    except (flags.Error, ValueError) as error:
        raise UserError(str(error)) from error
    if rest:
        raise UserError(f"unexpected {rest[0]!r}; a setting is written --config.a.b=value")


def _wrong_type(absl_text: str, book: Book) -> str:
    """Says what is allowed, where absl says "flag --config.seed=x: (Python's parser error)"."""
    setting = absl_text.removeprefix("flag ").partition(": ")[0]
    key = setting.partition("=")[0].removeprefix("--config.")
    return f"{setting}: must be {book.rules[key].allowed}"


def _check_overrides(words: list[str], known: dict[str, object]) -> None:
    is_value = False
    for word in words:
        if not is_value and word.startswith("-"):
            _check_override(word.lstrip("-").partition("=")[0], known)
        # "--config.a.b value" is two words; absl finds values that belong to nothing.
        is_value = not is_value and word.startswith("-") and "=" not in word


def _check_override(name: str, known: dict[str, object]) -> None:
    if not name.startswith("config."):
        hint = _did_you_mean(name, ("config", "workdir", "what"), prefix="--")
        raise UserError(f"unknown option --{name}{hint}")
    key = name.removeprefix("config.")
    inside = [path for path in known if path.startswith(f"{key}.")]
    if inside:
        raise UserError(f"config.{key} is a section, not a value; it holds {', '.join(inside)}")
    if key not in known:
        raise UserError(f"unknown config key config.{key}{_suggest_key(key, known)}")


def _suggest_key(key: str, known: dict[str, object]) -> str:
    """The keys of the same last name where there are any, else the nearest spelling."""
    last = key.rpartition(".")[2]
    namesakes = [path for path in known if path.rpartition(".")[2] == last]
    if namesakes:
        return f"; did you mean {' or '.join(f'config.{path}' for path in namesakes)}?"
    return _did_you_mean(key, known, prefix="config.")


def _did_you_mean(word: str, known: Sequence[str] | dict[str, object], prefix: str = "") -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {prefix}{near[0]}?" if near else ""


def _checked_workdir(path: str) -> Path:
    """Makes the folder and tries it, so that a program never fails after hours of work."""
    workdir = Path(path)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        os.listdir(workdir)
        with tempfile.TemporaryFile(dir=workdir):
            pass
    except OSError as error:
        raise UserError(f"--workdir={path}: cannot be used: {error.strerror}") from error
    return workdir


def _run(command: Command) -> None:
    start = time.monotonic()
    if command.workdir is not None:
        # jax reads this when it is imported, and programs import jax.
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(command.workdir / ".jax_cache"))
    run = importlib.import_module(PROGRAMS[command.program].module).run
    run(command.config, *filter(None, (command.workdir, command.what)))
    if command.workdir is None:
        return
    seconds = time.monotonic() - start
    record = {**command.step._asdict(), "seconds": round(seconds, 3)}
    with open(command.workdir / "wall.jsonl", "a") as file:
        file.write(json.dumps(record) + "\n")
    print(f"done in {seconds:.0f} s{_next_command(command)}", flush=True)


def _next_command(command: Command) -> str:
    """ "; next: ..." with the command of the circle's next step, if there is one."""
    place = CIRCLE.index(command.step)
    if place + 1 == len(CIRCLE):
        return ""
    step = CIRCLE[place + 1]
    words = ["python", "-m", "mdlm_jax", step.program]
    words += [f"--what={step.what}"] if step.what else []
    words += [f"--config={command.config_path}"]
    words += [word for word in command.overrides if not word.startswith(KIND_OVERRIDE)]
    words += [f"{KIND_OVERRIDE}={step.kind}"] if step.kind == "autoregressive" else []
    words += [f"--workdir={command.workdir}"]
    return f"; next: {shlex.join(words)}"


if __name__ == "__main__":
    sys.exit(main())
