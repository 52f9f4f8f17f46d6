"""Every config loads, locks, passes its check and builds shapes; every knob has a rule."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from ml_collections import config_flags

from mdlm_jax import check, rules
from mdlm_jax.__main__ import CIRCLE, PROGRAMS
from mdlm_jax.programs import shapes

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "configs").glob("*.py"))
BASE = str(ROOT / "configs" / "base.py")


def base():
    return check.load_config(BASE).unlock()


def problems(config) -> str:
    with pytest.raises(check.UserError) as caught:
        check.check(config)
    return str(caught.value)


OWN = {program.config: program.book for program in PROGRAMS.values() if program.config}
CIRCLES = [file for file in FILES if file.name not in OWN]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_config_loads_locks_and_passes_check(file: Path):
    config = check.load_config(str(file))
    for key, value in check.leaves(config).items():
        if value == "":  # what a user must give
            config.update_from_flattened_dict({key: "given"})
    check.check(config, OWN.get(file.name, rules.CIRCLE))
    with pytest.raises(AttributeError):
        config.sead = 1


@pytest.mark.parametrize("file", CIRCLES, ids=lambda file: file.stem)
def test_config_builds_shapes(file: Path):
    built = shapes.shapes(check.load_config(str(file)))
    leaves = jax.tree.leaves(built)
    assert leaves
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)


@pytest.mark.parametrize("file", CIRCLES, ids=lambda file: file.stem)
def test_config_has_the_keys_of_base(file: Path):
    assert check.leaves(check.load_config(str(file))).keys() == check.leaves(base()).keys()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_config_says_what_it_is_for(file: Path):
    assert file.read_text().startswith('"""')


def test_config_loads_from_anywhere_without_the_repository_on_the_path(tmp_path: Path):
    code = f"import runpy; print(runpy.run_path({str(FILES[-1])!r})['get_config']().seed)"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "0", done.stderr


@pytest.mark.filterwarnings("ignore:the load_module")
def test_ml_collections_own_flag_loads_a_config_too():
    parser = config_flags.config_flags.ConfigFileFlagParser("config")
    assert parser.parse(str(ROOT / "configs" / "smoke.py")).seed == 0


def test_every_knob_has_a_rule_and_every_rule_a_knob():
    assert rules.CIRCLE.rules.keys() == check.leaves(base()).keys()
    for name, book in OWN.items():
        config = check.load_config(str(ROOT / "configs" / name))
        assert book.rules.keys() == check.leaves(config).keys()


def test_a_window_wider_than_a_block_is_refused_only_where_it_is_used():
    config = base()
    config.world.stream.window = 2 * config.world.block_length
    check.check(config)


def test_every_relation_is_between_knobs():
    knobs = rules.CIRCLE.rules.keys()
    assert {key for relation in rules.CIRCLE.relations for key in relation.keys} <= knobs


def test_allowed_words_are_those_of_the_code():
    from mdlm_jax.diffusion.losses import WEIGHTS
    from mdlm_jax.diffusion.strategies import PRESETS, STRATEGIES
    from mdlm_jax.envs.registry import ENVS
    from mdlm_jax.programs.objectives import OBJECTIVES
    from mdlm_jax.rl.advantage import SCALES
    from mdlm_jax.rl.loss import LOSS_TYPES

    assert set(rules.STRATEGIES) == set(STRATEGIES)
    assert set(rules.OBJECTIVES) == set(OBJECTIVES)
    assert set(rules.MLM_WEIGHTINGS) == set(WEIGHTS)
    assert set(rules.PRESETS) == set(PRESETS) - {"wedlm_block"}  # that one is WeDLM's own
    assert set(rules.ENVIRONMENTS) == set(ENVS)
    assert set(rules.SCALE_REWARDS) == set(SCALES)
    assert set(rules.LOSS_TYPES) == set(LOSS_TYPES)


def test_the_circle_uses_every_program_and_what():
    steps = {(step.program, step.what) for step in CIRCLE}
    programs = PROGRAMS.items()
    assert steps == {
        (name, what)
        for name, entry in programs
        for what in entry.whats or ("",)
        if not entry.config
    }


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", -1),
        ("env.name", "zork"),
        ("env.games", ()),
        ("env.games", ("twc:numLocations",)),
        ("env.games", ("twc numLocations=1",)),
        ("env.workers", 0),
        ("collect.gold", 1.5),
        ("collect.valid", float("nan")),
        ("tokenizer.vocab_size", 100),
        ("world.kind", "diffusoin"),
        ("world.objective", "wedlm2"),
        ("world.stream.window", 0),
        ("world.stream.threshold", -0.1),
        ("sft.mask_upper", 1.1),
        ("sft.mlm_weighting", "none"),
        ("sft.ar_weight", -1.0),
        ("sft.end_tokens", 0),
        ("world.block_length", 12),
        ("world.block_length", 128),
        ("world.strategy", "greedy"),
        ("world.model.head_dim", 33),
        ("policy.temperature", 0.0),
        ("sft.world.learning_rate", 0.0),
        ("sft.policy.learning_rate", float("inf")),
        ("rollout.group", 1),
        ("grpo.loss_type", "ppo"),
        ("grpo.scale_rewards", "yes"),
        ("mesh.fsdp", 0),
        ("mesh.data", -2),
    ],
)
def test_a_value_out_of_range_is_named_with_its_key(key: str, value: object):
    config = base()
    config.update_from_flattened_dict({key: value})
    text = problems(config)
    assert f"config.{key} = {value!r}: must be " in text


@pytest.mark.parametrize(
    "values",
    [
        {"collect.gold": 0.8, "collect.valid": 0.3},
        {"world.denoising_steps": 16},
        {"world.max_tokens": 98},
        {"world.objective": "wedlm", "world.stream.window": 9},
        {"sft.mask_lower": 0.6, "sft.mask_upper": 0.5},
        {"sft.mask_lower": 0.0, "sft.mask_upper": 0.0},
        {"world.context": 100},
        {"world.prompt": 600},
        {"world.context": 771},
        {"sft.world.row_length": 771},
        {"policy.context": 24},
        {"sft.world.answer_length": 98},
        {"sft.policy.answer_length": 1000},
        {"rollout.turns": 9},
        {"grpo.micro_rows": 24},
        {"mesh.fsdp": -1},
        {"mesh.data": 3, "mesh.fsdp": 1},
        {"policy.model.num_key_value_heads": 3},
    ],
)
def test_a_broken_relation_names_all_its_keys(values: dict[str, object]):
    config = base()
    config.update_from_flattened_dict(values)
    text = problems(config)
    assert all(f"config.{key} = {value!r}" in text for key, value in values.items())


def test_all_problems_come_at_once():
    config = base()
    config.update_from_flattened_dict({"seed": -1, "world.kind": "x", "mesh.fsdp": -1})
    text = problems(config)
    assert text.startswith("3 problems in the config")
    assert len(text.splitlines()) == 4


def test_a_relation_is_not_judged_where_a_value_is_wrong():
    config = base()
    config.update_from_flattened_dict({"world.block_length": 0})
    assert "1 problem in the config" in problems(config)


def test_a_missing_and_an_unknown_key_are_problems():
    config = base()
    del config["seed"]
    config.sead = 1
    text = problems(config)
    assert "config.seed = missing" in text
    assert "config.sead = 1: unknown key" in text


def test_a_bool_is_no_number():
    config = base()
    config.update_from_flattened_dict({"seed": True})
    assert "config.seed = True" in problems(config)
