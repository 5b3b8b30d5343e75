"""Which tokens would repeat a key: over a small vocabulary, and in the grammar of a model."""

from __future__ import annotations

import json

import numpy as np
import pytest

from genserve.sampling.structured_outputs import structured_outputs
from genserve.structured_output.grammar_compiler import GrammarCompiler
from genserve.structured_output.unique_keys import TokenBytes, UniqueKeys
from genserve.text.tokenizer import Tokenizer
from tests.structured_output.test_grammar_compiler import VOCAB_SIZE, accepts, random_text

TEXTS = [
    *(b"{", b"}", b"[", b"]", b'"', b"a", b"ab", b": ", b"1", b", ", b"\\"),
    *(rb'u0061"', rb'\u0061"'),
    *(b'"a"', b'a"', b'"a": 1', b'", "a"', b'{"a"', b'b"', b'1, "a"', b'"b"', b'"}, {"a"'),
]
TOKENS = TokenBytes(TEXTS)


def is_forbidden(text: bytes, *, after: list[bytes], others: tuple[bytes, ...] = (b"}",)) -> bool:
    """Whether a token is forbidden after some, where the grammar allows it and others."""
    keys = UniqueKeys(TOKENS)
    for token in after:
        keys.accept(TEXTS.index(token))
    mask = np.zeros(1, np.int32)
    for token in (text, *others):
        mask[0] |= 1 << TEXTS.index(token)
    keys.forbid(mask)
    return not mask[0] >> TEXTS.index(text) & 1


@pytest.mark.parametrize(
    ("after", "text", "expected"),
    [
        ([b"{"], b'"a"', False),
        ([b"{", b'"', b'a"', b": ", b"1", b", "], b'"a"', True),
        ([b"{", b'"', b'a"', b": ", b"1", b", "], b'"a": 1', True),
        ([b"{", b'"', b'a"', b": ", b"1", b", "], b'"', False),
        ([b"{", b'"', b'a"', b": ", b"1", b", "], b'"b"', False),
        ([b'{"a"', b": "], b'1, "a"', True),
        ([b'{"a"', b": ", b"1", b", ", b'"'], b'a"', True),
        ([b'{"a"', b": ", b"1", b", ", b'"', b"a"], b'"', True),
        ([b'{"a"', b": ", b"1", b", ", b'"', b"a"], b'b"', False),
        ([b'{"a"', b": ", b"1", b", ", b'"', b"a", b"\\"], b'"', False),
        ([b'{"a"', b": ", b"{"], b'"a"', False),
        ([b'{"a"', b": ", b"{", b'"', b'a"', b": "], b'1, "a"', True),
        ([b'{"a"', b": ", b"[", b'"a"', b", "], b'"a"', False),
        ([b'{"a"', b": ", b"[", b"1", b"]", b", "], b'"a"', True),
        ([b'{"a"', b": ", b"{", b'"b"', b": ", b"1", b"}", b", "], b'"a"', True),
        ([b'{"a"', b": ", b'"', b"ab"], b'", "a"', True),
        ([b"[", b'{"a"', b": ", b'"'], b'"}, {"a"', False),
        ([b'{"a"', b": ", b"1", b", ", b'"'], rb'\u0061"', True),
        ([b'{"a"', b": ", b"1", b", ", b'"', b"a"], rb'\u0061"', False),
        ([b'{"a"', b": ", b"1", b", ", b'"', b"\\"], rb'u0061"', True),
    ],
)
def test_tokens_that_complete_a_repeated_key_are_forbidden(after, text, expected):
    assert is_forbidden(text, after=after) == expected


def test_a_key_is_repeated_if_no_other_token_is_allowed():
    after = [b'{"a"', b": ", b"1", b", ", b'"', b"a"]
    assert not is_forbidden(b'"', after=after, others=())


@pytest.fixture(scope="module")
def tokenizer(tiny_repository) -> Tokenizer:
    return Tokenizer.from_folder(tiny_repository / "tiny_tokenizer" / "1")


@pytest.fixture(scope="module")
def grammars(tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize(
    "options", [{"json_object": True}, {"json": {"additionalProperties": {"enum": [1]}}}]
)
def test_no_object_of_an_answer_has_a_key_twice(grammars, tokenizer, options):
    form = structured_outputs(options)
    assert form is not None
    assert accepts(grammars.compile(form), tokenizer, '{"a": 1, "ab": 1, "b": 1}')
    assert not accepts(grammars.compile(form), tokenizer, '{"a": 1, "b": 1, "a": 1}')


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("a", r"\u0061"),
        (r"\u0061", "a"),
        ("caf\u00e9", r"caf\u00e9"),
        (r"\ud83d\ude00", "\U0001f600"),
        ("a/", r"a\/"),
        (r"a\n", r"a\u000A"),
        (r"a\"b", r"a\u0022b"),
    ],
)
def test_another_spelling_is_the_same_key(grammars, tokenizer, first, second):
    form = structured_outputs({"json_object": True})
    assert form is not None
    assert accepts(grammars.compile(form), tokenizer, f'{{"{first}": 1, "{second}x": 2}}')
    assert not accepts(grammars.compile(form), tokenizer, f'{{"{first}": 1, "{second}": 2}}')


def test_a_random_model_never_repeats_a_key(grammars, tokenizer):
    schema = {"type": "object", "patternProperties": {"^[ab]*$": {"const": 1}}, "minProperties": 6}
    form = structured_outputs({"json": schema})
    assert form is not None
    for seed in range(8):
        text = random_text(grammars.compile(form), tokenizer, seed=seed)
        pairs = json.loads(text or "{}", object_pairs_hook=list)
        assert len(dict(pairs)) == len(pairs)
