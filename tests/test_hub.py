"""Checkpoints in the Hugging Face layout: what goes in comes out; what does not fit is named."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import TINY, sharp_params

from mdlm_jax.models import families, hub, transformer, weights
from mdlm_jax.models.config import ModelConfig
from mdlm_jax.train import mesh

UNTIED = dataclasses.replace(TINY, tie_word_embeddings=False, hidden_size=16, vocab_size=24)
SHAPE = {
    "vocab_size": 24,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 20,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
}
FAMILIES = {
    "llama": SHAPE | {"num_hidden_layers": 2, "mlp_bias": True, "attention_bias": True},
    "mistral": SHAPE | {"num_hidden_layers": 3, "sliding_window": 3, "head_dim": 6},
    "qwen2": SHAPE
    | {"num_hidden_layers": 3, "use_sliding_window": True, "max_window_layers": 1}
    | {"sliding_window": 2},
    "qwen3": SHAPE | {"num_hidden_layers": 2, "head_dim": 10, "tie_word_embeddings": True},
    "sdar": SHAPE | {"num_hidden_layers": 2, "head_dim": 8},
    "wedlm": SHAPE | {"num_hidden_layers": 2, "mask_token_id": None},
    "lfm2": SHAPE
    | {"num_hidden_layers": 5, "full_attn_idxs": [2, 4], "block_multiple_of": 4}
    | {"conv_bias": True},
    "sdar_moe": SHAPE
    | {"num_hidden_layers": 3, "num_experts": 5, "num_experts_per_tok": 2, "head_dim": 8}
    | {"moe_intermediate_size": 6, "mlp_only_layers": [1]},
}


def random_checkpoint(folder: Path, kind: str, **changes) -> hub.Checkpoint:
    """A released form at a tiny size, with random weights, as its files."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = FAMILIES[kind] | {"model_type": kind, "eos_token_id": 3} | changes
    (folder / "config.json").write_text(json.dumps(raw))
    checkpoint = hub.read(folder)
    params = sharp_params(5, checkpoint.config)
    named = hub.hub_tensors(params, checkpoint.config, kind)
    weights.save(folder, named, shard_bytes=10**9)
    return checkpoint


def equal(first: dict, second: dict) -> None:
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_comes_back_bit_for_bit(tmp_path: Path, kind: str):
    checkpoint = random_checkpoint(tmp_path / "a", kind)
    params = hub.load(checkpoint, dtype=jnp.float32)
    equal(params, sharp_params(5, checkpoint.config))
    hub.export(tmp_path / "b", params, checkpoint.config, like=checkpoint, shard_bytes=4000)
    assert len(list((tmp_path / "b").glob("model-*-of-*.safetensors"))) > 1
    again = hub.read(tmp_path / "b")
    assert again.config == checkpoint.config
    equal(hub.load(again, dtype=jnp.float32), params)
    first, second = weights.tensors(tmp_path / "a"), weights.tensors(tmp_path / "b")
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name].read(), second[name].read())


def test_bfloat16_comes_back_bit_for_bit(tmp_path: Path):
    checkpoint = random_checkpoint(tmp_path / "a", "sdar")
    params = hub.load(checkpoint)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    hub.export(tmp_path / "b", params, checkpoint.config, like=checkpoint)
    assert json.loads((tmp_path / "b" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    equal(hub.load(hub.read(tmp_path / "b")), params)


def test_a_model_made_here_is_exported_under_a_config_of_its_own(tmp_path: Path):
    params = sharp_params(1, UNTIED)
    hub.export(tmp_path, params, UNTIED)
    checkpoint = hub.read(tmp_path)
    assert checkpoint.model_type == "qwen3"
    assert checkpoint.config == UNTIED
    equal(hub.load(checkpoint, dtype=jnp.float32), params)
    with pytest.raises(FileExistsError, match=r"model\.safetensors is there already"):
        hub.export(tmp_path, params, UNTIED)


@pytest.mark.parametrize("kind", ["sdar_moe", "lfm2", "qwen3"])
def test_a_sharded_load_is_the_whole_load(tmp_path: Path, kind: str):
    """Run on one device and on eight: the mesh takes what is there."""
    checkpoint = random_checkpoint(tmp_path, kind)
    shapes = jax.eval_shape(lambda: transformer.init(jax.random.key(0), checkpoint.config))
    tensor = 2 if jax.device_count() % 2 == 0 else 1
    on = mesh.make(data=1, fsdp=-1, tensor=tensor)
    fits = on.shape["fsdp"] in (1, 2, 4)
    assert fits, "the sizes of this test divide by 1, 2 and 4"
    shardings = mesh.param_shardings(on, transformer.axes(shapes), shapes)
    params = hub.load(checkpoint, dtype=jnp.float32, shardings=shardings)
    assert jax.tree.map(lambda p: p.sharding, params) == shardings
    equal(params, hub.load(checkpoint, dtype=jnp.float32))


def test_stop_ids_are_those_of_both_files_and_the_mask_id_is_the_config_s(tmp_path: Path):
    checkpoint = random_checkpoint(tmp_path, "sdar", mask_token_id=20, block_size=4)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 7]}')
    checkpoint = hub.read(tmp_path)
    assert (checkpoint.stop_ids, checkpoint.mask_id, checkpoint.block_length) == ((3, 7), 20, 4)
    bare = random_checkpoint(tmp_path / "bare", "sdar")
    assert (bare.mask_id, bare.block_length) == (None, None)
    assert random_checkpoint(tmp_path / "w", "wedlm").mask_id == 151665


def rewrite(folder: Path, change) -> None:
    """Writes the folder's tensors again after `change` had its way with them."""
    named = {name: tensor.read() for name, tensor in weights.tensors(folder).items()}
    change(named)
    (folder / "model.safetensors").unlink()
    weights.save(folder, named.items(), shard_bytes=10**9)


def test_one_error_lists_every_tensor_that_does_not_fit(tmp_path: Path):
    checkpoint = random_checkpoint(tmp_path, "qwen2")

    def spoil(named):
        del named["model.layers.1.self_attn.q_proj.bias"]
        named["model.norm.weight"] = named["model.norm.weight"][:3]
        named["model.layers.7.mlp.up_proj.weight"] = np.zeros((2, 2), np.float32)
        named["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(2, np.float32)

    rewrite(tmp_path, spoil)
    with pytest.raises(ValueError, match="3 of its tensors do not fit") as error:
        hub.load(checkpoint)
    text = str(error.value)
    assert "model.layers.1.self_attn.q_proj.bias: missing" in text
    assert "model.norm.weight: shape (3,) instead of (16,) (model.safetensors)" in text
    assert "model.layers.7.mlp.up_proj.weight: not a part of qwen2 (model.safetensors)" in text


def test_a_tied_head_may_be_in_the_file_but_must_be_the_embedding(tmp_path: Path):
    checkpoint = random_checkpoint(tmp_path, "qwen3")
    head = "lm_head.weight"
    rewrite(tmp_path, lambda named: named.update({head: named["model.embed_tokens.weight"]}))
    equal(hub.load(checkpoint, dtype=jnp.float32), sharp_params(5, checkpoint.config))
    rewrite(tmp_path, lambda named: named.update({head: named[head] + 1}))
    with pytest.raises(ValueError, match=r"lm_head\.weight: differs from the embedding"):
        hub.load(checkpoint)


def test_whole_numbers_are_no_weights(tmp_path: Path):
    import safetensors.numpy

    checkpoint = random_checkpoint(tmp_path, "qwen3")
    file = tmp_path / "model.safetensors"
    named = safetensors.numpy.load_file(file)
    named["model.norm.weight"] = named["model.norm.weight"].astype(np.int8)
    safetensors.numpy.save_file(named, file)
    with pytest.raises(ValueError, match=r"model\.norm\.weight: dtype I8, none of BF16"):
        hub.load(checkpoint)


def test_a_torn_file_and_a_missing_shard_are_named(tmp_path: Path):
    checkpoint = random_checkpoint(tmp_path / "torn", "qwen3")
    file = tmp_path / "torn" / "model.safetensors"
    whole = file.read_bytes()
    for size, words in ((len(whole) - 5, "torn"), (40, "no header"), (3, "no header")):
        file.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=words) as error:
            hub.load(checkpoint)
        assert str(file) in str(error.value)

    source = random_checkpoint(tmp_path / "a", "qwen3")
    params, folder = hub.load(source, dtype=jnp.float32), tmp_path / "shards"
    hub.export(folder, params, source.config, like=source, shard_bytes=4000)
    next(folder.glob("model-00002*")).unlink()
    with pytest.raises(ValueError, match="names files that are not there: model-00002"):
        hub.load(hub.read(folder))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no \\*.safetensors"):
        weights.tensors(tmp_path / "empty")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2"}, "unknown model_type 'gpt2'; known: lfm2, llama"),
        ({"hidden_act": "gelu"}, "only silu"),
        ({"rope_scaling": {"type": "spiral"}}, "rope_type 'spiral' is unknown; known: default"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_a_config_may_not_say(tmp_path: Path, change: dict, words: str):
    raw = FAMILIES["llama"] | {"model_type": "llama"} | change
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=words) as error:
        hub.read(tmp_path)
    assert "config.json" in str(error.value)


def test_a_missing_field_or_file_is_named(tmp_path: Path):
    raw = {n: v for n, v in FAMILIES["llama"].items() if n != "hidden_size"}
    (tmp_path / "config.json").write_text(json.dumps(raw | {"model_type": "llama"}))
    with pytest.raises(ValueError, match=r"config\.json: hidden_size is missing"):
        hub.read(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not JSON"):
        hub.read(tmp_path)
    with pytest.raises(ValueError, match=r"config\.json: No such file"):
        hub.read(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="no such folder"):
        hub.locate(str(tmp_path / "nowhere"))


def released(**fields) -> ModelConfig:
    return families.model_config(fields)


def test_lfm2_1_2b_s_published_fields():
    """Sizes of LFM2-1.2B's config: 12288 becomes 8192, six attention layers among sixteen."""
    config = released(
        model_type="lfm2",
        vocab_size=65536,
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        block_ff_dim=12288,
        block_auto_adjust_ff_dim=True,
        block_ffn_dim_multiplier=1.0,
        block_multiple_of=256,
        full_attn_idxs=[2, 5, 8, 10, 12, 14],
        conv_L_cache=3,
        tie_embedding=True,
        rope_theta=1e6,
    )
    assert (config.intermediate_size, config.head_dim) == (8192, 64)
    assert [i for i, kind in enumerate(config.mixers) if kind != "conv"] == [2, 5, 8, 10, 12, 14]
    assert sum(run.length for run in config.runs) == 16


def test_mistral_s_window_is_on_all_layers_or_none():
    shape = SHAPE | {"num_hidden_layers": 2, "model_type": "mistral"}
    assert set(released(**shape, sliding_window=4096).mixers) == {"sliding_attention"}
    assert set(released(**shape, sliding_window=None).mixers) == {"full_attention"}
