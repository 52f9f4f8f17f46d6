"""Released tokenizers and their chat templates."""

from pathlib import Path

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mdlm_jax.tokens import chat

TEMPLATE = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool.function.name }};{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'wizard' %}{{ raise_exception('unknown role') }}{% endif -%}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"""
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|MASK|>", "<think>", "</think>")
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "", "parameters": {"type": "object"}},
}


def make(folder: Path, template: str | None = TEMPLATE) -> Path:
    """A byte-level tokenizer in the hub's layout."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({word: i for i, word in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(SPECIAL))
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        chat_template=template,
        mask_token="<|MASK|>",
        eos_token="<|im_end|>",
    )
    made.save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("tokenizer"))


def spelled(tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids)


def test_a_conversation_by_the_checkpoint_s_own_template(folder: Path):
    tokenizer = chat.load(folder)
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    ids = chat.prompt_ids(tokenizer, asked)
    start, end = (tokenizer.convert_tokens_to_ids(word) for word in SPECIAL[:2])
    assert [ids.count(start), ids.count(end), ids[0]] == [3, 2, start]
    assert spelled(tokenizer, ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_tools_and_the_template_s_own_words_reach_it(folder: Path):
    tokenizer, asked = chat.load(folder), [{"role": "user", "content": "Hi"}]
    ids = chat.prompt_ids(tokenizer, asked, tools=[TOOL], enable_thinking=False)
    text = spelled(tokenizer, ids)
    assert text.startswith("<|im_start|>system\nlook;<|im_end|>\n")
    assert text.endswith("<think></think>")


def test_a_mask_token_in_a_user_s_text_is_just_an_id(folder: Path):
    tokenizer = chat.load(folder)
    ids = chat.prompt_ids(tokenizer, [{"role": "user", "content": "a <|MASK|> b"}])
    assert ids.count(tokenizer.mask_token_id) == 1
    assert chat.text(tokenizer, [*ids, len(tokenizer) + 7]).count("MASK") == 0


def test_what_is_wrong_with_a_tokenizer_is_said(folder: Path, tmp_path: Path):
    with pytest.raises(ValueError, match="no tokenizer files"):
        chat.load(tmp_path)
    words = len(chat.load(folder))
    with pytest.raises(ValueError, match=f"has {words} words, the embedding only {words - 1} rows"):
        chat.load(folder, vocab_size=words - 1)
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    with pytest.raises(ValueError, match="can't be read") as error:
        chat.load(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_what_a_template_refuses_is_said(folder: Path, tmp_path: Path):
    tokenizer = chat.load(folder)
    with pytest.raises(ValueError, match="unknown role"):
        chat.prompt_ids(tokenizer, [{"role": "wizard", "content": "Hi"}])
    bare = chat.load(make(tmp_path / "bare", template=None))
    with pytest.raises(ValueError, match="has no chat template"):
        chat.prompt_ids(bare, [{"role": "user", "content": "Hi"}])
