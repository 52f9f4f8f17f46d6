"""Checkpoints in the Hugging Face layout, in and out: safetensors only, tensor by tensor.

A parameter is read straight into its sharding, one stack of layers at a time, so the host holds at
most that one beside what it keeps.
"""

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from mdlm_jax.models import families, transformer
from mdlm_jax.models.config import ModelConfig
from mdlm_jax.models.weights import Tensor, save, tensors

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A folder's config files, read; its tensors are still on disk."""

    folder: pathlib.Path
    raw: dict  # config.json
    generation: dict  # generation_config.json; {} where there is none
    config: ModelConfig

    @property
    def model_type(self) -> str:
        """The family."""
        return self.raw["model_type"]

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Every id that ends a text, of both files; () where none is named."""
        found = set()
        for source in (self.raw, self.generation):
            ids = source.get("eos_token_id")
            found |= set(ids if isinstance(ids, list) else [] if ids is None else [ids])
        return tuple(sorted(found))

    @property
    def mask_id(self) -> int | None:
        """The mask token's id, if the config files decide it. WeDLM's null means 151665."""
        found = self.raw.get("mask_token_id")
        if found is None and self.model_type == "wedlm":
            return families.WEDLM_MASK_ID
        return found

    @property
    def block_length(self) -> int | None:
        """The block length that the config names, if it names one."""
        return self.raw.get("block_size")


def locate(model: str) -> pathlib.Path:
    """The folder of a checkpoint: a local path, or a hub id, which is downloaded.

    Raises FileNotFoundError where it is neither.
    """
    folder = pathlib.Path(model)
    if folder.is_dir():
        return folder
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise FileNotFoundError(f"{model}: no such folder, and not a hub id like Qwen/Qwen3-0.6B")
    from huggingface_hub import snapshot_download

    try:
        return pathlib.Path(snapshot_download(model, ignore_patterns=["*.bin", "*.pt", "*.pth"]))
    except Exception as error:  # of the hub's many kinds; the cause is kept and named
        raise FileNotFoundError(f"{model}: not a folder here, and the hub says: {error}") from error


def read(folder: pathlib.Path | str) -> Checkpoint:
    """The config files of a folder. Raises ValueError that names the file and the field."""
    folder = pathlib.Path(folder)
    raw = _json(folder / "config.json")
    try:
        config = families.model_config(raw)
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from None
    generation = folder / "generation_config.json"
    return Checkpoint(folder, raw, _json(generation) if generation.is_file() else {}, config)


def _json(path: pathlib.Path) -> dict:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None


# ---- in ----------------------------------------------------------------------------------------


def load(
    checkpoint: Checkpoint, *, dtype: jnp.dtype = jnp.bfloat16, shardings: dict | None = None
) -> dict:
    """The parameters, each in its sharding (default: whole, on the first device).

    Raises ValueError that lists every missing, surplus or ill-shaped tensor with its file.
    """
    shapes = jax.eval_shape(lambda: transformer.init(jax.random.key(0), checkpoint.config))
    found = tensors(checkpoint.folder)
    _check(checkpoint, found, shapes)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def place(path, shape, at):
        names, layout = _names(path, checkpoint), families.layout(_keys(path))
        cut = lambda index: _cut(found, names, layout, shape.shape, index, dtype)  # noqa: E731
        return jax.make_array_from_callback(shape.shape, at, cut)

    shardings = jax.tree.map(lambda _: here, shapes) if shardings is None else shardings
    return jax.tree_util.tree_map_with_path(place, shapes, shardings)


def _cut(
    found: dict[str, Tensor],
    names: np.ndarray,
    layout: str,
    shape: tuple[int, ...],
    index: tuple[slice, ...],
    dtype: jnp.dtype,
) -> np.ndarray:
    """One device's part of a parameter, read from the tensors that it touches."""
    names, inner = names[(*index[: names.ndim], ...)], index[names.ndim :]
    sizes = [len(range(*part.indices(size))) for size, part in zip(shape, index, strict=True)]
    part = np.empty(sizes, dtype)
    for place in np.ndindex(*sizes[: names.ndim]):
        tensor = TURN[layout](found[names[place]].read())[inner]
        if tensor.dtype == part.dtype:
            # As plain bits: numpy copies bfloat16 value by value.
            _bits(part)[place] = _bits(tensor)
        else:
            part[place] = tensor
    return part


def _bits(values: np.ndarray) -> np.ndarray:
    return values.view(f"u{values.dtype.itemsize}")


# The hub's tensor -> one place of our parameter. Linear kernels lie [out, in] on the hub.
TURN = {
    "same": lambda x: x,
    "transposed": lambda x: x.T,
    "taps": lambda x: x[:, 0].T,  # [D, 1, T] -> [T, D]
}
TURN_BACK = {**TURN, "taps": lambda x: x.T[:, None]}


def _keys(path: tuple) -> tuple[str, ...]:
    return tuple(part.key for part in path)


def _names(path: tuple, checkpoint: Checkpoint) -> np.ndarray:
    return families.tensor_names(_keys(path), checkpoint.config, checkpoint.model_type)


# Tensors that some files hold although they follow from others.
DERIVED = ("rotary_emb.inv_freq",)
FLOATS = ("BF16", "F16", "F32", "F64")


def _check(checkpoint: Checkpoint, found: dict[str, Tensor], shapes: dict) -> None:
    """Every tensor is wanted, every wanted one is there, and shapes and dtypes agree."""
    faults, wanted = [], set()
    for path, shape in jax.tree_util.tree_flatten_with_path(shapes)[0]:
        names, layout = _names(path, checkpoint), families.layout(_keys(path))
        expected = hub_shape(shape.shape[names.ndim :], layout)
        for name in names.ravel():
            wanted.add(name)
            faults += _faults(name, found.get(name), expected)
    spare = {n for n in found if n not in wanted and not n.endswith(DERIVED)}
    if checkpoint.config.tie_word_embeddings and "lm_head.weight" in spare:
        spare -= {"lm_head.weight"}
        if (found["lm_head.weight"].read() != found["model.embed_tokens.weight"].read()).any():
            faults.append("lm_head.weight: differs from the embedding it is tied to")
    faults += [
        f"{name}: not a part of {checkpoint.model_type} ({found[name].file.name})"
        for name in sorted(spare)
    ]
    if faults:
        head = f"{checkpoint.folder}: {len(faults)} of its tensors do not fit config.json"
        raise ValueError("\n  ".join([head, *faults]))


def hub_shape(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """The shape on the hub of one place of our parameter."""
    if layout == "taps":
        return shape[1], 1, shape[0]
    return shape[::-1] if layout == "transposed" else shape


def _faults(name: str, tensor: Tensor | None, expected: tuple[int, ...]) -> list[str]:
    if tensor is None:
        return [f"{name}: missing"]
    if tensor.shape != expected:
        return [f"{name}: shape {tensor.shape} instead of {expected} ({tensor.file.name})"]
    if tensor.dtype not in FLOATS:
        return [f"{name}: dtype {tensor.dtype}, none of {', '.join(FLOATS)} ({tensor.file.name})"]
    return []


# ---- out ---------------------------------------------------------------------------------------


def export(
    folder: pathlib.Path | str,
    params: dict,
    config: ModelConfig,
    *,
    like: Checkpoint | None = None,
    shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes a folder that transformers, vLLM and lmdeploy load.

    Config and tokenizer files are those of `like`, the checkpoint that the parameters came from;
    without it the config is written for the form that models made here have.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    raw = families.raw_config(config) if like is None else like.raw
    raw = raw | {"vocab_size": config.vocab_size, "torch_dtype": str(_dtype(params))}
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    if like is not None:
        _copy_files(like.folder, folder)
    save(folder, hub_tensors(params, config, raw["model_type"]), shard_bytes=shard_bytes)


def _dtype(params: dict) -> jnp.dtype:
    return jax.tree.leaves(params)[0].dtype


def _copy_files(source: pathlib.Path, folder: pathlib.Path) -> None:
    for name in ("generation_config.json", *TOKENIZER_FILES):
        if (source / name).is_file() and source.resolve() != folder.resolve():
            shutil.copyfile(source / name, folder / name)


def hub_tensors(
    params: dict, config: ModelConfig, model_type: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor under its hub name; one stack is on the host at a time."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        keys = _keys(path)
        names = families.tensor_names(keys, config, model_type)
        stack = np.asarray(leaf)
        for place in np.ndindex(names.shape):
            turned = TURN_BACK[families.layout(keys)](stack[place])
            yield names[place], np.ascontiguousarray(turned)
