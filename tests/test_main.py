"""The command line: each of the user's errors is one short message and exit code 2, without jax."""

import json
import os
import re
import resource
import subprocess
import sys
import types
from pathlib import Path

import pytest
from test_trajectory import episode

from mdlm_jax import __main__ as command
from mdlm_jax import check
from mdlm_jax.tokens import trajectory

ROOT = Path(__file__).parent.parent
SMOKE = f"--config={ROOT / 'configs' / 'smoke.py'}"


@pytest.fixture(scope="module")
def without_jax(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which importing jax fails."""
    folder = tmp_path_factory.mktemp("fake_jax")
    (folder / "jax.py").write_text("raise AssertionError('jax was imported')\n")
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


def run(words: list[str], environment: dict[str, str]) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "mdlm_jax", *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == ""
    return done.returncode, done.stderr


def in_workdir(words: list[str], workdir: Path) -> list[str]:
    return [*words, SMOKE, f"--workdir={workdir}"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["colect"], ["unknown program 'colect'; did you mean collect?", "evaluate --what="]),
        (["--config=x.py"], ["no program given", "collect"]),
        (["sft"], ["sft needs --what=world|policy"]),
        (["sft", "--what=agent"], ["--what=agent: sft knows world, policy"]),
        (["grpo", "--what=world"], ["grpo takes no --what"]),
        (["collect"], ["--config is missing", "configs/smoke.py"]),
        (["collect", SMOKE], ["--workdir is missing"]),
        (["collect", "--config"], ["Missing value for flag --config"]),
        (["collect", "--workdir=w", "--config=configs/nope.py"], ["configs/nope.py: no such file"]),
        (["collect", "--workdir=w", "--config=README"], ["README: no such file"]),
    ],
)
def test_a_wrong_command_line_is_one_message(words, expected, without_jax):
    code, text = run(words, without_jax)
    assert code == 2
    assert text.startswith("mdlm-jax: error: ")
    assert "Traceback" not in text
    for part in expected:
        assert part in text


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("--config.grpo.step=3", "config.grpo.step; did you mean config.grpo.steps?"),
        ("--config.lerning_rate=3", "did you mean config.grpo.learning_rate?"),
        ("--config.vocab_size=300", "did you mean config.tokenizer.vocab_size?"),
        ("--config.grpo=3", "config.grpo is a section, not a value; it holds grpo.clip_norm"),
        ("--config.seed=abc", "--config.seed=abc: must be an integer from 0"),
        ("--config.grpo.learning_rate=fast", "--config.grpo.learning_rate=fast: must be a number"),
        ("--config.env.games=twc:a=1,b=2", "must be a tuple like"),
        ("--config.seed", "Missing value for flag --config.seed"),
        ("--config.grpo.steps=0", "config.grpo.steps = 0: must be an integer >= 1"),
        ("--config.world.kind=gpt", "must be one of diffusion, autoregressive"),
        ("--config.rollout.turns=99", "config.rollout.turns = 99, config.env.turns = 4"),
        ("--confg.seed=3", "unknown option --confg.seed"),
        ("--work_dir=x", "unknown option --work_dir; did you mean --workdir?"),
        ("extra", "unexpected 'extra'"),
    ],
)
def test_a_wrong_setting_is_one_message(override, expected, without_jax, tmp_path: Path):
    workdir = tmp_path / "run"
    code, text = run(in_workdir(["collect", override], workdir), without_jax)
    assert code == 2
    assert text.startswith("mdlm-jax: error: ")
    assert expected in text
    assert "Traceback" not in text
    assert not workdir.exists()


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["sft", "--help"]])
def test_help_lists_every_program_with_an_example(words, without_jax):
    code, text = run(words, without_jax)
    assert code == 2
    for name, program in command.PROGRAMS.items():
        assert f"  {name}" in text
        assert program.help in text
    assert "for example: python -m mdlm_jax collect --config=configs/quickstart.py" in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = 1\ndef get_config(:\n", "{file}:2: "),
        ("x = 1\n", "needs a get_config() that returns a ConfigDict"),
        ("def get_config():\n    return 1\n", "needs a get_config() that returns a ConfigDict"),
        ("def get_config():\n    return 1 / 0\n", "{file}:2: ZeroDivisionError: division by zero"),
        ("import no_such_module\n", "{file}:1: ModuleNotFoundError: No module named"),
        (
            "from ml_collections import ConfigDict\n"
            "def get_config():\n"
            "    config = ConfigDict({'seed': 1})\n"
            "    config.seed = 'x'\n",
            "{file}:4: TypeError: ",
        ),
    ],
)
def test_a_broken_config_file_is_named_with_its_line(source, expected, without_jax, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(source)
    words = ["collect", f"--config={file}", f"--workdir={tmp_path / 'run'}"]
    code, text = run(words, without_jax)
    assert code == 2
    assert expected.format(file=file) in text
    assert "Traceback" not in text


def test_a_config_string_reaches_get_config(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from ml_collections import ConfigDict\n"
        "def get_config(name):\n"
        "    return ConfigDict({'name': name})\n"
    )
    assert check.load_config(f"{file}:large").name == "large"


@pytest.mark.parametrize("below", ["", "sub/folder"])
def test_a_file_is_no_workdir(below, without_jax, tmp_path: Path):
    file = tmp_path / "file"
    file.write_text("")
    code, text = run(in_workdir(["collect"], file / below), without_jax)
    assert code == 2
    assert f"--workdir={file / below}: cannot be used: " in text


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
@pytest.mark.parametrize("mode", [0o000, 0o500, 0o300])
def test_a_workdir_needs_permissions(mode, without_jax, tmp_path: Path):
    workdir = tmp_path / "run"
    workdir.mkdir(mode=mode)
    code, text = run(in_workdir(["collect"], workdir), without_jax)
    assert code == 2
    assert "Permission denied" in text


def test_an_unwritable_workdir_is_an_error_for_root_too(without_jax):
    code, text = run(in_workdir(["collect"], Path("/proc/mdlm_jax")), without_jax)
    assert code == 2
    assert "--workdir=/proc/mdlm_jax: cannot be used: " in text


def test_messages_come_at_once(without_jax):
    # Processor time: what the clock says depends on who else is at work.
    start = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    run(["collect", SMOKE], without_jax)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - start < 2


def test_the_quickstart_walks_the_circle():
    script = (ROOT / "launch" / "quickstart.sh").read_text()
    walked = []
    for program, rest in re.findall(r"^step (\w+)(.*)$", script, re.MULTILINE):
        what = re.search(r"--what=(\w+)", rest)
        kind = re.search(r"--config.world.kind=(\w+)", rest)
        walked.append((program, what and what[1], kind and kind[1]))
    # The config's own kind is diffusion, so that only the other one is named.
    named = {"": None, "diffusion": None, "autoregressive": "autoregressive"}
    assert walked == [(s.program, s.what or None, named[s.kind]) for s in command.CIRCLE]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Stands in for every program; records its arguments."""
    module = types.ModuleType("mdlm_jax.programs.fake")
    module.calls = []
    module.run = lambda *arguments: module.calls.append(arguments)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
    fakes = {
        name: entry._replace(module=module.__name__) for name, entry in command.PROGRAMS.items()
    }
    monkeypatch.setattr(command, "PROGRAMS", fakes)
    return module


def test_a_program_gets_its_config_workdir_and_what(program, tmp_path: Path):
    words = ["--config.seed", "7", "--config.env.games=('coin','twc:a=1,b=2')", "sft"]
    # The program may stand anywhere, as with other tools.
    words = [words[-1], "--what=policy", *words[:-1]]
    assert command.main(in_workdir(words, tmp_path / "run")) == 0
    ((config, workdir, what),) = program.calls
    assert (config.seed, workdir, what) == (7, tmp_path / "run", "policy")
    assert config.env.games == ("coin", "twc:a=1,b=2")
    assert config.is_locked


def test_each_step_names_the_next_one(program, tmp_path: Path, capsys: pytest.CaptureFixture):
    words = in_workdir(["collect", "--config.seed=3"], tmp_path)
    walked = []
    while words:
        assert command.main(words) == 0
        walked.append(words)
        _, _, following = capsys.readouterr().out.strip().partition("; next: python -m mdlm_jax ")
        words = following.split()
    records = [json.loads(line) for line in (tmp_path / "wall.jsonl").read_text().splitlines()]
    steps = [command.Step(each["program"], each["what"], each["kind"]) for each in records]
    assert tuple(steps) == command.CIRCLE
    assert all("--config.seed=3" in words and SMOKE in words for words in walked)
    assert all(set(each) == {"program", "what", "kind", "seconds"} for each in records)
    kinds = [arguments[0].world.kind for arguments in program.calls]
    assert kinds == ["diffusion", "diffusion", "autoregressive", *["diffusion"] * 5]


def test_a_users_error_inside_a_program_is_one_message(program, tmp_path: Path, capsys):
    def broken(*_):
        with check.user_errors():
            raise ValueError("train.jsonl:3: torn record")

    program.run = broken
    assert command.main(in_workdir(["collect"], tmp_path)) == 2
    assert capsys.readouterr().err == "mdlm-jax: error: train.jsonl:3: torn record\n"
    assert not (tmp_path / "wall.jsonl").exists()


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["{"], "train.jsonl, line 1: "),
        (['{"env": "textworld_express"}'], "train.jsonl, line 1: "),
        (None, "train.jsonl is missing"),
    ],
)
def test_a_torn_trajectory_file_is_named_with_its_line(lines, expected, tmp_path: Path):
    data = tmp_path / "data"
    data.mkdir()
    if lines is not None:
        (data / "train.jsonl").write_text("\n".join(lines))
    code, text = run(in_workdir(["sft", "--what=world"], tmp_path), dict(os.environ))
    assert code == 2
    assert text.startswith(f"mdlm-jax: error: {data / expected}")
    assert "Traceback" not in text


@pytest.mark.parametrize("torn", ["expert", "train", "dev", "test"])
def test_whichever_file_the_policy_depends_on_is_torn_it_is_named(torn, tmp_path: Path):
    data = tmp_path / "data"
    data.mkdir()
    for name in ("expert", "train", "dev", "test"):
        trajectory.write_jsonl(data / f"{name}.jsonl", [episode()])
    (data / f"{torn}.jsonl").write_text("{")
    code, text = run(in_workdir(["sft", "--what=policy"], tmp_path), dict(os.environ))
    assert code == 2
    assert text.startswith(f"mdlm-jax: error: {data / torn}.jsonl, line 1: ")


def test_a_programmers_error_keeps_its_traceback(program, tmp_path: Path):
    def broken(*_):
        raise ValueError("shapes differ")

    program.run = broken
    with pytest.raises(ValueError, match="shapes differ"):
        command.main(in_workdir(["collect"], tmp_path))


def test_ctrl_c_says_how_to_continue(program, tmp_path: Path, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    program.run = interrupted
    words = in_workdir(["collect"], tmp_path)
    assert command.main(words) == 130
    assert f"to continue: python -m mdlm_jax {' '.join(words)}" in capsys.readouterr().err
