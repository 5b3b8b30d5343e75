"""The end of a growing text, compared with a naive search over the whole text."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from genserve.errors import InvalidRequest
from genserve.text.stop_conditions import (
    MAX_MATCH_CHARS,
    Stop,
    StopChecker,
    StopFinder,
    StopRegex,
    StopStrings,
)
from tests.text.vocabularies import FAMILIES, tokenizer_of

TOKENIZERS = {family.__name__: tokenizer_of(family()) for family in FAMILIES}
ALWAYS = {"byte_level_bpe", "sentencepiece_bpe"}
EACH = [
    pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.extended) for name in TOKENIZERS
]


def text_of(tokenizer, ids):
    detokenizer = tokenizer.detokenizer()
    return "".join(map(detokenizer.push, ids)) + detokenizer.flush()


texts = st.text(alphabet="ab", max_size=24)
stop_sets = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)
places = st.lists(st.integers(min_value=0), max_size=6)

parts = st.sampled_from(["a", "b", ".", "[ab]"])
repeats = st.sampled_from(["*", "+", "?", "{2,3}"])
regexes = st.recursive(
    parts,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, repeats).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
    ),
    max_leaves=5,
)


class Pieces:
    """A detokenizer whose token ids are indices into pieces of text."""

    def __init__(self, pieces: Sequence[str], rest: str = "") -> None:
        self._pieces = pieces
        self._rest = rest

    def push(self, token_id: int) -> str:
        return self._pieces[token_id]

    def flush(self) -> str:
        return self._rest


def checker_over(
    pieces: Sequence[str], *stops: str, regexes: Sequence[str] = (), rest: str = "", **options: Any
) -> StopChecker:
    finders: list[StopFinder] = [StopStrings(stops)] if stops else []
    finders += map(StopRegex, regexes)
    return StopChecker(Pieces(pieces, rest), finders, **options)  # type: ignore[arg-type]


def released(text: StopChecker, num_pieces: int) -> list[str]:
    shown = []
    for token_id in range(num_pieces):
        shown.append(text.push(token_id))
        if text.stop is not None:
            return shown
    return [*shown, text.flush()]


def first_stop(
    text: str, stops: Sequence[str], regexes: Sequence[str] = (), *, after: int = 0
) -> tuple[int, int, str] | None:
    """The end, length and name of a text's first stop: earliest end, then earliest start."""
    patterns = {stop: re.escape(stop) for stop in stops} | {regex: regex for regex in regexes}
    for end in range(after + 1, len(text) + 1):
        for start in range(end):
            for name, pattern in patterns.items():
                if re.fullmatch(pattern, text[start:end]):
                    return end, end - start, name
    return None


def cut(text: str, at: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in at), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@given(text=texts, stops=stop_sets, at=places, include=st.booleans(), num_passed=st.integers(0, 4))
def test_stop_strings_do_not_depend_on_how_the_text_is_cut(
    text: str, stops: tuple[str, ...], at: list[int], include: bool, num_passed: int
) -> None:
    pieces = cut(text, at)
    growing = checker_over(pieces, *stops, include_stop=include, min_tokens=num_passed)
    shown = "".join(released(growing, len(pieces)))
    found = first_stop(text, stops, after=len("".join(pieces[:num_passed])))
    if found is None:
        assert (shown, growing.stop) == (text, None)
    else:
        end, length, stop = found
        assert (shown, growing.stop) == (text[: end if include else end - length], stop)


@given(
    tokens=st.lists(st.tuples(st.text(alphabet="ab", max_size=3), st.booleans()), max_size=12),
    stops=stop_sets,
    include=st.booleans(),
)
def test_hidden_tokens_are_part_of_the_searched_text_and_not_of_the_shown_one(
    tokens: list[tuple[str, bool]], stops: tuple[str, ...], include: bool
) -> None:
    hidden = {index: name for index, (name, is_hidden) in enumerate(tokens) if is_hidden}
    pieces = ["" if is_hidden else text for text, is_hidden in tokens]
    growing = checker_over(pieces, *stops, hidden=hidden, include_stop=include)
    shown = "".join(released(growing, len(pieces)))
    found = first_stop("".join(text for text, _ in tokens), stops)
    assert growing.stop == (found and found[2])
    end = sum(len(text) for text, _ in tokens) if found is None else found[0] - (0 if include else found[1])
    searched = [(char, is_hidden) for text, is_hidden in tokens for char in text]
    assert shown == "".join(char for char, is_hidden in searched[:end] if not is_hidden)


@given(text=texts, stops=stop_sets)
def test_only_the_beginning_of_a_stop_string_is_held_back(text: str, stops: tuple[str, ...]) -> None:
    growing = checker_over(text, *stops)
    shown = ""
    for end in range(1, len(text) + 1):
        shown += growing.push(end - 1)
        if growing.stop is not None:
            return
        longest = max((k for s in stops for k in range(len(s)) if text[:end].endswith(s[:k])), default=0)
        assert len(text[len(shown) : end]) == longest


def test_a_stop_string_that_spans_pieces_is_cut_out_of_the_text() -> None:
    growing = checker_over(["Hel", "lo EN", "D never", "more"], "END")
    assert [growing.push(i) for i in range(4)] == ["Hel", "lo ", "", ""]
    assert growing.stop == "END"
    assert growing.flush() == ""


def test_an_included_stop_is_kept_and_nothing_is_held_back() -> None:
    growing = checker_over(["lo EN", "D never"], "END", include_stop=True)
    assert [growing.push(i) for i in range(2)] == ["lo EN", "D"]


@pytest.mark.parametrize("finder", [StopStrings(("abb",)), StopRegex("abb")])
def test_a_fork_of_a_finder_is_an_independent_copy(finder: StopFinder) -> None:
    before = finder.fork()
    assert finder.find("xab") is None
    fork = finder.fork()
    assert (before.num_pending, before.find("b")) == (0, None)
    for other in (fork, finder):
        assert (other.num_pending, other.find("b")) == (2, Stop(end=1, length=3, reason="abb"))


@pytest.mark.parametrize("family", EACH)
@given(data=st.data())
def test_a_fork_of_a_text_is_an_independent_copy(family: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[family]
    ids = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20)
    begun, *endings = data.draw(ids), data.draw(ids), data.draw(ids)
    stops = [StopStrings(("ab", "e")), StopRegex("a+b")]

    def text() -> StopChecker:
        return StopChecker(tokenizer.detokenizer(), [stop.fork() for stop in stops], min_tokens=3)

    def written(growing: StopChecker, token_ids: Sequence[int]) -> list[str | None]:
        return [*map(growing.push, token_ids), growing.flush(), growing.stop]

    growing = text()
    for token_id in begun:
        growing.push(token_id)
    for ending, fork in zip(endings, [growing.fork(), growing.fork()], strict=True):
        anew = text()
        for token_id in begun:
            anew.push(token_id)
        assert written(fork, ending) == written(anew, ending)


def test_held_back_text_is_released_at_the_end() -> None:
    assert released(checker_over(["bye\n\nUs"], "\n\nUser:"), 1) == ["bye", "\n\nUs"]


def test_text_held_back_by_the_detokenizer_may_complete_a_stop_string() -> None:
    growing = checker_over(["xEN"], "END", rest="D!")
    assert released(growing, 1) == ["x", ""]
    assert growing.stop == "END"


def test_the_stop_string_that_is_complete_first_wins() -> None:
    growing = checker_over(["xabcd"], "abcd", "c")
    assert growing.push(0) == "xab"
    assert growing.stop == "c"


@pytest.mark.parametrize("text", ["", "abc", "a" * 1000])
def test_without_stops_the_text_is_unchanged(text: str) -> None:
    assert checker_over([text]).push(0) is text


@given(
    text=texts,
    stops=st.lists(st.text(alphabet="ab", min_size=3, max_size=6), max_size=1).map(tuple),
    patterns=st.lists(regexes, min_size=1, max_size=2, unique=True),
    at=places,
    include=st.booleans(),
    num_passed=st.integers(0, 4),
)
def test_stop_regexes_do_not_depend_on_how_the_text_is_cut(
    text: str, stops: tuple[str, ...], patterns: list[str], at: list[int], include: bool, num_passed: int
) -> None:
    assume(not any(re.fullmatch(pattern, "") for pattern in patterns))
    pieces = cut(text, at)
    growing = checker_over(pieces, *stops, regexes=patterns, include_stop=include, min_tokens=num_passed)
    shown = "".join(released(growing, len(pieces)))
    found = first_stop(text, stops, patterns, after=len("".join(pieces[:num_passed])))
    end, length, stop = found or (len(text), 0, None)
    assert shown == text[: end if include else end - length]
    assert growing.stop == stop or (stop and growing.stop in {*stops, *patterns})


def test_text_is_only_held_back_while_it_may_become_a_match() -> None:
    growing = checker_over(["on 2024", "-1 or ", "2024-", "12", "!"], regexes=[r"\d{4}-\d\d"])
    assert [growing.push(i) for i in range(5)] == ["on ", "2024-1 or ", "", "", ""]
    assert growing.stop == r"\d{4}-\d\d"


def test_characters_of_several_bytes_are_matched_whole() -> None:
    growing = checker_over(["caf\u00e9", " \N{GRINNING FACE}x"], regexes=[r"\p{So}"])
    assert [growing.push(i) for i in range(2)] == ["caf\u00e9", " "]


@pytest.mark.parametrize("at", [[], [9, 18, MAX_MATCH_CHARS]])
@pytest.mark.parametrize("excess", [0, 1])
def test_a_match_has_a_maximum_length(at: list[int], excess: int) -> None:
    text = "x" + "a" * (MAX_MATCH_CHARS - 1 + excess) + "b"
    pieces = cut(text, at)
    growing = checker_over(pieces, regexes=[f"a{{{MAX_MATCH_CHARS - 1 + excess}}}b"])
    assert "".join(released(growing, len(pieces))) == (text if excess else "x")


@pytest.mark.parametrize(
    "pattern", ["(", "^a", "a$", r"\ba", r"(a)\1", "a*", "", "(?=a)b", "a)|(b", r"\p{Nothing}"]
)
def test_an_invalid_expression_is_rejected(pattern: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        StopRegex(pattern)
    assert raised.value.field == "stop_regex"
    assert "(?s:.)" not in raised.value.message


def test_an_expression_with_too_many_states_fails_within_its_memory_limit() -> None:
    finder = StopRegex("a.{20}c")
    rng = random.Random(5)
    pieces = ("".join(rng.choices("ab", k=5)) for _ in range(20_000))
    with pytest.raises(InvalidRequest) as raised:
        any(map(finder.find, pieces))
    assert raised.value.field == "stop_regex"


@pytest.mark.parametrize("family", EACH)
@given(data=st.data(), is_regex=st.booleans())
def test_no_part_of_a_stop_leaks_for_any_tokens(family: str, data: st.DataObject, is_regex: bool) -> None:
    tokenizer = TOKENIZERS[family]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=30))
    whole = text_of(tokenizer, ids)
    assume(whole)
    start = data.draw(st.integers(0, len(whole) - 1))
    stop = whole[start : start + data.draw(st.integers(1, 8))]
    regex = "".join(f"\\x{{{ord(char):x}}}" for char in stop)
    finder: StopFinder = StopRegex(regex) if is_regex else StopStrings((stop,))
    growing = StopChecker(tokenizer.detokenizer(), [finder])
    shown = ""
    for token_id in ids:
        shown += growing.push(token_id)
        assert whole.startswith(shown)
        assert stop not in shown
    assert shown + growing.flush() == whole[: whole.index(stop)]
