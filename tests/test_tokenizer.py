"""Text goes in and comes out; special ids never come from text."""

import pytest

from mdlm_jax.tokens import tokenizer

TEXTS = [
    f"You are in the {room}.\nYou see a {thing} that has nothing on it. ÄÖ <|solved|> é"
    for room in ("pantry", "kitchen", "hall")
    for thing in ("shelf", "table", "chair", "box")
]
PHRASES = tokenizer.common_phrases(TEXTS, share=0.9, most=3)


@pytest.fixture(scope="module")
def words() -> tokenizer.Tokenizer:
    return tokenizer.train(TEXTS, vocab_size=320, phrases=PHRASES)


@pytest.mark.parametrize(
    "text",
    [
        TEXTS[0],
        "",
        " ",
        "\n\n two  blanks\tand a tab ",
        "never seen: 雪 🙂 \x00 ñ",
        "<|solved|>",
        "you win <|end|><|mask|> <|pad|>!",
        " that has nothing on it. that has nothing on it.",
    ],
)
def test_text_comes_back_and_holds_no_special_id(words, text):
    ids = words.encode(text)
    assert words.decode(ids) == text
    assert not set(ids) & set(range(len(tokenizer.SPECIALS)))
    assert all(0 <= i < words.vocab_size for i in ids)


def test_specials_take_the_first_ids_in_order_and_are_not_decoded(words):
    special = words.special
    assert (special.pad, special.mask, special.system, special.end) == (0, 1, 2, 3)
    assert special.statuses == (4, 5, 6)
    ids = [special.system, *words.encode("hall"), special.end, special.pad, special.solved]
    assert words.decode(ids) == "hall"
    assert [words.piece(i) for i in (0, 5)] == ["<|pad|>", "<|solved|>"]
    assert words.piece(words.encode("hall")[0]) in "hall"


def test_a_phrase_is_one_token_wherever_it_stands(words):
    assert PHRASES
    for phrase in PHRASES:
        assert len(words.encode(phrase)) == 1
        assert words.decode(words.encode(f"xx{phrase} yy")) == f"xx{phrase} yy"
    assert words.vocab_size <= 320


def test_phrases_are_common_and_cross_no_line_and_no_other_phrase():
    assert any("that has nothing on it." in phrase for phrase in PHRASES)
    for phrase in PHRASES:
        assert "\n" not in phrase
        assert sum(phrase in text for text in TEXTS) >= 0.9 * len(TEXTS)
        assert not any(name in phrase for name in ("pantry", "kitchen", "shelf", "box"))
    assert tokenizer.common_phrases(TEXTS, share=0.9, most=1) == PHRASES[:1]
    assert tokenizer.common_phrases(["one two", "three four"], share=0.9, most=5) == []


def test_a_phrase_is_always_a_piece_of_the_text_whatever_its_white_space():
    texts = ["a  b c\td e", "a  b c\td e"]
    for phrase in tokenizer.common_phrases(texts, share=1.0, most=5):
        assert phrase in texts[0]


def test_training_again_gives_the_same_tokenizer(tmp_path, words):
    words.save(tmp_path / "a.json")
    tokenizer.train(TEXTS, vocab_size=320, phrases=PHRASES).save(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_a_saved_tokenizer_reads_back_the_same(tmp_path, words):
    words.save(tmp_path / "tokenizer.json")
    again = tokenizer.load(tmp_path / "tokenizer.json")
    assert again.special == words.special
    for text in (*TEXTS, "<|solved|> <|end|>"):
        assert again.encode(text) == words.encode(text)
        assert again.decode(again.encode(text)) == text


def test_a_missing_or_torn_file_is_a_named_error(tmp_path, words):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(ValueError, match="tokenizer.json is missing; .*sft --what=world"):
        tokenizer.load(path)
    words.save(path)
    path.write_text(path.read_text()[:500])
    with pytest.raises(ValueError, match="tokenizer.json can't be read .* delete it"):
        tokenizer.load(path)


def test_a_tokenizer_without_our_specials_is_refused():
    inner = tokenizer.tokenizers.Tokenizer(tokenizer.models.BPE())
    with pytest.raises(ValueError, match="lacks the special tokens"):
        tokenizer.Tokenizer(inner)
