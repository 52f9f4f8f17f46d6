"""Golden checkpoints, opened for tests."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from fakes import TinyModel

from mdlm_jax.models import hub, masks, transformer

ATOL = 2e-4  # of logits, as the goldens' READMEs suggest


class Case:
    """One golden folder: its arrays, its facts, its model and parameters."""

    def __init__(self, folder: Path):
        self.arrays = np.load(folder / "golden.npz")
        facts = folder / "golden.json"
        self.facts = json.loads(facts.read_text()) if facts.is_file() else {}
        self.checkpoint = hub.read(folder)
        self.config = self.checkpoint.config
        self.params = hub.load(self.checkpoint, dtype=jnp.float32)
        self.model = TinyModel(1, self.config)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def hidden(self, params: dict, tokens_BL, positions_BL, sight: masks.Sight, *cached):
        """Hidden states and the fresh cache under any mask."""
        module = transformer.Transformer(self.config)
        return module.apply({"params": params}, tokens_BL, positions_BL, sight, *cached)

    def unembed(self, params: dict, hidden) -> jax.Array:
        """Logits."""
        module = transformer.Transformer(self.config)
        return module.apply({"params": params}, hidden, method="unembed")

    def logits(self, tokens_BL, positions_BL, sight: masks.Sight, *cached) -> np.ndarray:
        """Logits f32[B, L, V] under any mask."""

        @jax.jit
        def run(params, *inputs):
            return self.unembed(params, self.hidden(params, *inputs)[0])

        return np.asarray(run(self.params, jnp.asarray(tokens_BL), positions_BL, sight, *cached))


def straight(tokens_BL) -> np.ndarray:
    """Positions 0, 1, ... of every row."""
    return np.broadcast_to(np.arange(tokens_BL.shape[1]), tokens_BL.shape)


def causal(positions_BL, live_BL=None) -> masks.Sight:
    """The causal mask."""
    live_BL = np.ones(positions_BL.shape, bool) if live_BL is None else live_BL
    return masks.clean(jnp.asarray(live_BL), jnp.asarray(positions_BL))


def block_causal(positions_BL, block: int, live_BL=None) -> masks.Sight:
    """SDAR's inference mask."""
    live_BL = np.ones(positions_BL.shape, bool) if live_BL is None else live_BL
    return masks.clean(
        jnp.asarray(live_BL), masks.order(jnp.asarray(positions_BL), block_length=block)
    )
