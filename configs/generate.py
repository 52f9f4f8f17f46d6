"""Lets one checkpoint write: a policy token by token, a world model by parallel unmasking.

    python -m mdlm_jax generate --config.model=PATH --config.prompt="..."

PATH is a folder in the Hugging Face layout, or a hub id where the hub can be reached. Cost: seconds
to compile, then the model's own speed. Prints the text, the forward passes and the tokens per pass;
--config.trace=trace.html also draws which token was unmasked when.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Model and prompt must be given."""
    config = ConfigDict()
    config.model = ""  # folder or hub id
    config.prompt = ""  # what the user says
    config.system = ""  # a system message before it; "" = none
    config.chat = True  # by the checkpoint's chat template; False = the prompt as plain text
    config.dtype = "bfloat16"  # of parameters and cache
    config.seed = 0
    config.decoder = "auto"  # block (SDAR), stream (WeDLM), autoregressive; auto = the family's
    config.max_tokens = 128
    config.temperature = 0.0  # 0 = greedy
    config.top_k = 0  # 0 = all
    config.top_p = 1.0
    config.min_p = 0.0  # not in streams
    config.repetition_penalty = 1.0  # autoregressive only
    config.trace = ""  # an HTML file for the picture of the unmasking

    block = config.block = ConfigDict()
    block.preset = "canonical"  # a key of diffusion.strategies.PRESETS: whose details of decoding
    block.length = 0  # tokens denoised together; 0 = the checkpoint's, or 4
    block.steps = 0  # denoising steps per block; 0 = the block's length
    block.strategy = "low_confidence_dynamic"  # a key of diffusion.strategies.STRATEGIES
    block.threshold = 0.9  # confidence, or nats for entropy_bounded

    stream = config.stream = ConfigDict()
    stream.window = 16  # places looked at together
    stream.threshold = 0.4  # nats, distance included, that let a token be kept at once
    stream.penalty = 0.02  # nats per place of distance to the first open one
    return config
