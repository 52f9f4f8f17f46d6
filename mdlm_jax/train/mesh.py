"""The device mesh, and what lies where on it."""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("data", "fsdp", "tensor")
ROWS = P(("data", "fsdp"))  # rows of a batch are split over both

# Logical axis of a parameter -> mesh axis, in the training layout.
RULES = {
    "layers": None,
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "mlp": "tensor",
    None: None,
}


def make(*, data: int, fsdp: int, tensor: int) -> Mesh:
    """A mesh over all devices; one axis may be -1 and takes what is left.

    Raises ValueError where that is not possible.
    """
    sizes = np.array([data, fsdp, tensor])
    devices = jax.device_count()
    known = int(np.prod(sizes[sizes > 0]))
    free = int((sizes == -1).sum())
    if free > 1 or ((sizes < 1) & (sizes != -1)).any():
        raise ValueError(
            f"mesh data={data} fsdp={fsdp} tensor={tensor}: sizes are at least 1; "
            "one of them may be -1 to take what is left"
        )
    if devices % known or (not free and known != devices):
        raise ValueError(
            f"mesh data={data} fsdp={fsdp} tensor={tensor} does not divide the {devices} devices "
            "here; set one axis to -1 to take what is left"
        )
    sizes[sizes == -1] = devices // known
    return jax.make_mesh(tuple(int(s) for s in sizes), AXES, axis_types=(AxisType.Auto,) * 3)


def replicated(mesh: Mesh) -> NamedSharding:
    """The same everywhere."""
    return NamedSharding(mesh, P())


def rows(mesh: Mesh) -> NamedSharding:
    """Split along the leading axis."""
    return NamedSharding(mesh, ROWS)


def row_axis(mesh: Mesh, axis: int) -> NamedSharding:
    """Rows split along the given axis of an array."""
    return NamedSharding(mesh, P(*(None,) * axis, *ROWS))


def row_shards(mesh: Mesh) -> int:
    """How many pieces a batch is split into."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def param_shardings(mesh: Mesh, axes: dict, shapes: dict) -> dict:
    """NamedSharding per parameter, from its logical axes.

    Raises ValueError where a size can't be divided.
    """

    def one(path, names, shape):
        spec = tuple(RULES[name] for name in names)
        for axis, size in zip(spec, shape.shape, strict=True):
            if axis is not None and size % mesh.shape[axis]:
                raise ValueError(
                    f"parameter {jax.tree_util.keystr(path)} of shape {shape.shape} can't be split "
                    f"over mesh axis {axis!r} of {mesh.shape[axis]} devices"
                )
        return NamedSharding(mesh, P(*spec))

    return jax.tree_util.tree_map_with_path(
        one, axes, shapes, is_leaf=lambda leaf: isinstance(leaf, tuple)
    )
