"""The tokenizer inside a GGUF file, as a Hugging Face tokenizer."""

from typing import Any

import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL = 3  # token type of llama.cpp for words that text never spells


def _digits_apart() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


# How text is cut before the merges, by llama.cpp's name for it.
CUTS = {"smollm": _digits_apart}


def tokenizer(said: dict[str, Any]) -> transformers.PreTrainedTokenizerFast:
    """The tokenizer of a file's fields. Raises ValueError where its kind is not known."""
    kind, cut = said["tokenizer.ggml.model"], said.get("tokenizer.ggml.pre")
    if kind != "gpt2" or cut not in CUTS:
        known = ", ".join(CUTS)
        raise ValueError(f"tokenizer {kind!r} cut by {cut!r}: known is 'gpt2' cut by {known}")
    words = said["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in said["tokenizer.ggml.merges"]]
    inner = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    inner.pre_tokenizer, inner.decoder = CUTS[cut](), decoders.ByteLevel()
    types = said["tokenizer.ggml.token_type"]
    control = [w for w, kind in zip(words, types, strict=True) if kind == CONTROL]
    inner.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in control])
    named = {
        f"{name}_token": words[said[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"tokenizer.ggml.{key}_token_id" in said
    }
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, chat_template=said.get("tokenizer.chat_template"), **named
    )
