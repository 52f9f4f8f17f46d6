"""Checkpoints (orbax v1) that survive a kill at any moment and resume bit for bit.

A step becomes visible by one rename, after all of it is on disk; what a killed process left
half-written is never read and is removed when the folder is next opened.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp


class Checkpoints:
    """The last steps of one run, in one folder.

    A program restores once at its start and saves every so often; a run is complete when
    `latest()` equals its number of steps.

    Args:
        folder: made if it is not there.
        fingerprint: everything that changes the numbers of the run (config, data), JSON-like.
            It is stored with every step and has to match on resume.
        keep: latest steps to keep.

    Raises:
        ValueError: what the folder holds was made with another fingerprint, or is damaged.
    """

    def __init__(self, folder: str | Path, fingerprint: dict[str, Any], *, keep: int = 2):
        self.folder = Path(folder).absolute()
        self.fingerprint = json.loads(json.dumps(fingerprint))  # tuples become lists, as on disk
        self._steps = _steps(self.folder, keep=keep)
        if self.latest() is not None:
            try:
                self._check_fingerprint()
            except ValueError:
                self.close()
                raise

    def latest(self) -> int | None:
        """The newest complete step; None in a fresh folder."""
        latest = self._steps.latest
        return None if latest is None else latest.step

    def save(self, step: int, state: Any) -> None:
        """Writes `state`, a pytree of arrays, typed keys and numbers; returns when it is on disk.

        A step that is there already is left alone: a resumed run would write the same again.
        """
        if self.latest() != step:
            self._steps.save(
                step, state, force=True, custom_metadata={"fingerprint": self.fingerprint}
            )

    def restore(self, abstract_state: Any) -> tuple[int, Any] | None:
        """The newest step and its state, or None in a fresh folder.

        Args:
            abstract_state: the state's pytree of `jax.ShapeDtypeStruct`, each with the sharding
                that its array is read into (see `abstract`).
        """
        step = self.latest()
        if step is None:
            return None
        with _explained(self.folder / str(step)):
            return step, self._steps.load(step, abstract_state)

    def close(self) -> None:
        """Ends orbax's threads; left alone, they complain when Python ends."""
        self._steps.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_fingerprint(self) -> None:
        path = self.folder / str(self.latest())
        with _explained(path):
            stored = self._steps.metadata(self.latest()).custom_metadata["fingerprint"]
        old, new = _flatten(stored), _flatten(self.fingerprint)
        lines = [
            f"  {key}: {old.get(key, '(absent)')!r} there, {new.get(key, '(absent)')!r} now"
            for key in sorted(old | new)
            if old.get(key, "(absent)") != new.get(key, "(absent)")
        ]
        if lines:
            raise ValueError(
                f"{self.folder} holds a run with other settings:\n" + "\n".join(lines) + "\n"
                "Choose another --workdir, set these back, or delete that folder to start over."
            )


def save_params(folder: str | Path, params: Any) -> None:
    """Replaces the parameters in `folder`, with no moment at which there are none."""
    with Checkpoints(folder, {}, keep=1) as checkpoints:
        checkpoints.save((checkpoints.latest() or 0) + 1, params)


def load_params(folder: str | Path, abstract_params: Any, *, made_by: str) -> Any:
    """The parameters that `save_params` put into `folder`, in the given shardings.

    Args:
        abstract_params: pytree of `jax.ShapeDtypeStruct` with shardings.
        made_by: the command that would have made them, for the error message.

    Raises:
        FileNotFoundError: there are none.
        ValueError: they are damaged or of another shape.
    """
    folder = Path(folder).absolute()
    if not folder.exists():
        raise FileNotFoundError(f"no parameters in {folder}; `{made_by}` makes them")
    with Checkpoints(folder, {}, keep=1) as checkpoints:
        restored = checkpoints.restore(abstract_params)
    if restored is None:
        raise FileNotFoundError(f"no parameters in {folder}; `{made_by}` makes them")
    return restored[1]


def abstract(tree: Any) -> Any:
    """Shape, dtype and sharding of each array of a tree: what `restore` asks for."""
    return jax.tree.map(
        lambda leaf: (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            if isinstance(leaf, jax.Array)
            else leaf
        ),
        tree,
    )


def _steps(folder: Path, *, keep: int) -> ocp.training.Checkpointer:
    context = ocp.Context()
    # Smaller replicated arrays are written by one device: splitting them doubles a save's time.
    context.array.saving.min_slice_bytes_for_replica_parallel = 2**24
    return ocp.training.Checkpointer(
        folder,
        context=context,
        preservation_policy=ocp.training.preservation_policies.LatestN(keep),
        cleanup_tmp_directories=True,
    )


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Says what to do when a checkpoint cannot be read, whatever orbax raised."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"the checkpoint {path} cannot be read: it is damaged, or its arrays have another "
            f"shape than this run's. Delete that folder to go on from the step before it.\n"
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
        ) from error


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    flat = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
