"""Measurements a user can repeat. They print what they found, whatever it is."""

import json
import math
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import jax
import ml_dtypes
import numpy as np
from ml_collections import ConfigDict

from mdlm_jax.models import families, hub, transformer, weights
from mdlm_jax.programs import bench_decode

MIB = 2**20
SHARD_BYTES = 10**9
# Runs in a fresh process, so that its peak is the load's own; prints one JSON line.
PROBE = """
import json, resource, sys, time
import jax, jax.numpy as jnp
from mdlm_jax.models import hub
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
jax.block_until_ready(jnp.zeros(8) + 1)
before, start = peak(), time.perf_counter()
params = hub.load(hub.read(sys.argv[1]), dtype=jnp.dtype(sys.argv[2]))
jax.block_until_ready(params)
seconds = time.perf_counter() - start
size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
print(json.dumps({"seconds": seconds, "before": before, "peak": peak(), "bytes": size}))
"""


def run(config: ConfigDict, what: str) -> None:
    """Runs one bench."""
    BENCHES[what](config[what])


def load(plan: ConfigDict) -> None:
    """Time and peak memory of loading a random checkpoint in a released shape."""
    with tempfile.TemporaryDirectory(dir=plan.folder or None) as folder:
        write_random(pathlib.Path(folder), plan)
        found = [probe(folder, plan.dtype) for _ in range(plan.repeats)]
    for name, text in summary(found, plan):
        print(f"{name:<12}{text}")


def summary(found: list[dict], plan: ConfigDict) -> list[tuple[str, str]]:
    """The lines of `load`: what was measured, and the limit that the peak is held against."""
    size, peak, before = (max(one[name] for one in found) for name in ("bytes", "peak", "before"))
    seconds = statistics.median(one["seconds"] for one in found)
    limit = 1.25 * size + 2**30
    rate = f"{size / MIB / seconds:.0f} MiB/s"
    return [
        ("parameters", f"{size / MIB:.0f} MiB in {plan.dtype}"),
        ("load", f"{seconds:.1f} s, median of {plan.repeats} ({rate})"),
        ("before", f"{before / MIB:.0f} MiB resident, jax included"),
        ("peak", f"{peak / MIB:.0f} MiB resident, {peak / size:.2f} x the parameters"),
        ("limit", f"{limit / MIB:.0f} MiB: {'kept' if peak <= limit else 'BROKEN'}"),
    ]


def probe(folder: str, dtype: str) -> dict:
    """One load in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, folder, dtype], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the load failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def write_random(folder: pathlib.Path, plan: ConfigDict) -> None:
    """A checkpoint of random bfloat16 weights, in several files."""
    raw = {
        "model_type": "qwen3",
        "vocab_size": plan.vocab,
        "hidden_size": plan.width,
        "num_hidden_layers": plan.layers,
        "num_attention_heads": plan.heads,
        "num_key_value_heads": plan.kv_heads,
        "head_dim": 128,
        "intermediate_size": plan.mlp,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(raw))
    print(f"writing a random checkpoint into {folder}", flush=True)
    weights.save(folder, random_tensors(hub.read(folder)), shard_bytes=SHARD_BYTES)


def random_tensors(checkpoint: hub.Checkpoint) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor of a checkpoint, filled from one block of random numbers."""
    block = np.random.default_rng(0).normal(0, 0.02, 2**20).astype(ml_dtypes.bfloat16)
    config = checkpoint.config
    shapes = jax.eval_shape(lambda: transformer.init(jax.random.key(0), config))
    for path, leaf in jax.tree_util.tree_flatten_with_path(shapes)[0]:
        keys = tuple(part.key for part in path)
        names = families.tensor_names(keys, config, checkpoint.model_type)
        shape = hub.hub_shape(leaf.shape[names.ndim :], families.layout(keys))
        values = np.resize(block, math.prod(shape)).reshape(shape)
        for name in names.ravel():
            yield name, values


BENCHES = {"load": load, "decode": bench_decode.run}
