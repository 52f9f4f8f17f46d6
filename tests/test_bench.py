"""The benches run, and print what they found."""

import re
import sys

import numpy as np
import pytest

from mdlm_jax import programs
from mdlm_jax.__main__ import main
from mdlm_jax.programs import bench, bench_decode

TINY = [
    f"--config.load.{name}={value}"
    for name, value in {"layers": 2, "width": 32, "heads": 2, "kv_heads": 1, "mlp": 24}.items()
]
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 1, "intermediate_size": 24, "vocab_size": 40}


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


def test_decode_writes_the_same_as_torch(capsys):
    pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[peers]'")
    words = ["--config.decode.models=('small',)", "--config.decode.batches=(2,)"]
    words += [f"--config.decode.shapes.small.{name}={value}" for name, value in SMALL.items()]
    words += ["--config.decode.tokens=8", "--config.decode.prompt=12", "--config.decode.repeats=1"]
    assert main(["bench", "decode", *words]) == 0
    rows = [row.split() for row in capsys.readouterr().out.splitlines()[1:]]
    assert [row[:3] for row in rows] == [["0M", "autoregressive", "2"], ["0M", "block", "2"]]
    assert all(row[7] == "100%" for row in rows)
    ours, theirs = rows[1][6].split("/")
    assert 0.5 <= float(theirs) <= float(ours) <= 4, "only torch's rows wait for each other"


def test_decode_without_torch_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "mdlm_jax.programs.bench_peer", None)
    monkeypatch.delattr(programs, "bench_peer", raising=False)
    assert main(["bench", "decode"]) == 2
    assert "pip install -e '.[peers]'" in capsys.readouterr().err


def test_a_line_holds_both_medians_and_their_ratio():
    first = bench_decode.Answer(np.array([[1, 2, 3, 4]]), 2.0)
    other = bench_decode.Answer(np.array([[1, 2, 3, 5, 6]]), 4.0)
    row = bench_decode.line("60M", "block", 1, [1.0, 9.0, 2.0], [3.0, 4.0, 90.0], first, other, 7)
    expected = ["60M", "block", "1", "2.00s", "4.00s", "2.00x", "2.00/1.00", "75%", "7.0s"]
    assert row.split() == expected
