from __future__ import annotations

import pytest

from genserve.text.vocabulary import Spellings
from tests.text.vocabularies import byte_level_bpe, sentencepiece_bpe, tokenizer_of, unigram


class Letters:
    """A tokenizer with tokens of several letters that encodes texts letter by letter."""

    texts = ("a", "b", "c", "ab", "xab", "bcx", "", "cab")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [self.texts.index(letter) for letter in text]

    def token_texts(self) -> list[str]:
        return list(self.texts)


def test_a_text_may_begin_and_end_within_tokens():
    spelled = [list(ids) for ids in Spellings(Letters()).of("abc")]
    assert sorted(spelled) == [[0, 1, 2], [3, 2], [4, 2], [7, 2]]


def test_a_token_that_contains_the_text_is_a_spelling():
    assert [list(ids) for ids in Spellings(Letters()).of("b")] == [[1], [3], [4], [5], [7]]


def test_a_text_that_left_the_cache_is_found_again():
    spellings = Spellings(Letters())
    first = spellings.of("ab")
    for number in range(100):
        spellings.of("ab" * number + "c")
    assert spellings.of("ab") == first


@pytest.mark.parametrize(
    ("family", "text"),
    [(byte_level_bpe, "\n"), (sentencepiece_bpe, "\n"), (sentencepiece_bpe, "b"), (unigram, "/")],
)
def test_the_tokenizers_own_encoding_is_a_spelling_in_each_family(family, text):
    tokenizer = tokenizer_of(family())
    assert len(tokenizer.token_texts()) == tokenizer.vocab_size
    written = tokenizer.encode(f"a{text}", add_special_tokens=False)
    assert any(list(ids) == written[-len(ids) :] for ids in Spellings(tokenizer).of(text))
