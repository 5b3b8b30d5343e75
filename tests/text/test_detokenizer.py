"""The incremental text of a token sequence, compared with its full decode."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.decoders import DecodeStream

from genserve.text.detokenizer import Detokenizer
from genserve.text.tokenizer import Tokenizer
from tests.text.vocabularies import FAMILIES, TEXTS, tokenizer_of

TOKENIZERS = {family.__name__: tokenizer_of(family()) for family in FAMILIES}
NUM_UNKNOWN_IDS = 5  # as in a model whose embedding has more rows than the vocabulary


def pieces(tokenizer: Tokenizer, ids: Sequence[int], **options: bool) -> list[str]:
    detokenizer = tokenizer.detokenizer(**options)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


@pytest.mark.parametrize("family", TOKENIZERS)
@given(data=st.data(), skip=st.booleans())
def test_the_joined_pieces_are_the_full_decode(family: str, skip: bool, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[family]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1 + NUM_UNKNOWN_IDS), max_size=60))
    joined = "".join(pieces(tokenizer, ids, skip_special_tokens=skip))
    assert joined == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("family", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_emoji_cjk_and_combining_marks_are_as_in_a_full_decode(family: str, text: str) -> None:
    tokenizer = TOKENIZERS[family]
    ids = tokenizer.encode(text)
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("family", TOKENIZERS)
@given(data=st.data())
def test_all_orders_of_a_few_difficult_tokens_join_to_the_full_decode(
    family: str, data: st.DataObject
) -> None:
    tokenizer = TOKENIZERS[family]
    texts = ["\N{GRINNING FACE}", "\u20ac", "a", " a", "  ", "\N{REPLACEMENT CHARACTER}", "\n"]
    usual = {i for text in texts for i in tokenizer.encode(text, add_special_tokens=False)}
    ids = data.draw(st.lists(st.sampled_from(sorted(usual | {0, 2})), max_size=60))
    skip = data.draw(st.booleans())
    joined = "".join(pieces(tokenizer, ids, skip_special_tokens=skip))
    assert joined == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("family", TOKENIZERS)
@given(data=st.data())
def test_a_peek_equals_the_text_of_a_last_token(family: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[family]
    *ids, last = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=30))
    detokenizer = tokenizer.detokenizer()
    for token_id in ids:
        detokenizer.push(token_id)
    peeked = detokenizer.peek(last)
    assert peeked == detokenizer.push(last) + detokenizer.flush()


@given(text=st.text(max_size=30))
def test_text_comes_in_whole_characters_and_as_soon_as_they_are_whole(text: str) -> None:
    tokenizer = TOKENIZERS["byte_level_bpe"]
    ids = tokenizer.encode(text.replace("\N{REPLACEMENT CHARACTER}", ""))
    *streamed, rest = pieces(tokenizer, ids)
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(streamed)
    assert rest == ""


def test_an_incomplete_character_becomes_a_replacement_character_at_the_end() -> None:
    tokenizer = TOKENIZERS["byte_level_bpe"]
    ids = tokenizer.encode("a\N{GRINNING FACE}")
    assert pieces(tokenizer, ids[:-1]) == ["a", "", "", "", "\N{REPLACEMENT CHARACTER}"]


def test_a_run_of_byte_tokens_is_held_back_until_its_end() -> None:
    tokenizer = TOKENIZERS["sentencepiece_bpe"]
    newline, bad_byte, a = (tokenizer._backend.token_to_id(token) for token in ("<0x0A>", "<0xFF>", "a"))
    assert pieces(tokenizer, [newline, newline, a]) == ["", "", "\n\na", ""]
    assert pieces(tokenizer, [newline, bad_byte, a]) == ["", "", "\N{REPLACEMENT CHARACTER}" * 2 + "a", ""]


def test_special_tokens_are_shown_on_request() -> None:
    tokenizer = TOKENIZERS["byte_level_bpe"]
    ids = tokenizer.encode("a<|im_end|><|im_start|>b")
    assert "".join(pieces(tokenizer, ids)) == "ab"
    assert "".join(pieces(tokenizer, ids, skip_special_tokens=False)) == "a<|im_end|><|im_start|>b"


def test_the_spaces_between_special_tokens_can_be_left_out() -> None:
    tokenizer = TOKENIZERS["word_piece"]
    the, begin, end = (tokenizer._backend.token_to_id(token) for token in ("The", "<s>", "</s>"))
    ids = [begin, the, end, end, begin, the]

    def text(**options: bool) -> str:
        return "".join(pieces(tokenizer, ids, skip_special_tokens=False, **options))

    assert text() == "<s> The </s> </s> <s> The"
    assert text(spaces_between_special_tokens=False) == "<s> The </s></s><s> The"


def test_the_librarys_own_stream_loses_text_and_raises() -> None:
    """The reason for our own detokenizer; if this fails, the library's may suffice."""
    tokenizer = TOKENIZERS["byte_level_bpe"]
    stream = DecodeStream(skip_special_tokens=True)
    ids = tokenizer.encode("a\N{GRINNING FACE}")[:-1]
    assert "".join(filter(None, (stream.step(tokenizer._backend, i) for i in ids))) == "a"  # and has no end
    assert tokenizer.decode(ids) == "a\N{REPLACEMENT CHARACTER}"
    tokenizer = TOKENIZERS["sentencepiece_bpe"]
    newline, bad_byte, a = (tokenizer._backend.token_to_id(token) for token in ("<0x0A>", "<0xFF>", "a"))
    stream = DecodeStream(skip_special_tokens=True)
    with pytest.raises(Exception, match="Invalid prefix"):
        [stream.step(tokenizer._backend, i) for i in (newline, bad_byte, a, newline, bad_byte, a)]


class CountingVocabulary:
    """A tokenizer that counts the ids it decodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.is_silent = tokenizer.is_silent
        self.is_byte_fallback = tokenizer.is_byte_fallback
        self.num_decoded = 0

    def decode(self, token_ids: Sequence[int]) -> str:
        self.num_decoded += len(token_ids)
        return self._tokenizer.decode(token_ids)


@pytest.mark.parametrize("family", TOKENIZERS)
def test_the_time_of_a_token_is_constant_for_any_tokens(family: str) -> None:
    tokenizer = TOKENIZERS[family]
    for token_id in range(tokenizer.vocab_size + 1):
        vocabulary = CountingVocabulary(tokenizer)
        detokenizer = Detokenizer(vocabulary)
        text = "".join(detokenizer.push(token_id) for _ in range(200)) + detokenizer.flush()
        assert text == tokenizer.decode([token_id] * 200)
        assert vocabulary.num_decoded <= 200 * 12
