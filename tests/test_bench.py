"""The benches run, and print what they found."""

import re

from mdlm_jax.__main__ import main
from mdlm_jax.programs import bench

TINY = [
    f"--config.load.{name}={value}"
    for name, value in {"layers": 2, "width": 32, "heads": 2, "kv_heads": 1, "mlp": 24}.items()
]


def test_load(tmp_path, capsys):
    words = [*TINY, "--config.load.vocab=40", "--config.load.repeats=1"]
    assert main(["bench", "load", *words, f"--config.load.folder={tmp_path}"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^load +[\d.]+ s, median of 1 \(\d+ MiB/s\)$", said, re.MULTILINE)
    assert re.search(r"^peak +\d+ MiB resident, [\d.]+ x the parameters$", said, re.MULTILINE)
    assert list(tmp_path.iterdir()) == []


def test_a_broken_limit_is_said():
    found = [{"seconds": 2.0, "bytes": 2**20, "peak": 2**31, "before": 2**20}]
    plan = type("Plan", (), {"repeats": 1, "dtype": "bfloat16"})
    assert dict(bench.summary(found, plan))["limit"].endswith("BROKEN")
    found[0]["peak"] = 2**30
    assert dict(bench.summary(found, plan))["limit"].endswith("kept")
