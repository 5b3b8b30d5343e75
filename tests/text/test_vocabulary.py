from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from genserve.text.vocabulary import TokenLengths
from tests.support.tiny_llama import tiny_tokenizer
from tests.text.vocabularies import FAMILIES, byte_level_bpe, sentencepiece_bpe, unigram


def composing() -> Backend:
    """As in Qwen: letters and their marks become one character."""
    backend = tiny_tokenizer(vocab_size=320)
    backend.normalizer = normalizers.NFC()
    return backend


@cache
def made(family: Callable[[], Backend]) -> tuple[Backend, TokenLengths]:
    backend = family()
    return backend, TokenLengths(backend)


def longest_number(lengths: TokenLengths, text: str) -> int:
    """The largest number of tokens that the text certainly has more of; -1: none."""
    numbers = range(len(text.encode()) + 1)
    return max((number for number in numbers if lengths.has_more_tokens(text, number)), default=-1)


@pytest.mark.parametrize("family", [*FAMILIES, composing, lambda: tiny_tokenizer(vocab_size=320)])
@settings(max_examples=15)
@given(st.data())
def test_a_text_is_never_taken_for_longer_than_it_is(family, data):
    backend, lengths = made(family)
    pieces = data.draw(st.lists(st.text(max_size=3), min_size=1, max_size=3))
    text = "".join(pieces) * data.draw(st.integers(1, 60))
    assert longest_number(lengths, text) < len(backend.encode(text, add_special_tokens=False))


@example("e\u0301" * 50)
@example("\u1112\u1161\u11ab" * 50)  # three letters of Hangul
@given(st.text(alphabet="e\u0301\u0323\u1112\u1161\u11ab", min_size=50))
def test_composed_letters_are_taken_for_few_bytes(text):
    backend, lengths = made(composing)
    assert longest_number(lengths, text) < len(backend.encode(text))


def test_of_byte_level_tokenizers_it_is_known():
    assert TokenLengths(byte_level_bpe()).has_more_tokens("x" * 10_000, 10)
    assert TokenLengths(composing()).has_more_tokens("x" * 10_000, 10)


@pytest.mark.parametrize("family", [unigram, sentencepiece_bpe])
def test_of_others_it_is_not(family):
    assert not TokenLengths(family()).has_more_tokens("x" * 10_000, 1)


def test_bytes_without_a_token_are_not_counted():
    backend = Backend(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert len(backend.encode("c" * 100 + "a")) == 1
    assert not TokenLengths(backend).has_more_tokens("c" * 100 + "a", 1)
    assert TokenLengths(backend).has_more_tokens("c" * 100 + "aa", 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda backend: setattr(backend, "normalizer", normalizers.Strip()),
        lambda backend: setattr(backend, "pre_tokenizer", None),
        lambda backend: setattr(
            backend,
            "pre_tokenizer",
            pre_tokenizers.Sequence(
                [pre_tokenizers.Split(Regex(r"\s"), behavior="removed"), pre_tokenizers.ByteLevel()]
            ),
        ),
        lambda backend: backend.add_tokens([AddedToken("<x>", rstrip=True)]),
    ],
    ids=["a normalizer that drops text", "not of bytes", "spaces removed", "a token that takes spaces"],
)
def test_it_is_not_known_if_text_may_be_dropped(change):
    backend = byte_level_bpe()
    change(backend)
    assert not TokenLengths(backend).has_more_tokens("x" * 10_000, 1)
