"""What is written here loads in transformers on torch and says the same (extra `peers`)."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import ATOL
from fakes import TinyModel
from test_hub import FAMILIES, random_checkpoint

from mdlm_jax.models import hub

torch = pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[peers]'")
transformers = pytest.importorskip("transformers")

# SDAR's and WeDLM's own classes live in their repositories; on plain causal text they are Qwen3's
# (specs/sdar.md 2, specs/wedlm.md 1).
CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "sdar": "Qwen3ForCausalLM",
    "wedlm": "Qwen3ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "sdar_moe": "Qwen3MoeForCausalLM",
}
BY_QWEN3 = {"sdar", "wedlm", "sdar_moe"}
# Where the defaults of a class and of Qwen3's differ, the config says it.
SAID = {
    "wedlm": {"qk_norm": True, "attention_bias": False, "head_dim": 4},
    "sdar_moe": {"norm_topk_prob": True},
}


def torch_model(folder: Path, kind: str):
    """The folder as transformers loads it: every tensor used, none missing."""
    chosen = getattr(transformers, CLASSES[kind])
    config = None
    if kind in BY_QWEN3:
        raw = chosen.config_class.get_config_dict(folder)[0]
        raw.pop("model_type")
        config = chosen.config_class(**raw)
    model, report = chosen.from_pretrained(
        folder,
        config=config,
        dtype=torch.float32,
        experts_implementation="eager",  # the grouped one wants widths of 16 bytes
        output_loading_info=True,
    )
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


@pytest.mark.parametrize("kind", FAMILIES)
def test_an_export_gives_the_same_logits_in_transformers(tmp_path: Path, kind: str):
    checkpoint = random_checkpoint(tmp_path / "a", kind, **SAID.get(kind, {}))
    params = hub.load(checkpoint, dtype=jnp.float32)
    hub.export(tmp_path / "b", params, checkpoint.config, like=checkpoint, shard_bytes=4000)
    tokens_BL = np.random.default_rng(1).integers(0, checkpoint.config.vocab_size, (3, 11))
    ours = TinyModel(1, checkpoint.config).logits(
        params, jnp.asarray(tokens_BL, jnp.int32), jnp.full(3, 11)
    )
    with torch.inference_mode():
        theirs = torch_model(tmp_path / "b", kind)(torch.from_numpy(tokens_BL)).logits.numpy()
    assert np.abs(theirs).max() > 0.1, "flat logits show nothing"
    np.testing.assert_allclose(ours, theirs, atol=ATOL)


def test_a_model_made_here_loads_by_its_own_config(tmp_path: Path):
    checkpoint = random_checkpoint(tmp_path / "a", "qwen3")
    params = hub.load(checkpoint, dtype=jnp.float32)
    hub.export(tmp_path / "b", params, checkpoint.config)
    tokens_BL = np.arange(10).reshape(2, 5)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b", dtype=torch.float32)
    with torch.inference_mode():
        theirs = model.eval()(torch.from_numpy(tokens_BL)).logits.numpy()
    ours = TinyModel(1, checkpoint.config).logits(params, jnp.asarray(tokens_BL), jnp.full(2, 5))
    np.testing.assert_allclose(ours, theirs, atol=ATOL)
