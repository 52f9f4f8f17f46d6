"""Episode records: what is read equals what was written, and faults are named."""

import dataclasses
import json

import pytest

from mdlm_jax.tokens import trajectory as records
from mdlm_jax.tokens.trajectory import Scene, Trajectory, Turn

SCENE = Scene(
    instruction="Put things away.",
    state="pantry: You are in the pantry. You see a {shelf}.\nfridge: It's empty inside.",
    goal="put milk in fridge or shelf",
    actions=("take OBJECT", "put OBJECT in PLACE"),
    rules="What is not possible is refused.",
    directives="",
    observation="You are in the pantry.",
)
TURNS = (
    Turn("take milk", "You take the milk.", "playing", 0.5, "gold"),
    Turn(
        'say "a"\n\nAction: b [status: solved, score: 1]',
        "Unknown action.",
        "playing",
        0.5,
        "invalid",
    ),
    Turn("put milk in fridge", "You put the milk in the fridge.", "solved", 1.0, "valid"),
)


def episode(seed: int = 0) -> Trajectory:
    game = {"env": "textworld_express", "game": "twc", "params": "numLocations=1", "fold": "train"}
    return Trajectory(
        **game, seed=seed, kind="mixture", scene=SCENE, turns=TURNS, success=True, score=1.0
    )


def unsourced(turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    return tuple(dataclasses.replace(turn, source="unknown") for turn in turns)


# ---------------------------------------------------------------- prompts


def test_the_world_prompt_has_the_papers_sections_in_order():
    prompt = records.world_prompt(dataclasses.replace(SCENE, directives="Be terse."))
    lines = [line for line in prompt.split("\n") if line.startswith(("## ", "PREDICTION TARGET:"))]
    assert [line.split(":")[0] for line in lines] == [
        "## ENVIRONMENT STATE",
        "## TASK CONTEXT",
        "## TOOL SCHEMAS",
        "## DOMAIN RULES",
        "## STEERING DIRECTIVES",
        "PREDICTION TARGET",
    ]
    for text in (SCENE.state, SCENE.goal, SCENE.instruction, SCENE.rules, "Be terse."):
        assert text in prompt


def test_the_policy_prompt_never_tells_the_state_or_the_goal():
    prompt = records.policy_prompt(SCENE)
    assert SCENE.instruction in prompt
    assert prompt.endswith(SCENE.observation)
    assert "take OBJECT; put OBJECT in PLACE" in prompt
    assert "fridge" not in prompt


# ---------------------------------------------------------------- files


def test_files_give_back_what_was_written(tmp_path):
    episodes = [episode(seed) for seed in range(3)]
    records.write_jsonl(tmp_path / "a.jsonl", episodes)
    assert records.read_jsonl(tmp_path / "a.jsonl") == episodes
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.jsonl"
    records.write_jsonl(path, [episode(7)])

    def broken():
        yield episode(8)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        records.write_jsonl(path, broken())
    assert records.read_jsonl(path) == [episode(7)]


def edited(**changes) -> str:
    """The line of an episode with some keys changed; None removes the key."""
    record = json.loads(records.to_line(episode()))
    for name, value in changes.items():
        *way, last = name.split("__")
        place = record
        for step in way:
            place = place[int(step) if step.isdigit() else step]
        if value is None:
            del place[last]
        else:
            place[last] = value
    return json.dumps(record) + "\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (records.to_line(episode())[:200], "no whole JSON object"),
        ("\n", "no whole JSON object"),
        ("[1]\n", "'record' must be dict, found list"),
        (edited(seed=None), "'seed' is missing"),
        (edited(seed="0"), "'seed' must be int, found str"),
        (edited(seed=True), "'seed' must be int, found bool"),
        (edited(success=1), "'success' must be bool, found int"),
        (edited(format=9), "'format' is 9; allowed: 1"),
        (edited(kind="x"), "'kind' is 'x'; allowed: 'mixture', 'expert'"),
        (edited(scene__goal=None), "'scene.goal' is missing"),
        (edited(scene__actions=[1]), "'scene.actions\\[\\]' must be str, found int"),
        (edited(turns__1__status="won"), "'turns\\[1\\].status' is 'won'; allowed: 'playing'"),
        (edited(turns__2__score="1"), "'turns\\[2\\].score' must be int or float, found str"),
    ],
)
def test_a_fault_is_named_by_file_line_and_key(tmp_path, line, said):
    path = tmp_path / "torn.jsonl"
    path.write_text(records.to_line(episode()) + line)
    with pytest.raises(ValueError, match=f"torn.jsonl, line 2: .*{said}.*; delete the line or"):
        records.read_jsonl(path)


def test_bytes_that_are_no_text_are_a_named_fault(tmp_path):
    path = tmp_path / "torn.jsonl"
    path.write_bytes(b'{"env": "\xff\xfe"}\n')
    with pytest.raises(ValueError, match="torn.jsonl, line 1: "):
        records.read_jsonl(path)


def test_repair_cuts_only_a_torn_last_line(tmp_path):
    path = tmp_path / "a.jsonl.partial"
    whole = records.to_line(episode(0)) + records.to_line(episode(1))
    path.write_text(whole + records.to_line(episode(2))[:50])
    assert records.repair(path) == 2
    assert path.read_text() == whole
    assert records.repair(path) == 2


# ---------------------------------------------------------------- the paper's records


def test_a_record_has_the_papers_form():
    messages = records.to_messages(episode(), 2)["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    assert messages[0]["content"] == records.world_prompt(SCENE)
    head, action = messages[1]["content"].split("\n\nAction: ")
    chat = json.loads(head.removeprefix("State: "))
    assert [message["role"] for message in chat] == ["user", *["assistant", "user"] * 2]
    assert chat[1] == {"role": "assistant", "content": "take milk"}
    assert action == "put milk in fridge"
    assert messages[2]["content"] == "You put the milk in the fridge.\n[status: solved, score: 1.0]"


def test_records_read_back_give_the_same_turns_and_scene():
    exported = [records.to_messages(episode(), turn) for turn in range(len(TURNS))]
    assert records.from_messages(exported) == (SCENE, unsourced(TURNS))


def test_exported_files_read_back_split_into_episodes(tmp_path):
    path = tmp_path / "messages.jsonl"
    records.export_messages(path, [episode(0), episode(1)])
    assert len(path.read_text().splitlines()) == 2 * len(TURNS)
    assert records.import_messages(path) == [(SCENE, unsourced(TURNS))] * 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "Expecting property name"),
        ('{"messages": [{"role": "user", "content": ""}]}', "system, user and assistant"),
        ('{"text": 1}', "system, user and assistant"),
    ],
)
def test_a_wrong_record_is_named_by_file_and_line(tmp_path, line, said):
    path = tmp_path / "messages.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=f"messages.jsonl, line 1: .*{said}"):
        records.import_messages(path)


@pytest.mark.parametrize(
    ("role", "content", "said"),
    [
        ("system", "Hello", "lacks a section"),
        ("user", "take milk", "the user message is not"),
        ("assistant", "You take the milk.", "without a status line"),
    ],
)
def test_a_message_of_another_form_is_refused(role, content, said):
    record = records.to_messages(episode(), 0)
    for message in record["messages"]:
        if message["role"] == role:
            message["content"] = content
    with pytest.raises(ValueError, match=said):
        records.from_messages([record])
