"""What every knob of every program's config may be, and what must hold between knobs.

Nothing here imports jax, so that a typo is answered at once.
"""

import math
import re
from collections.abc import Callable
from typing import NamedTuple

ENVIRONMENTS = ("textworld_express", "scienceworld")
SIDES = ("world", "policy")
KINDS = ("diffusion", "autoregressive")
OBJECTIVES = ("sdar", "semi-ar", "wedlm")
MLM_WEIGHTINGS = ("weighted", "uniform")
STRATEGIES = (
    "low_confidence_dynamic",
    "low_confidence_static",
    "sequential",
    "random",
    "entropy_bounded",
)
LOSS_TYPES = ("dapo", "grpo", "dr_grpo", "bnpo")
SCALE_REWARDS = ("group", "batch", "none")
BLOCK_LENGTHS = (1, 2, 4, 8, 16, 32, 64)
# A byte-level tokenizer needs 256 byte symbols, and room for the special tokens.
SMALLEST_VOCABULARY = 272
GAME = re.compile(r"[\w-]+(:\w+=[\w.-]+(,\w+=[\w.-]+)*)?")


class Rule(NamedTuple):
    """What one knob may be."""

    allows: Callable[[object], bool]
    allowed: str


class Relation(NamedTuple):
    """What must hold between several knobs, given in the order of `keys`."""

    keys: tuple[str, ...]
    holds: Callable[..., bool]
    allowed: str


class Book(NamedTuple):
    """All rules of one kind of config."""

    rules: dict[str, Rule]
    relations: tuple[Relation, ...] = ()


def _integer(low: int, high: int | None = None) -> Rule:
    def allows(value: object) -> bool:
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        return is_integer and low <= value and (high is None or value <= high)

    limits = f">= {low}" if high is None else f"from {low} to {high}"
    return Rule(allows, f"an integer {limits}")


def _number(allows: Callable[[float], bool], limits: str) -> Rule:
    def is_allowed(value: object) -> bool:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and math.isfinite(value) and allows(value)

    return Rule(is_allowed, f"a number {limits}")


def _one_of(*choices: object) -> Rule:
    def allows(value: object) -> bool:
        return type(value) is type(choices[0]) and value in choices

    return Rule(allows, "one of " + ", ".join(map(str, choices)))


def _are_models(value: object) -> bool:
    return isinstance(value, tuple) and len(value) > 0 and set(value) <= set(BENCH_MODELS)


def _are_counts(value: object) -> bool:
    is_count = _integer(1).allows
    return isinstance(value, tuple) and len(value) > 0 and all(map(is_count, value))


def _are_games(value: object) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) > 0
        and all(isinstance(game, str) and GAME.fullmatch(game) for game in value)
    )


COUNT = _integer(1)
SEED = _integer(0, 2**31 - 1)
FLAG = _one_of(True, False)
POSITIVE = _number(lambda x: x > 0, "> 0")
NOT_NEGATIVE = _number(lambda x: x >= 0, ">= 0")
SHARE = _number(lambda x: 0 <= x <= 1, "from 0 to 1")
BELOW_ONE = _number(lambda x: 0 <= x < 1, ">= 0 and < 1")
AXIS = Rule(
    lambda x: COUNT.allows(x) or (isinstance(x, int) and x == -1),
    "an integer >= 1, or -1 for all devices that are left",
)

_MODEL = {
    "hidden_size": COUNT,
    "num_hidden_layers": COUNT,
    "num_attention_heads": COUNT,
    "num_key_value_heads": COUNT,
    "head_dim": Rule(
        lambda x: COUNT.allows(x) and x % 2 == 0,
        "an even integer >= 2 (rotary embedding turns pairs)",
    ),
    "intermediate_size": COUNT,
    "rope_theta": POSITIVE,
    "rms_norm_eps": POSITIVE,
    "tie_word_embeddings": FLAG,
    "attention_bias": FLAG,
}

_SFT = {
    "steps": COUNT,
    "rows": COUNT,
    "row_length": COUNT,
    "answer_length": COUNT,
    "learning_rate": POSITIVE,
    "adam_learning_rate": POSITIVE,
    "warmup": SHARE,
    "rename": SHARE,
    "weight_decay": NOT_NEGATIVE,
    "clip_norm": POSITIVE,
    "eval_every": COUNT,
    "save_every": COUNT,
}


def _under(prefix: str, rules: dict[str, Rule]) -> dict[str, Rule]:
    return {f"{prefix}.{key}": rule for key, rule in rules.items()}


_CIRCLE_RULES = {
    "seed": SEED,
    "env.name": _one_of(*ENVIRONMENTS),
    "env.games": Rule(
        _are_games, """a tuple like '("coin","twc:numLocations=1,includeDoors=0")'"""
    ),
    "env.turns": COUNT,
    "env.workers": COUNT,
    "collect.train_episodes": COUNT,
    "collect.dev_episodes": COUNT,
    "collect.test_episodes": COUNT,
    "collect.expert_episodes": COUNT,
    "collect.gold": SHARE,
    "collect.valid": SHARE,
    "tokenizer.vocab_size": _integer(SMALLEST_VOCABULARY),
    "tokenizer.phrases": _integer(0),
    "tokenizer.phrase_share": SHARE,
    "world.kind": _one_of(*KINDS),
    "world.objective": _one_of(*OBJECTIVES),
    "world.block_length": _one_of(*BLOCK_LENGTHS),
    "world.slot": COUNT,
    "world.denoising_steps": COUNT,
    "world.strategy": _one_of(*STRATEGIES),
    "world.threshold": SHARE,
    "world.stream.window": COUNT,
    "world.stream.threshold": NOT_NEGATIVE,
    "world.stream.penalty": NOT_NEGATIVE,
    "world.temperature": NOT_NEGATIVE,
    "world.max_tokens": COUNT,
    "world.prompt": COUNT,
    "world.context": COUNT,
    **_under("world.model", _MODEL),
    "policy.temperature": POSITIVE,
    "policy.max_tokens": COUNT,
    "policy.prompt": COUNT,
    "policy.context": COUNT,
    **_under("policy.model", _MODEL),
    **_under("sft.world", _SFT),
    **_under("sft.policy", _SFT),
    "sft.mask_eps": BELOW_ONE,
    "sft.mask_lower": SHARE,
    "sft.mask_upper": SHARE,
    "sft.mask_per_block": FLAG,
    "sft.mlm_weighting": _one_of(*MLM_WEIGHTINGS),
    "sft.ar_weight": NOT_NEGATIVE,
    "sft.end_tokens": COUNT,
    "sft.rename_below": SHARE,
    "rollout.tasks": COUNT,
    "rollout.group": _integer(2),
    "rollout.turns": COUNT,
    "grpo.steps": COUNT,
    "grpo.learning_rate": POSITIVE,
    "grpo.clip_norm": POSITIVE,
    "grpo.loss_type": _one_of(*LOSS_TYPES),
    "grpo.epsilon": BELOW_ONE,
    "grpo.epsilon_high": NOT_NEGATIVE,
    "grpo.discount": SHARE,
    "grpo.scale_rewards": _one_of(*SCALE_REWARDS),
    "grpo.rename": SHARE,
    "grpo.num_iterations": COUNT,
    "grpo.micro_rows": COUNT,
    "grpo.save_every": COUNT,
    "grpo.eval_every": COUNT,
    "grpo.eval_games": COUNT,
    "evaluate.rows": COUNT,
    "evaluate.world_samples": COUNT,
    "evaluate.games": COUNT,
    "evaluate.temperature": NOT_NEGATIVE,
    "evaluate.bootstrap": COUNT,
    "mesh.data": AXIS,
    "mesh.fsdp": AXIS,
    "mesh.tensor": AXIS,
}


def _is_multiple(large: int, small: int) -> bool:
    return large % small == 0


def _divides_either_way(tasks: int, group: int, micro_rows: int) -> bool:
    rows = tasks * group
    return rows % micro_rows == 0 or micro_rows % rows == 0


def _fills_the_mesh(rows: int, data: int, fsdp: int) -> bool:
    # With a -1 the axis is known only where the devices are; build.py checks it there.
    return -1 in (data, fsdp) or rows % (data * fsdp) == 0


_BATCH_AXES = ("mesh.data", "mesh.fsdp")
_BATCH_TEXT = "rows must be divisible by data * fsdp devices"

_CIRCLE_RELATIONS = (
    *(
        Relation((key, "world.block_length"), _is_multiple, "must be a multiple of block_length")
        for key in (
            *("world.slot", "world.max_tokens", "world.context"),
            *("sft.world.row_length", "sft.world.answer_length"),
        )
    ),
    Relation(
        ("world.prompt", "world.slot"),
        _is_multiple,
        "the prompt must be a multiple of the slot",
    ),
    Relation(
        ("collect.gold", "collect.valid"),
        lambda gold, valid: gold + valid <= 1 + 1e-9,
        "the chances must add up to at most 1 (the rest are invalid actions)",
    ),
    Relation(
        ("world.denoising_steps", "world.block_length"),
        lambda steps, block: steps <= block,
        "denoising steps must be at most the block length: each step keeps at least one token",
    ),
    Relation(
        ("world.objective", "world.stream.window", "world.block_length"),
        lambda objective, window, block: objective != "wedlm" or window <= block,
        "a window may be at most a block: more masks than that never stand together in training",
    ),
    Relation(
        ("sft.mask_lower", "sft.mask_upper"),
        lambda lower, upper: lower <= upper and upper > 0,
        "the lowest rate must be at most the highest one, and that one more than 0",
    ),
    *(
        Relation(
            (f"sft.{side}.answer_length", f"sft.{side}.row_length"),
            lambda answer, row: answer <= row,
            "the answers are a part of the row",
        )
        for side in SIDES
    ),
    *(
        Relation(
            (f"{side}.prompt", f"{side}.max_tokens", f"{side}.context"),
            lambda prompt, tokens, context: prompt + tokens <= context,
            "the context must hold the prompt and one answer",
        )
        for side in SIDES
    ),
    Relation(
        ("rollout.turns", "env.turns"),
        lambda turns, most: turns <= most,
        "a rollout may not have more turns than an episode of the environment",
    ),
    Relation(
        ("rollout.tasks", "rollout.group", "grpo.micro_rows"),
        _divides_either_way,
        "tasks * group rows must be divisible by micro_rows, or the other way round",
    ),
    Relation(
        ("mesh.data", "mesh.fsdp", "mesh.tensor"),
        lambda *axes: axes.count(-1) <= 1,
        "at most one axis may be -1",
    ),
    *(
        Relation(
            (f"{side}.model.num_attention_heads", f"{side}.model.num_key_value_heads"),
            _is_multiple,
            "attention heads must be a multiple of key/value heads",
        )
        for side in SIDES
    ),
    *(
        Relation((key, *_BATCH_AXES), _fills_the_mesh, _BATCH_TEXT)
        for key in ("sft.world.rows", "sft.policy.rows", "evaluate.rows")
    ),
    Relation(
        ("rollout.tasks", "rollout.group", *_BATCH_AXES),
        lambda tasks, group, *axes: _fills_the_mesh(tasks * group, *axes),
        _BATCH_TEXT,
    ),
)

CIRCLE = Book(_CIRCLE_RULES, _CIRCLE_RELATIONS)  # of configs/base.py

NAME = Rule(lambda x: isinstance(x, str) and x != "", "a path or a name (it is empty)")
TEXT = Rule(lambda x: isinstance(x, str), "a text")
DTYPES = ("float32", "bfloat16", "float16")
DECODERS = ("auto", "block", "stream", "autoregressive")
PRESETS = ("canonical", "generate_py", "opencompass", "jetengine", "lmdeploy", "sglang")

GENERATE = Book(  # of configs/generate.py
    {
        "model": NAME,
        "prompt": NAME,
        "system": TEXT,
        "chat": FLAG,
        "dtype": _one_of(*DTYPES),
        "seed": SEED,
        "decoder": _one_of(*DECODERS),
        "max_tokens": COUNT,
        "temperature": NOT_NEGATIVE,
        "top_k": _integer(0),
        "top_p": SHARE,
        "min_p": SHARE,
        "repetition_penalty": POSITIVE,
        "trace": TEXT,
        "block.preset": _one_of(*PRESETS),
        "block.length": _integer(0),
        "block.steps": _integer(0),
        "block.strategy": _one_of(*STRATEGIES),
        "block.threshold": NOT_NEGATIVE,
        "stream.window": COUNT,
        "stream.threshold": NOT_NEGATIVE,
        "stream.penalty": NOT_NEGATIVE,
    }
)
CONVERT = Book({"source": NAME, "target": NAME})  # of configs/convert.py
SHAPE = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "intermediate_size"),
)
BENCH_MODELS = ("small", "large")
BENCH = Book(  # of configs/bench.py
    {
        "load.repeats": COUNT,
        "load.dtype": _one_of(*DTYPES),
        "load.folder": TEXT,
        "load.layers": COUNT,
        "load.width": COUNT,
        "load.heads": COUNT,
        "load.kv_heads": COUNT,
        "load.mlp": COUNT,
        "load.vocab": COUNT,
        "decode.models": Rule(_are_models, "names of decode.shapes, one or more"),
        "decode.batches": Rule(_are_counts, "integers >= 1, one or more"),
        "decode.prompt": COUNT,
        "decode.tokens": COUNT,
        "decode.repeats": COUNT,
        "decode.block": _one_of(*BLOCK_LENGTHS),
        "decode.threshold": NOT_NEGATIVE,
    }
    | {f"decode.shapes.{name}.{field}": COUNT for name in BENCH_MODELS for field in SHAPE}
    | {f"decode.shapes.{name}.rope_theta": POSITIVE for name in BENCH_MODELS}
    | {f"decode.shapes.{name}.tie_word_embeddings": _one_of(False) for name in BENCH_MODELS},
    (
        Relation(
            ("load.heads", "load.kv_heads"),
            _is_multiple,
            "attention heads must be a multiple of key/value heads",
        ),
        Relation(
            ("decode.prompt", "decode.block"),
            _is_multiple,
            "the prompt must be whole blocks",
        ),
        Relation(
            ("decode.tokens", "decode.block"),
            _is_multiple,
            "the answer must be whole blocks",
        ),
    ),
)
