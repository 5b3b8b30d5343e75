"""Where a growing text ends, against a naive search over the whole of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genserve.text.stop_strings import StopStrings
from genserve.text.stoppable_text import StoppableText

texts = st.text(alphabet="ab", max_size=24)
stop_sets = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)
places = st.lists(st.integers(min_value=0), max_size=6)


class Pieces:
    """A detokenizer whose token ids are the numbers of pieces of text."""

    def __init__(self, pieces: Sequence[str], rest: str = "") -> None:
        self._pieces = pieces
        self._rest = rest

    def push(self, token_id: int) -> str:
        return self._pieces[token_id]

    def flush(self) -> str:
        return self._rest


def stoppable(pieces: Sequence[str], *stops: str, rest: str = "", **options: object) -> StoppableText:
    finders = [StopStrings(stops)] if stops else []
    return StoppableText(Pieces(pieces, rest), finders, **options)  # type: ignore[arg-type]


def released(text: StoppableText, num_pieces: int) -> list[str]:
    shown = []
    for token_id in range(num_pieces):
        shown.append(text.push(token_id))
        if text.stop is not None:
            return shown
    return [*shown, text.flush()]


def first_stop(text: str, stops: Sequence[str], *, after: int = 0) -> tuple[int, str] | None:
    """Where a text has to end, and the stop: earliest end behind `after`, then earliest start."""
    ends = range(after + 1, len(text) + 1)
    found = [(end, -len(stop), stop) for end in ends for stop in stops if text[:end].endswith(stop)]
    return None if not found else (min(found)[0], min(found)[2])


def cut(text: str, at: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in at), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@given(text=texts, stops=stop_sets, at=places, include=st.booleans(), num_passed=st.integers(0, 4))
def test_every_way_to_cut_the_text_ends_it_where_a_search_over_the_whole_text_does(
    text: str, stops: tuple[str, ...], at: list[int], include: bool, num_passed: int
) -> None:
    pieces = cut(text, at)
    growing = stoppable(pieces, *stops, include_stop=include, min_tokens=num_passed)
    shown = "".join(released(growing, len(pieces)))
    found = first_stop(text, stops, after=len("".join(pieces[:num_passed])))
    if found is None:
        assert (shown, growing.stop) == (text, None)
    else:
        end, stop = found
        assert (shown, growing.stop) == (text[: end if include else end - len(stop)], stop)


@given(text=texts, stops=stop_sets)
def test_only_the_beginning_of_a_stop_string_is_held_back(text: str, stops: tuple[str, ...]) -> None:
    growing = stoppable(text, *stops)
    shown = ""
    for end in range(1, len(text) + 1):
        shown += growing.push(end - 1)
        if growing.stop is not None:
            return
        longest = max((k for s in stops for k in range(len(s)) if text[:end].endswith(s[:k])), default=0)
        assert len(text[len(shown) : end]) == longest


def test_a_stop_string_that_spans_pieces_is_cut_out_of_the_text() -> None:
    growing = stoppable(["Hel", "lo EN", "D never", "more"], "END")
    assert [growing.push(i) for i in range(4)] == ["Hel", "lo ", "", ""]
    assert growing.stop == "END"
    assert growing.flush() == ""


def test_what_ends_the_text_is_kept_where_that_is_asked_for_and_nothing_is_held_back() -> None:
    growing = stoppable(["lo EN", "D never"], "END", include_stop=True)
    assert [growing.push(i) for i in range(2)] == ["lo EN", "D"]


def test_text_held_back_in_vain_is_released_at_the_end() -> None:
    assert released(stoppable(["bye\n\nUs"], "\n\nUser:"), 1) == ["bye", "\n\nUs"]


def test_what_the_detokenizer_held_back_may_complete_a_stop_string() -> None:
    growing = stoppable(["xEN"], "END", rest="D!")
    assert released(growing, 1) == ["x", ""]
    assert growing.stop == "END"


def test_the_stop_string_that_is_complete_first_wins_over_one_that_began_earlier() -> None:
    growing = stoppable(["xabcd"], "abcd", "c")
    assert growing.push(0) == "xab"
    assert growing.stop == "c"


@pytest.mark.parametrize("text", ["", "abc", "a" * 1000])
def test_without_stops_the_text_passes_as_it_is(text: str) -> None:
    assert stoppable([text]).push(0) is text
