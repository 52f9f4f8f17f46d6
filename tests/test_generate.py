"""`mdlm-jax generate` as a user runs it, on random checkpoints of each way of writing."""

import json
import re
from pathlib import Path

import pytest
from test_chat import make
from test_hub import random_checkpoint

from mdlm_jax.__main__ import main

LINE = re.compile(
    r"\[(\w+): (\d+) tokens, (stopped by itself|cut at max_tokens); "
    r"(\d+) forward passes and (\d+) commits, ([\d.]+) tokens per pass; .* tokens/s; .*\]"
)
DECODER = {"sdar": "block", "wedlm": "stream", "qwen3": "autoregressive", "lfm2": "autoregressive"}


@pytest.fixture
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with weights and a tokenizer of 261 words, two rows less than the embedding has."""
    folder = tmp_path / request.param
    random_checkpoint(folder, request.param, vocab_size=263, mask_token_id=258)
    return make(folder)


def generate(folder: Path, *words: str) -> int:
    command = ["generate", f"--config.model={folder}", "--config.prompt=Hi there"]
    return main([*command, "--config.max_tokens=12", "--config.dtype=float32", *words])


@pytest.mark.parametrize("checkpoint", DECODER, indirect=True)
def test_a_checkpoint_writes(checkpoint: Path, tmp_path: Path, capsys):
    picture = tmp_path / "trace.html"
    assert generate(checkpoint, f"--config.trace={picture}") == 0
    said = capsys.readouterr().out
    kind, tokens, _, forwards, commits, rate = LINE.search(said).groups()
    assert kind == DECODER[checkpoint.name]
    assert 1 <= int(tokens) <= 12
    passes = int(forwards) + int(commits)
    assert float(rate) == pytest.approx(int(tokens) / passes, abs=0.01)
    assert "<svg" in picture.read_text()


@pytest.mark.parametrize("checkpoint", ["qwen3"], indirect=True)
def test_any_causal_checkpoint_may_be_unmasked(checkpoint: Path, capsys):
    """The mask id is the config's, the tokenizer's, or a row that no word has."""
    for decoder in ("block", "stream"):
        assert generate(checkpoint, f"--config.decoder={decoder}") == 0
        assert LINE.search(capsys.readouterr().out)[1] == decoder


@pytest.mark.parametrize("checkpoint", ["sdar"], indirect=True)
def test_what_is_wrong_is_one_message(checkpoint: Path, tmp_path: Path, capsys):
    assert generate(tmp_path / "nowhere") == 2
    assert "no such folder" in capsys.readouterr().err
    assert main(["generate", "--config.prompt=x"]) == 2
    assert "config.model = ''" in capsys.readouterr().err
    assert generate(checkpoint, "--workdir=x") == 2
    assert "takes no --workdir" in capsys.readouterr().err
    raw = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(raw | {"vocab_size": 200}))
    assert generate(checkpoint) == 2
    assert "the embedding only 200 rows" in capsys.readouterr().err
