"""What lies where, and the errors of a mesh that can't be."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from fakes import TINY
from jax.sharding import PartitionSpec as P

from mdlm_jax.models import transformer
from mdlm_jax.train import mesh


def test_one_axis_takes_what_is_left():
    on = mesh.make(data=-1, fsdp=2, tensor=1)
    assert dict(on.shape) == {"data": 4, "fsdp": 2, "tensor": 1}
    assert mesh.row_shards(on) == 8
    assert all(kind == jax.sharding.AxisType.Auto for kind in on.axis_types)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((3, 1, 1), "does not divide the 8 devices"),
        ((-1, 3, 1), "does not divide the 8 devices"),
        ((2, 2, 1), "does not divide the 8 devices"),
        ((-1, -1, 1), "one of them may be -1"),
        ((0, 8, 1), "sizes are at least 1"),
        ((-2, 8, 1), "sizes are at least 1"),
    ],
)
def test_an_impossible_mesh_is_an_error_with_a_hint(sizes, said):
    with pytest.raises(ValueError, match=said):
        mesh.make(data=sizes[0], fsdp=sizes[1], tensor=sizes[2])


def test_rows_are_split_over_data_and_fsdp_along_any_axis():
    on = mesh.make(data=4, fsdp=2, tensor=1)
    x = jax.device_put(np.arange(16).reshape(2, 8), mesh.row_axis(on, 1))
    assert {shard.data.shape for shard in x.addressable_shards} == {(2, 1)}
    y = jax.device_put(np.arange(16).reshape(8, 2), mesh.rows(on))
    assert {shard.data.shape for shard in y.addressable_shards} == {(1, 2)}
    z = jax.device_put(np.arange(3), mesh.replicated(on))
    assert {shard.data.shape for shard in z.addressable_shards} == {(3,)}


def tiny_shapes():
    shapes = jax.eval_shape(lambda: transformer.init(jax.random.key(0), TINY))
    return transformer.axes(shapes), shapes


def test_parameters_are_split_by_their_logical_axes():
    on = mesh.make(data=2, fsdp=2, tensor=2)
    shapes = {"layers": {"q_proj": {"kernel": SimpleNamespace(shape=(3, 10, 24))}}}
    axes = {"layers": {"q_proj": {"kernel": ("layers", "embed", "heads")}}}
    at = mesh.param_shardings(on, axes, shapes)
    assert at["layers"]["q_proj"]["kernel"].spec == P(None, "fsdp", "tensor")


def test_a_size_that_does_not_divide_is_named():
    axes, shapes = tiny_shapes()  # its vocabulary of 23 tokens can't be halved
    with pytest.raises(ValueError, match=r"'embedding'.*\(23, 10\) can't be split .*'tensor' of 2"):
        mesh.param_shardings(mesh.make(data=4, fsdp=1, tensor=2), axes, shapes)
    whole = mesh.param_shardings(mesh.make(data=4, fsdp=2, tensor=1), axes, shapes)
    assert jax.tree.structure(whole) == jax.tree.structure(shapes)
