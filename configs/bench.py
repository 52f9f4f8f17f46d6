"""What this machine does with a released shape.

    python -m mdlm_jax bench load

writes a random checkpoint in the shape of Qwen3-1.7B (3.4 GB of disk, removed afterwards), loads it
in a process of its own, and prints how long that took and how much memory it held at most. Cost: a
minute or two.

    python -m mdlm_jax bench decode

lets two random models write the same tokens here and in torch (pip install -e '.[peers]'), one at a
time and by blocks, and prints both sides' medians. Cost: about ten minutes on two CPU cores.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Every bench's plan."""
    config = ConfigDict()
    load = config.load = ConfigDict()  # the shape of Qwen3-1.7B
    load.repeats = 3  # loads, each in a process of its own
    load.dtype = "bfloat16"  # of the parameters in memory
    load.folder = ""  # where the checkpoint is written for the time of the bench; "" = temporary
    load.layers = 28
    load.width = 2048
    load.heads = 16
    load.kv_heads = 8
    load.mlp = 6144
    load.vocab = 151936

    decode = config.decode = ConfigDict()
    decode.models = ("small", "large")  # of shapes: 60 and 300 million parameters
    decode.shapes = ConfigDict(
        {"small": shape(384, 20, 6, 1024), "large": shape(1024, 17, 16, 3072)}
    )
    decode.batches = (1, 8, 32)
    decode.prompt = 32  # tokens; whole blocks
    decode.tokens = 64  # written behind it
    decode.repeats = 3  # of each side, in turn
    decode.block = 4  # SDAR's
    decode.threshold = 0.9  # confidence of low_confidence_dynamic
    return config


def shape(width: int, layers: int, heads: int, mlp: int) -> ConfigDict:
    """A Qwen3 of that size, with a vocabulary of 32k."""
    return ConfigDict(
        {
            "vocab_size": 32000,
            "hidden_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": 64,
            "intermediate_size": mlp,
            "rope_theta": 1e6,
            "tie_word_embeddings": False,
        }
    )
