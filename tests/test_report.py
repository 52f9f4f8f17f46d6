"""programs/report.py over a small hand-made workdir: the files that the other programs write."""

import importlib.util
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from ml_collections import ConfigDict

from mdlm_jax.programs import report, report_inputs, report_page
from mdlm_jax.programs.report_tables import agreement_table

ROOM = (
    "You are in the kitchen. In one part of the room you see a dining table, that has a dirty "
    "plate on it. You also see a fridge that is closed. Through the open door, to the south you "
    "see the corridor."
)
TAKEN = "You take the dirty plate from the dining table. The dining table is now empty."


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    """A finished run: two world models, a policy, GRPO and both evaluations."""
    make_workdir(tmp_path)
    return tmp_path


@pytest.fixture
def config() -> ConfigDict:
    """The repository's own defaults."""
    path = Path(__file__).parents[1] / "configs" / "base.py"
    spec = importlib.util.spec_from_file_location("base_config", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config()


def make_workdir(root: Path) -> None:
    """Write every file of the report's contract under `root`."""
    _lines(root / "wall.jsonl", _wall())
    _lines(root / "world_diffusion/metrics.jsonl", _losses(9.0, 0.9))
    _lines(root / "world_autoregressive/metrics.jsonl", _losses(6.6, 0.3))
    _lines(root / "policy/metrics.jsonl", _losses(6.0, 0.5))
    _lines(root / "grpo/metrics.jsonl", _grpo())
    _object(root / "evaluate/world.json", _world())
    _lines(root / "evaluate/world_samples.jsonl", _samples())
    _object(root / "evaluate/agent.json", _agent())
    _lines(root / "evaluate/agent_games.jsonl", _games())
    _lines(root / "evaluate/agent_replay.jsonl", _replays())


def _object(path: Path, value: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def _lines(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _wall() -> list[dict]:
    runs = [
        ("install", "", "", 95.0),
        ("collect", "", "", 61.5),
        ("sft", "world", "diffusion", 200.0),
        ("sft", "world", "diffusion", 140.0),  # resumed
        ("sft", "world", "autoregressive", 310.0),
        ("grpo", "", "", 260.0),
    ]
    return [dict(zip(("program", "what", "kind", "seconds"), run, strict=True)) for run in runs]


def _losses(start: float, end: float) -> list[dict]:
    random = np.random.default_rng(0)
    rows = []
    for step in range(0, 3001, 25):
        loss = end + (start - end) * np.exp(-step / 350)
        row = {"step": step, "loss": float(loss * random.uniform(0.9, 1.1)), "tokens": step * 9000}
        rows.append(row | ({"dev_loss": float(loss * 1.03)} if step % 250 == 0 else {}))
    return rows


def _grpo() -> list[dict]:
    random = np.random.default_rng(1)
    rows = [{"step": 0, "eval_real_success": 0.4}]
    for step in range(1, 61):
        success = float(np.clip(0.45 + 0.006 * step + random.normal(0, 0.06), 0, 1))
        row = {"step": step, "reward": success, "reward_std": 0.3, "loss": 0.01, "kl": 0.002}
        row |= {"entropy": 0.6 - 0.004 * step, "grad_norm": 0.4, "clip_ratio/region_mean": 0.01}
        row |= {"episode/success_rate": success, "episode/turns_mean": 5.2, "step_time": 4.1}
        row |= {"episode/valid_action_ratio": 0.9, "frac_reward_zero_std": 0.2}
        row |= {"env/wm_error_ratio": 0.01, "completions/mean_length": 6.0}
        rows.append(row | ({"eval_real_success": 0.4 + 0.004 * step} if step % 20 == 0 else {}))
    return rows


def _system(match: float, speed: float) -> dict:
    around = [match - 0.04, match + 0.04]
    return {
        "exact_match": {"value": match, "interval": around},
        "observation_exact_match": {"value": match + 0.01, "interval": around},
        "status_accuracy": {"value": 0.99, "interval": [0.98, 1.0]},
        "bleu1": {"value": 95.25, "settings": "sacrebleu|nrefs:1|case:mixed|tok:13a"},
        "rouge_l": {"value": 0.957, "interval": [0.94, 0.97]},
        "tokens_per_forward": speed,
        "samples": 400,
        "seconds": 12.0,
        "by_source": {"gold": 0.9, "valid": 0.8, "invalid": 0.7},
    }


def _world() -> dict:
    return {
        "settings": {"fold": "test", "temperature": 0.0, "threshold": 0.9, "block_length": 8},
        "systems": {
            "diffusion": _system(0.82, 2.3) | {"tokens_per_denoise": 3.0},
            "diffusion_static": _system(0.84, 0.9) | {"tokens_per_denoise": 1.0},
            "autoregressive": _system(0.8, 1.0),
        },
    }


def _sample(system: str, reference: str, prediction: str, turn: int) -> dict:
    tokens = re.findall(r"\s?\w+|[^\w\s]", prediction)
    random = np.random.default_rng(turn)
    order = [int(3 * ((i + 3) // 8) + random.integers(1, 4)) for i in range(len(tokens))]
    return {
        "system": system, "game": "twc", "fold": "test", "seed": 7, "turn": turn,
        "action": "look around", "reference": reference, "prediction": prediction,
        "status_reference": "ongoing", "status_prediction": "ongoing",
        "tokens": tokens, "order": order, "block_length": 8, "block_offset": 3,
    }  # fmt: skip


def _samples() -> list[dict]:
    return [
        _sample("diffusion", TAKEN, TAKEN, 1),
        _sample("diffusion", ROOM, ROOM, 2),
        _sample("diffusion", ROOM, ROOM.replace("dirty plate", "clean <mug>"), 3),
        _sample("autoregressive", ROOM, ROOM, 4),
    ]


def _agent() -> dict:
    def policy(real: float, dream: float) -> dict:
        return {
            "real_success": {"value": real, "interval": [real - 0.1, real + 0.09]},
            "dream_success": {"value": dream, "interval": [dream - 0.1, dream + 0.09]},
            "real_turns": 5.4,
            "real_valid_action_ratio": 0.91,
            "games": 100,
        }

    return {
        "settings": {"fold": "test", "temperature": 0.0},
        "policies": {"before": policy(0.42, 0.47), "after": policy(0.61, 0.68)},
        "difference": {"value": 0.19, "interval": [0.08, 0.3]},
        "expert_success": {"value": 1.0, "interval": [1.0, 1.0]},
    }


def _games() -> list[dict]:
    """Seeds 0..3: won in both, in the dream only, in reality only, in neither."""
    rows = []
    for policy in ("before", "after"):
        for where, wins in (
            ("real", (True, False, True, False)),
            ("dream", (True, True, False, False)),
        ):
            for seed, success in enumerate(wins):
                game = {"game": "twc", "fold": "test", "seed": seed, "turns": []}
                rows.append({"policy": policy, "where": where, "success": success, **game})
    return rows


def _replays() -> list[dict]:
    first = {"action": "look around", "real": ROOM, "imagined": ROOM}
    second = {
        "action": "take dirty plate",
        "real": TAKEN,
        "imagined": TAKEN.replace("empty", "red"),
    }
    same = {"real_status": "ongoing", "imagined_status": "ongoing"}
    return [
        {"policy": "before", "game": "twc", "seed": 1, "turns": [first | same]},
        {"policy": "after", "game": "twc", "seed": 1, "turns": [first | same]},
        {"policy": "after", "game": "twc", "seed": 2, "turns": [first | same, second | same]},
    ]


class _Fetches(HTMLParser):
    """Collects every address that a browser would load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "srcset") or (name.endswith("href") and not value.startswith("#")):
                self.found.append(f"{tag} {name}={value}")
        if tag in ("script", "link", "iframe", "img"):
            self.found.append(tag)


def test_results_have_the_promised_keys(workdir, config):
    report.run(config, workdir)
    results = json.loads((workdir / "results.json").read_text(encoding="utf-8"))
    assert results["world_exact_match"] == {
        "diffusion": 0.82, "diffusion_static": 0.84, "ar": 0.8,
    }  # fmt: skip
    assert results["world_exact_match_interval"]["ar"] == pytest.approx([0.76, 0.84])
    assert (results["real_success_before"], results["real_success_after"]) == (0.42, 0.61)
    assert (results["dream_success_before"], results["dream_success_after"]) == (0.47, 0.68)
    for name in ("real_success_before", "real_success_after", "real_success_gain",
                 "dream_success_before", "dream_success_after"):  # fmt: skip
        low, high = results[f"{name}_interval"]
        assert low <= results[name] <= high


def test_wall_seconds_add_the_parts_of_a_resumed_program(workdir, config):
    report.run(config, workdir)
    seconds = json.loads((workdir / "results.json").read_text(encoding="utf-8"))["wall_seconds"]
    assert seconds == {
        "install": 95.0, "collect": 61.5, "sft world diffusion": 340.0,
        "sft world autoregressive": 310.0, "grpo": 260.0, "total": 1066.5,
    }  # fmt: skip


def test_page_is_self_contained_and_shows_every_part(workdir, config):
    report.run(config, workdir)
    html = (workdir / "report.html").read_text(encoding="utf-8")
    fetches = _Fetches()
    fetches.feed(html)
    assert fetches.found == []
    assert "@import" not in html
    assert not re.search(r"url\((?!#)", html)
    for part in ("World model", "Order of unmasking", "One episode, real and imagined",
                 "GRPO inside the world model", "Reproduce", "+19.0"):  # fmt: skip
        assert part in html
    assert "clean <mug>" not in html
    assert "&lt;mug&gt;" in html


def test_terminal_shows_the_tables(workdir, config, capsys):
    report.run(config, workdir)
    out = capsys.readouterr().out
    assert re.search(r"Exact match +82.0% \[78.0, 86.0\]", out)
    assert re.search(r"After GRPO +61.0% \[51.0, 70.0\] +68.0% \[58.0, 77.0\] +\+7.0 points", out)


def test_missing_files_are_all_named_with_their_command(workdir, config):
    (workdir / "evaluate/agent.json").unlink()
    (workdir / "world_autoregressive/metrics.jsonl").unlink()
    with pytest.raises(ValueError) as caught:
        report.run(config, workdir)
    message = str(caught.value)
    assert f"python -m mdlm_jax evaluate --what=agent --config=... --workdir={workdir}" in message
    assert "world_autoregressive/metrics.jsonl" in message
    assert "--config.world.kind=autoregressive" in message
    assert not (workdir / "results.json").exists()


def test_torn_line_is_named(workdir, config):
    path = workdir / "grpo/metrics.jsonl"
    path.write_text(path.read_text(encoding="utf-8")[:-20], encoding="utf-8")
    with pytest.raises(ValueError, match=r"grpo/metrics.jsonl, line 61: not JSON"):
        report.run(config, workdir)


def test_absent_key_is_named(workdir, config):
    _lines(workdir / "evaluate/agent_replay.jsonl", [{"policy": "after", "game": "twc", "seed": 1}])
    with pytest.raises(ValueError, match=r"agent_replay.jsonl, line 1: no turns"):
        report.run(config, workdir)


def test_absent_system_is_named(workdir, config):
    world = _world()
    del world["systems"]["autoregressive"]
    _object(workdir / "evaluate/world.json", world)
    with pytest.raises(ValueError, match=r"world\.json has no autoregressive; run python -m"):
        report.run(config, workdir)


def test_summary_says_what_the_numbers_say(workdir):
    inputs = report_inputs.read_inputs(workdir)
    inputs.agent["difference"] = {"value": -0.02, "interval": [-0.1, 0.06]}
    text = report.summary(report.make_results(inputs))
    assert "lowered" in text
    assert "includes zero" in text


def test_agreement_counts_games_by_both_outcomes():
    table = agreement_table(_games())
    assert table.rows == (
        ("Before GRPO", "1", "1", "1", "1"),
        ("After GRPO", "1", "1", "1", "1"),
    )


def test_drawn_sample_is_a_right_and_long_one():
    assert report_page._choose_sample(_samples())["turn"] == 2


def test_a_step_that_was_logged_twice_keeps_its_last_line():
    rows = [{"step": 1, "loss": 3}, {"step": 2, "loss": 2}, {"step": 2, "loss": 1}]
    assert report_inputs._last_of_each_step(rows) == [
        {"step": 1, "loss": 3},
        {"step": 2, "loss": 1},
    ]


def test_shown_episode_is_the_trained_policys_with_a_difference():
    assert report_page._choose_replay(_replays())["seed"] == 2


def test_a_run_of_one_step_whose_model_wrote_nothing_has_a_report(workdir, config):
    row = {"step": 1, "loss": 6.0, "reward": 0.0, "episode/success_rate": 0.0}
    for name in ("world_diffusion", "world_autoregressive", "policy", "grpo"):
        _lines(workdir / name / "metrics.jsonl", [row])
    silent = [sample | {"prediction": "", "tokens": [], "order": []} for sample in _samples()]
    _lines(workdir / "evaluate/world_samples.jsonl", silent)
    report.run(config, workdir)
    assert "The model wrote no token." in (workdir / "report.html").read_text(encoding="utf-8")
