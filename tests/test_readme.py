"""What README.md says can be typed works, and the paths that it names are there."""

import os
import re
import shlex
import subprocess
from pathlib import Path

from circle import ROOT, SMOKE, Circle, completed, environment
from test_chat import make
from test_hub import random_checkpoint

README = (ROOT / "README.md").read_text()
SCRIPTS = sorted(ROOT.glob("launch/*.sh"))
STARTED = {"launch/quickstart.sh", "launch/test.sh"}  # what a newcomer types first


def bash_lines(text: str) -> list[str]:
    """Commands of the fenced bash blocks."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def commands(text: str) -> list[list[str]]:
    """The commands of mdlm_jax, as words."""
    lines = (shlex.split(line, comments=True) for line in bash_lines(text))
    return [words for words in lines if words[:3] == ["python", "-m", "mdlm_jax"]]


def at_toy_size(words: list[str], workdir: Path) -> list[str]:
    """The same command with the smallest config, in another workdir, or with a tiny model."""
    tiny = str(workdir / "tiny_model")
    ours = {"--config": str(SMOKE), "--workdir": str(workdir), "--config.model": tiny}
    names = [word.partition("=")[0] for word in words]
    return [f"{n}={ours[n]}" if n in ours else w for n, w in zip(names, words, strict=True)]


def named_paths(text: str) -> set[str]:
    """Paths in `code` and in links: words with a slash or a file's ending, and no blank."""
    names = re.findall(r"`([\w./-]+)`", text) + re.findall(r"\]\(([\w./-]+)\)", text)
    known = re.compile(r".*/.*|.*\.(py|sh|md|json|jsonl|html)$")
    return {name for name in names if known.match(name)}


def is_there(name: str, workdir: Path) -> bool:
    """Beside the README, in the package, or made by the quickstart."""
    name = name.removeprefix("runs/quickstart/")
    places = (ROOT, ROOT / "mdlm_jax", workdir)
    return any((place / name).exists() for place in places) or (
        "/" not in name and any((ROOT / "mdlm_jax").rglob(name))
    )


def test_every_command_runs(circle: Circle, cache: Path):
    """Those that the quickstart itself ran, word for word, need no second run."""
    printed = re.findall(r"^\$ (python -m mdlm_jax .*)$", circle.said, re.MULTILINE)
    ran = [set(shlex.split(line)) for line in printed]
    found = [at_toy_size(words, circle.workdir) for words in commands(README)]
    assert found
    random_checkpoint(circle.workdir / "tiny_model", "llama", vocab_size=263)
    make(circle.workdir / "tiny_model")
    env = environment(1, cache)
    env["PATH"] = f"{circle.workdir.parent / 'venv' / 'bin'}:{env['PATH']}"
    for words in found:
        if set(words) not in ran:
            completed(words, env)


def test_the_steps_are_in_their_order(circle: Circle):
    ours = [set(at_toy_size(words, circle.workdir)) for words in commands(README)]
    printed = re.findall(r"^\$ (python -m mdlm_jax .*)$", circle.said, re.MULTILINE)
    ran = [set(shlex.split(line)) for line in printed]
    assert [words for words in ours if words in ran] == ran


def test_every_script_is_executable_and_parses():
    assert {script for script in bash_lines(README) if script in STARTED} == STARTED
    for name in STARTED:
        assert os.access(ROOT / name, os.X_OK)
    for script in SCRIPTS:
        done = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), script


def test_a_failed_step_ends_the_quickstart(circle: Circle, cache: Path, tmp_path: Path):
    venv = circle.workdir.parent / "venv"
    settings = {"VENV": str(venv), "CONFIG": str(SMOKE), "WORKDIR": str(tmp_path / "run")}
    done = subprocess.run(
        [ROOT / "launch" / "quickstart.sh", "--config.no.such.key=1"],
        env=environment(1, cache) | settings,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stdout.count("$ python") == 1
    assert "unknown config key config.no.such.key" in done.stderr


def test_the_paths_it_names_are_there(circle: Circle):
    names = named_paths(README)
    assert names
    assert [name for name in sorted(names) if not is_there(name, circle.workdir)] == []


def test_the_checks_can_fail(tmp_path: Path):
    text = "`mdlm_jax/nothing.py` [x](configs/no.py) `runs/a/b` `sft --what=world`\n"
    assert named_paths(text) == {"mdlm_jax/nothing.py", "configs/no.py", "runs/a/b"}
    assert not any(is_there(name, tmp_path) for name in named_paths(text))
    fenced = "```bash\npython -m mdlm_jax sft --config=a.py --workdir=w  # a\n```\n"
    (words,) = commands(text + fenced)
    assert at_toy_size(words, Path("x"))[3:] == ["sft", f"--config={SMOKE}", "--workdir=x"]
