"""Checkpoints come back bit for bit, and a kill at any moment leaves the last one whole."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mdlm_jax.structs import TrainState
from mdlm_jax.train.checkpoint import Checkpoints, abstract, load_params, save_params

FINGERPRINT = {"seed": 0, "model": {"width": 8, "games": ("coin", "twc")}}


def make_state(value: float = 1.0) -> dict:
    """A training state with everything a program keeps: optimizer, keys, low precision, numbers."""
    params = {"layer": {"kernel": jnp.full((16, 8), value), "bias": jnp.zeros(8, jnp.bfloat16)}}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return {
        "train": TrainState(jnp.int32(3), params, optimizer.init(params)),
        "key": jax.random.fold_in(jax.random.key(5), int(value)),
        "keys": jax.random.split(jax.random.key(6), 4),
        "cursor": 12,
    }


def plain(leaf):
    """A leaf as NumPy, keys as their bits."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(leaf))
    return np.asarray(leaf)


def assert_same(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert plain(a).dtype == plain(b).dtype
        assert plain(a).tobytes() == plain(b).tobytes()


def test_a_state_comes_back_bit_for_bit(tmp_path):
    checkpoints = Checkpoints(tmp_path, FINGERPRINT)
    assert checkpoints.latest() is None
    assert checkpoints.restore(abstract(make_state())) is None
    checkpoints.save(7, make_state())
    checkpoints.close()

    again = Checkpoints(tmp_path, FINGERPRINT)
    step, state = again.restore(abstract(make_state(2.0)))
    assert step == again.latest() == 7
    assert_same(state, make_state())
    assert jnp.issubdtype(state["key"].dtype, jax.dtypes.prng_key)
    again.close()


def test_only_the_last_steps_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, FINGERPRINT, keep=2)
    for step in range(1, 5):
        checkpoints.save(step, make_state(step))
    checkpoints.save(4, make_state(9.0))  # there already: left alone
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"]
    assert_same(checkpoints.restore(abstract(make_state()))[1], make_state(4.0))
    checkpoints.close()


def test_a_state_is_restored_into_the_shardings_asked_for(tmp_path):
    devices = np.array(jax.devices())
    if len(devices) < 2:
        pytest.skip("one device")
    whole = {"kernel": jnp.arange(128.0).reshape(16, 8), "key": jax.random.key(1)}
    save_params(tmp_path, whole)
    mesh = Mesh(devices, ("fsdp",))
    split, copied = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("fsdp",), ()))
    asked = {
        "kernel": jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=split),
        "key": jax.ShapeDtypeStruct((), whole["key"].dtype, sharding=copied),
    }
    restored = load_params(tmp_path, asked, made_by="sft")
    assert restored["kernel"].sharding == split
    assert_same(restored, whole)


def test_other_settings_are_refused_and_named(tmp_path):
    checkpoints = Checkpoints(tmp_path, FINGERPRINT)
    checkpoints.save(1, make_state())
    checkpoints.close()
    other = {"seed": 0, "model": {"width": 16, "games": ("coin", "twc")}, "lr": 0.1}
    with pytest.raises(ValueError, match="other settings") as caught:
        Checkpoints(tmp_path, other)
    text = str(caught.value)
    assert "model.width: 8 there, 16 now" in text
    assert "lr: '(absent)' there, 0.1 now" in text
    assert "seed" not in text
    assert "games" not in text
    assert str(tmp_path) in text
    assert "--workdir" in text


def problem(folder: Path) -> str:
    """What reading a checkpoint of `make_state()` complains of; "" when it comes back right."""
    try:
        checkpoints = Checkpoints(folder, FINGERPRINT)
        _, state = checkpoints.restore(abstract(make_state(2.0)))
    except ValueError as error:
        return str(error)
    assert_same(state, make_state())
    return ""


# orbax drops the other reads of a step when one of them fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_a_damaged_checkpoint_is_named(tmp_path):
    """Each file of a step, cut in half: a clear error or the right state, never a wrong one."""
    whole = tmp_path / "whole"
    checkpoints = Checkpoints(whole, FINGERPRINT)
    checkpoints.save(1, make_state())
    checkpoints.close()
    complaints = []
    for path in sorted(path for path in whole.rglob("*") if path.is_file()):
        torn = tmp_path / "torn"
        shutil.copytree(whole, torn)
        copy = torn / path.relative_to(whole)
        copy.write_bytes(copy.read_bytes()[: path.stat().st_size // 2])
        complaints.append(problem(torn))
        shutil.rmtree(torn)
    complaints = [text for text in complaints if text]
    assert complaints
    for text in complaints:
        assert str(tmp_path / "torn" / "1") in text
        assert "Delete that folder" in text


def test_a_half_deleted_older_step_does_not_matter(tmp_path):
    checkpoints = Checkpoints(tmp_path, FINGERPRINT)
    checkpoints.save(1, make_state(1.0))
    checkpoints.save(2, make_state(2.0))
    checkpoints.close()
    shutil.rmtree(tmp_path / "1" / "state")
    (tmp_path / "1" / "_CHECKPOINT_METADATA").unlink()
    checkpoints = Checkpoints(tmp_path, FINGERPRINT)
    step, state = checkpoints.restore(abstract(make_state()))
    assert step == 2
    assert_same(state, make_state(2.0))
    checkpoints.save(3, make_state(3.0))
    assert not (tmp_path / "1").exists()
    checkpoints.close()


def test_parameters_are_replaced(tmp_path):
    for value in (1.0, 2.0, 3.0):
        save_params(tmp_path / "params", {"w": jnp.full((4,), value)})
    assert len(list((tmp_path / "params").iterdir())) == 1
    asked = abstract({"w": jnp.zeros(4)})
    params = load_params(tmp_path / "params", asked, made_by="sft")
    np.testing.assert_array_equal(params["w"], np.full(4, 3.0))


def test_missing_parameters_name_the_program_that_makes_them(tmp_path):
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "absent", tmp_path / "empty"):
        with pytest.raises(FileNotFoundError, match="mdlm-jax sft") as caught:
            load_params(folder, {}, made_by="mdlm-jax sft")
        assert str(folder) in str(caught.value)
    assert not (tmp_path / "absent").exists()


def test_parameters_of_another_shape_are_refused(tmp_path):
    save_params(tmp_path, {"w": jnp.zeros((4, 2))})
    for wrong in ({"w": jnp.zeros((2, 4))}, {"v": jnp.zeros((4, 2))}):
        with pytest.raises(ValueError, match="cannot be read"):
            load_params(tmp_path, abstract(wrong), made_by="sft")


WRITER = """
import sys
import jax.numpy as jnp
from mdlm_jax.train.checkpoint import Checkpoints
checkpoints = Checkpoints(sys.argv[1], {})
step = checkpoints.latest() or 0
print("ready", flush=True)
while True:
    step += 1
    checkpoints.save(step, {"w": jnp.full((400, 400), float(step)), "step": step})
"""


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    """A writer saves without pause and is killed again and again; every restart finds the last."""
    chance = random.Random(0)
    last = 0
    for _ in range(3):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, tmp_path],
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        )
        assert writer.stdout.readline() == b"ready\n"
        time.sleep(0.5 + chance.random())
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()

        checkpoints = Checkpoints(tmp_path, {})
        assert all(path.name.isdigit() for path in tmp_path.iterdir()), "leftovers"
        asked = abstract({"w": jnp.zeros((400, 400)), "step": 0})
        step, state = checkpoints.restore(asked)
        assert step == state["step"] >= last
        np.testing.assert_array_equal(state["w"], np.full((400, 400), float(step)))
        last = step
        checkpoints.close()
    assert last > 0
