"""Stop strings against a naive search over the whole text."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genserve.text.stop_strings import StopStrings

texts = st.text(alphabet="ab", max_size=24)
stop_sets = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4).map(tuple)


def first_stop(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """What stands before the match, and the match: earliest end, then earliest start."""
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end - len(stop)], stop


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@given(text=texts, stops=stop_sets, places=st.lists(st.integers(min_value=0), max_size=6))
def test_every_way_to_cut_the_text_ends_it_where_a_search_over_the_whole_text_does(
    text: str, stops: tuple[str, ...], places: list[int]
) -> None:
    matcher = StopStrings(stops)
    released = "".join(matcher.push(piece) for piece in cut(text, places)) + matcher.flush()
    assert (released, matcher.matched) == first_stop(text, stops)


@given(text=texts, stops=stop_sets)
def test_only_the_beginning_of_a_stop_string_is_held_back(text: str, stops: tuple[str, ...]) -> None:
    matcher = StopStrings(stops)
    released = ""
    for end, char in enumerate(text, start=1):
        released += matcher.push(char)
        if matcher.matched is not None:
            return
        held = text[len(released) : end]
        longest = max((k for s in stops for k in range(len(s)) if text[:end].endswith(s[:k])), default=0)
        assert len(held) == longest


def test_a_stop_string_that_spans_pieces_is_cut_out_of_the_text() -> None:
    matcher = StopStrings(("END",))
    assert [matcher.push(piece) for piece in ("Hel", "lo EN", "D never", "more")] == ["Hel", "lo ", "", ""]
    assert matcher.matched == "END"
    assert matcher.flush() == ""


def test_text_held_back_in_vain_is_released_at_the_end() -> None:
    matcher = StopStrings(("\n\nUser:",))
    assert matcher.push("bye\n\nUs") == "bye"
    assert matcher.flush() == "\n\nUs"
    assert matcher.matched is None


def test_the_stop_string_that_is_complete_first_wins_over_one_that_began_earlier() -> None:
    matcher = StopStrings(("abcd", "c"))
    assert matcher.push("xabcd") == "xab"
    assert matcher.matched == "c"


@pytest.mark.parametrize("text", ["", "abc", "a" * 1000])
def test_without_stop_strings_the_text_passes_as_it_is(text: str) -> None:
    assert StopStrings(()).push(text) is text
