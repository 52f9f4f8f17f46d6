"""A GGUF file as a checkpoint folder in the Hugging Face layout, weights dequantised to float32."""

import json
import pathlib

from ml_collections import ConfigDict
from tqdm import tqdm

from mdlm_jax import check
from mdlm_jax.models import gguf, weights
from mdlm_jax.tokens import gguf as words

SHARD_BYTES = 2 * 10**9


def run(config: ConfigDict) -> None:
    """Writes the folder `config.target` from the file `config.source`."""
    target = pathlib.Path(config.target)
    with check.user_errors():
        reader = gguf.open_file(pathlib.Path(config.source))
        said = gguf.fields(reader)
        raw, tokenizer = gguf.raw_config(reader, said), words.tokenizer(said)
        target.mkdir(parents=True, exist_ok=True)
        count = len(reader.tensors)
        tensors = tqdm(gguf.hub_tensors(reader, raw), total=count, desc="convert", unit="tensor")
        weights.save(target, tensors, shard_bytes=SHARD_BYTES)
    tokenizer.save_pretrained(str(target))
    (target / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    command = f'python -m mdlm_jax generate --config.model={target} --config.prompt="..."'
    print(f"{raw['model_type']}, {count} tensors -> {target}; next: {command}", flush=True)
