"""The incremental text of a token sequence, compared with the library's decode of all its ids."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.decoders import DecodeStream

from genserve.text.detokenizer import Detokenizer
from genserve.text.tokenizer import Tokenizer
from tests.support.representatives import with_extended
from tests.text.vocabularies import FAMILIES, KINDS, TEXTS, tokenizer_of

TOKENIZERS = {family.__name__: tokenizer_of(family()) for family in KINDS}
EACH = [pytest.param(kind.__name__, marks=[] if kind in FAMILIES else pytest.mark.extended) for kind in KINDS]
NUM_UNKNOWN_IDS = 5  # as in a model whose embedding has more rows than the vocabulary


# Words of 20 scripts, and ten texts of two of them.
SCRIPTS = {
    "latin": ("ab", "stra\u00dfe"),
    "cyrillic": ("\u043d\u043e\u0447\u044c", "\u0430\u0434\u0430"),
    "greek": ("\u03ba\u03cc\u03c3\u03bc\u03b5", "\u03b3\u03b9\u03ac"),
    "armenian": ("\u0562\u0561\u0580\u0587", "\u0565\u0580"),
    "georgian": ("\u10d3\u10d8\u10da\u10d0", "\u10db\u10e8"),
    "hebrew": ("\u05e9\u05dc\u05d5\u05dd", "\u05e2\u05d5\u05dc\u05dd"),
    "arabic": ("\u0645\u0631\u062d\u0628\u0627", "\u0639\u0627\u0644\u0645"),
    "ethiopic": ("\u1230\u120b\u121d", "\u12d3\u1208\u121d"),
    "devanagari": ("\u0928\u092e\u0938\u094d\u0924\u0947", "\u0928"),
    "bengali": ("\u09b9\u09cd\u09af\u09be\u09b2\u09cb", "\u09ac\u09bf\u09b6\u09cd\u09ac"),
    "tamil": ("\u0bb5\u0ba3\u0b95\u0bcd\u0b95\u0bae\u0bcd", "\u0b89\u0bb2\u0b95\u0bae\u0bcd"),
    "telugu": ("\u0c39\u0c32\u0c4b", "\u0c2a\u0c4d\u0c30\u0c2a\u0c02\u0c1a\u0c02"),
    "kannada": ("\u0cb9\u0cb2\u0ccb", "\u0caa\u0ccd\u0cb0\u0caa\u0c82\u0c9a"),
    "thai": ("\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35", "\u0e42\u0e25\u0e01"),
    "khmer": ("\u179f\u17bd\u179f\u17d2\u178f\u17b8", "\u1796\u17b7\u1797\u1796"),
    "myanmar": ("\u1019\u1004\u103a\u1039\u1002\u101c\u102c", "\u1000\u1019\u1039\u1018\u102c"),
    "hangul": ("\uc548\ub155", "\uc138\uacc4"),
    "kana": ("\u3053\u3093\u306b\u3061\u306f", "\u30bb\u30ab\u30a4"),
    "han": ("\u4f60\u597d", "\u4e16\u754c"),
    "emoji": ("\N{WAVING HAND SIGN}\U0001f3fd", "\U0001f469\u200d\U0001f680"),
}
SHAPES = [
    "{0} {1}",
    "{0}{1}",
    " {0} {1}",
    "  {0}  {1} ",
    "{0}\n\n{1}\n",
    "{0}, {1}!",
    "a {0} b {1}",
    "{0}\t{1} 12",
    "<s>{0} </s> {1}",
    "{1} \N{GRINNING FACE} {0} ab",
]


def pieces(tokenizer: Tokenizer, ids: Sequence[int], **options: Any) -> list[str]:
    detokenizer = tokenizer.detokenizer(**options)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


def whole(tokenizer: Tokenizer, ids: Sequence[int], *, skip: bool = True) -> str:
    """The library's decode of all ids, with U+FFFD for each invalid byte and for no other of its run."""
    values = tokenizer.byte_tokens.values
    ids_of = {value: token_id for token_id, value in values.items()}
    special = {i for i in range(tokenizer.vocab_size) if tokenizer.is_silent(i)} if skip else set()
    heard = [i for i in ids if i not in special and not tokenizer.is_unknown(i)]
    valid: list[int] = []
    for is_byte, run in groupby(heard, key=values.__contains__):
        if is_byte:
            text = bytes(values[i] for i in run).decode(errors="surrogateescape")
            shown = "".join("\N{REPLACEMENT CHARACTER}" if "\udc80" <= c <= "\udcff" else c for c in text)
            valid += [ids_of[value] for value in shown.encode()]
        else:
            valid += run
    return tokenizer.decode(valid, skip_special_tokens=skip)


@pytest.mark.parametrize("family", EACH)
@given(data=st.data(), skip=st.booleans())
def test_the_joined_pieces_are_the_full_decode(family: str, skip: bool, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[family]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1 + NUM_UNKNOWN_IDS), max_size=60))
    joined = "".join(pieces(tokenizer, ids, skip_special_tokens=skip))
    assert joined == whole(tokenizer, ids, skip=skip)


@pytest.mark.parametrize("family", EACH)
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_prompt_and_its_continuation_are_the_full_decode(family: str, script: str) -> None:
    tokenizer = TOKENIZERS[family]
    for shape in SHAPES:
        ids = tokenizer.encode(shape.format(*SCRIPTS[script]))
        text = tokenizer.decode(ids)
        for end in sorted({0, 1, len(ids) // 3, len(ids) // 2, len(ids) - 1}):
            prompt = tokenizer.decode(ids[:end])
            if not prompt.endswith("\N{REPLACEMENT CHARACTER}"):  # it ends between two characters
                streamed = pieces(tokenizer, ids[end:], behind=ids[:end])
                assert prompt + "".join(streamed) == text, (shape, end)


@pytest.mark.parametrize("family", EACH)
@given(data=st.data(), skip=st.booleans())
def test_any_ids_continue_any_others(family: str, skip: bool, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[family]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1 + NUM_UNKNOWN_IDS), max_size=40))
    end = data.draw(st.integers(0, len(ids)))
    prompt = tokenizer.detokenizer(skip_special_tokens=skip)
    begun = "".join(map(prompt.push, ids[:end]))
    rest = prompt.flush()
    continued = "".join(pieces(tokenizer, ids[end:], behind=ids[:end], skip_special_tokens=skip))
    text = whole(tokenizer, ids, skip=skip)
    # A character that the prompt has begun is the continuation's; bytes that became none are the prompt's.
    assert text in {begun + rest[:count] + continued for count in range(len(rest) + 1)}


@pytest.mark.parametrize("family", EACH)
@pytest.mark.parametrize("text", TEXTS)
def test_emoji_cjk_and_combining_marks_are_as_in_a_full_decode(family: str, text: str) -> None:
    tokenizer = TOKENIZERS[family]
    ids = tokenizer.encode(text)
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("family", EACH)
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
    assert joined == whole(tokenizer, ids, skip=skip)


@pytest.mark.parametrize("family", EACH)
@given(data=st.data())
def test_a_peek_equals_the_text_of_a_last_token(family: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[family]
    *ids, last = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=30))
    detokenizer = tokenizer.detokenizer()
    for token_id in ids:
        detokenizer.push(token_id)
    peeked = detokenizer.peek(last)
    assert peeked == detokenizer.push(last) + detokenizer.flush()


@pytest.mark.parametrize("family", EACH)
@given(data=st.data(), skip=st.booleans())
def test_the_spelled_bytes_of_the_tokens_are_those_of_the_text(
    family: str, skip: bool, data: st.DataObject
) -> None:
    tokenizer = TOKENIZERS[family]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1 + NUM_UNKNOWN_IDS), max_size=40))
    ids = [token_id for token_id in ids if tokenizer.token(token_id) != "<0x20>"]  # dropped at the beginning
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    spelled = b""
    for token_id in ids:
        spelled += detokenizer.spell(token_id)
        detokenizer.push(token_id)
    # An invalid byte is itself there, and U+FFFD in the text.
    assert spelled.decode(errors="replace").replace("\N{REPLACEMENT CHARACTER}", "") == whole(
        tokenizer, ids, skip=skip
    ).replace("\N{REPLACEMENT CHARACTER}", "")


@pytest.mark.parametrize("family", ["byte_level_bpe", "sentencepiece_bpe", "unprefixed_bpe"])
@given(text=st.text(max_size=30))
def test_text_comes_in_whole_characters_and_as_soon_as_they_are_whole(family: str, text: str) -> None:
    tokenizer = TOKENIZERS[family]
    ids = tokenizer.encode(text.replace("\N{REPLACEMENT CHARACTER}", ""))
    *streamed, rest = pieces(tokenizer, ids)
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(streamed)
    assert rest == ""


def test_an_incomplete_character_becomes_a_replacement_character_at_the_end() -> None:
    tokenizer = TOKENIZERS["byte_level_bpe"]
    ids = tokenizer.encode("a\N{GRINNING FACE}")
    assert pieces(tokenizer, ids[:-1]) == ["a", "", "", "", "\N{REPLACEMENT CHARACTER}"]


def test_a_character_of_byte_tokens_comes_with_its_last_byte() -> None:
    tokenizer = TOKENIZERS["sentencepiece_bpe"]
    names = ("<0x0A>", "<0xE2>", "<0x82>", "<0xAC>", "<0xFF>", "a")
    newline, *euro, bad_byte, a = (tokenizer._backend.token_to_id(name) for name in names)
    assert pieces(tokenizer, [newline, newline, a]) == ["\n", "\n", "a", ""]
    assert pieces(tokenizer, [*euro, *euro, newline]) == ["", "", "\u20ac", "", "", "\u20ac", "\n", ""]
    assert pieces(tokenizer, [newline, bad_byte, a]) == ["\n", "", "\N{REPLACEMENT CHARACTER}a", ""]
    assert pieces(tokenizer, euro[:2]) == ["", "", "\N{REPLACEMENT CHARACTER}" * 2]
    assert pieces(tokenizer, [*euro[:2], newline])[2] == "\N{REPLACEMENT CHARACTER}" * 2 + "\n"


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
        self.byte_tokens = tokenizer.byte_tokens
        self.token_bytes = tokenizer.token_bytes
        self.num_decoded = 0

    def decode(self, token_ids: Sequence[int]) -> str:
        self.num_decoded += len(token_ids)
        return self._tokenizer.decode(token_ids)


@pytest.mark.parametrize("family", with_extended(TOKENIZERS, always={"byte_level_bpe", "sentencepiece_bpe"}))
def test_the_time_of_a_token_is_constant_for_any_tokens(family: str) -> None:
    tokenizer = TOKENIZERS[family]
    for token_id in range(tokenizer.vocab_size + 1):
        vocabulary = CountingVocabulary(tokenizer)
        detokenizer = Detokenizer(vocabulary)
        text = "".join(detokenizer.push(token_id) for _ in range(200)) + detokenizer.flush()
        assert text == whole(tokenizer, [token_id] * 200)
        assert vocabulary.num_decoded <= 200 * 12
