"""Safetensors files: where each tensor lies, and reading or writing one at a time.

Only the bytes of one tensor are ever in memory: files are read, not mapped, since mapped pages
count as the process's own.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Iterable

import ml_dtypes
import numpy as np
import safetensors.numpy

INDEX = "model.safetensors.index.json"
DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor on disk."""

    file: pathlib.Path
    dtype: str  # as safetensors calls it
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file

    def read(self) -> np.ndarray:
        """The whole tensor, from disk."""
        count = math.prod(self.shape)
        flat = np.fromfile(self.file, DTYPES[self.dtype], count, offset=self.offset)
        return flat.reshape(self.shape)


def tensors(folder: pathlib.Path) -> dict[str, Tensor]:
    """Every tensor of a folder by its name.

    Raises ValueError for a folder without safetensors, a missing shard, or a torn file.
    """
    found = {}
    for file in _files(folder):
        found |= _header(file)
    return found


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    index = folder / INDEX
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ValueError(f"{folder}: no *.safetensors in it (pickled weights are not read)")
        return files
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{index}: not an index of safetensors ({error!r})") from None
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{index}: names files that are not there: {', '.join(missing)}")
    return [folder / name for name in names]


def _header(file: pathlib.Path) -> dict[str, Tensor]:
    """What the file says it holds, checked against its size."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= size - 8:
            raise ValueError(f"{file}: torn or not safetensors (no header within {size} bytes)")
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise ValueError(f"{file}: its header is not JSON ({error})") from None
    header.pop("__metadata__", None)
    start = 8 + length
    end = start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if end != size:
        raise ValueError(f"{file}: torn: {size} bytes, its header speaks of {end}")
    return {
        name: Tensor(file, e["dtype"], tuple(e["shape"]), start + e["data_offsets"][0])
        for name, e in header.items()
    }


def save(
    folder: pathlib.Path, named: Iterable[tuple[str, np.ndarray]], *, shard_bytes: int
) -> None:
    """Writes tensors to `model.safetensors`, or to several files with their index.

    Each file is written whole before its name appears, and the index comes last. Raises
    FileExistsError where the folder holds weights already.
    """
    if old := next(folder.glob("*.safetensors"), None):
        raise FileExistsError(f"{old} is there already; choose another folder or remove it")
    shards, part, size, total = [], {}, 0, 0
    for name, array in named:
        if part and size + array.nbytes > shard_bytes:
            shards.append(_write(folder, len(shards), part))
            part, size = {}, 0
        part[name] = array
        size, total = size + array.nbytes, total + array.nbytes
    shards.append(_write(folder, len(shards), part))
    _name(folder, shards, total)


def _write(folder: pathlib.Path, number: int, part: dict[str, np.ndarray]):
    """Writes one file under a passing name: (its path, the names of its tensors)."""
    path = folder / f"writing-{number:05d}.part"
    safetensors.numpy.save_file(part, path, metadata={"format": "pt"})
    return path, list(part)


def _name(folder: pathlib.Path, shards: list[tuple[pathlib.Path, list[str]]], total: int) -> None:
    if len(shards) == 1:
        shards[0][0].rename(folder / "model.safetensors")
        return
    places = {}
    for number, (path, names) in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        path.rename(folder / file)
        places |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
