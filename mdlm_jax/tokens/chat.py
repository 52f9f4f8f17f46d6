"""Released tokenizers and their chat templates, as the checkpoints carry them.

A template is jinja2 in the tokenizer's own files; nothing about any family is written here.
"""

import pathlib
from collections.abc import Sequence

import transformers
from transformers import PreTrainedTokenizerBase


def load(folder: pathlib.Path, *, vocab_size: int | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint's folder.

    Raises ValueError that names the folder where it has none, or where it has more words than the
    model's `vocab_size`.
    """
    files = ("tokenizer.json", "tokenizer_config.json", "vocab.json")
    if not any((folder / name).is_file() for name in files):
        raise ValueError(f"{folder}: no tokenizer files in it ({', '.join(files)})")
    try:
        found = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise ValueError(f"{folder}: its tokenizer can't be read: {error}") from error
    if vocab_size is not None and len(found) > vocab_size:
        raise ValueError(
            f"{folder}: the tokenizer has {len(found)} words, the embedding only {vocab_size} rows"
        )
    return found


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict],
    *,
    tools: Sequence[dict] = (),
    **template,
) -> list[int]:
    """Ids of a conversation up to where the next message is written, by the checkpoint's template.

    `template` goes to it as it is (`enable_thinking=False` for Qwen3). A word of the user's that
    spells a special token becomes that token's id, the mask's too: what is masked is tracked by
    position, so it is read as it stands and never filled.

    Raises ValueError where the tokenizer has no template or the template refuses the messages.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            f"{tokenizer.name_or_path}: has no chat template; give the prompt as plain text"
        )
    try:
        encoded = tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) or None,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **template,
        )
    except Exception as error:  # jinja2's own errors, and what templates raise on purpose
        raise ValueError(f"{tokenizer.name_or_path}: its chat template says: {error}") from error
    return list(encoded["input_ids"])


def text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """What ids spell, without special tokens. Ids behind the tokenizer's last word are left out."""
    words = len(tokenizer)
    return tokenizer.decode([i for i in ids if i < words], skip_special_tokens=True)
