from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genserve.client.sse_decoder import Event, EventDecoder


def decode(chunks: Sequence[bytes]) -> list[Event]:
    decoder = EventDecoder()
    return [event for chunk in chunks for event in decoder.feed(chunk)]


def datas(stream: str | bytes) -> list[str]:
    return [event.data for event in decode([stream.encode() if isinstance(stream, str) else stream])]


# Examples of the standard, section 9.2.6.
@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        ("data: YHOO\ndata: +2\ndata: 10\n\n", ["YHOO\n+2\n10"]),
        (
            ": test stream\n\ndata: first event\nid: 1\n\ndata:second event\nid\n\ndata:  third event\n",
            ["first event", "second event"],
        ),
        ("data\n\ndata\ndata\n\ndata:", ["", "\n"]),
        ("data:test\n\ndata: test\n\n", ["test", "test"]),
    ],
)
def test_the_examples_of_the_standard_are_decoded(stream: str, expected: list[str]) -> None:
    assert datas(stream) == expected


def test_a_comment_is_not_an_event() -> None:
    assert datas(": ping\n\ndata: a\n\n: ping - 2026\n\n:\n\ndata: b\n\n") == ["a", "b"]


def test_the_name_of_an_event_does_not_carry_over() -> None:
    events = decode([b"event: error\ndata: a\n\ndata: b\n\n"])
    assert events == [Event(data="a", name="error"), Event(data="b", name="message")]


def test_an_event_without_data_is_dropped_with_its_name() -> None:
    assert decode([b"event: error\n\ndata: b\n\n"]) == [Event(data="b")]


def test_a_line_separator_of_unicode_does_not_end_a_line() -> None:
    assert datas("data: a\u2028b\u2029c\x0bd\x0ce\x85f\n\n") == ["a\u2028b\u2029c\x0bd\x0ce\x85f"]


def test_a_byte_order_mark_is_skipped_at_the_start_only() -> None:
    assert datas("\ufeffdata: a\n\ndata: \ufeffb\n\n") == ["a", "\ufeffb"]


def test_an_event_is_complete_at_a_carriage_return() -> None:
    assert decode([b"data: a\r\r"]) == [Event(data="a")]


def test_an_unterminated_event_is_dropped() -> None:
    assert datas("data: a\n\ndata: {\"half\":") == ["a"]


lines = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=8)
line_ends = st.sampled_from(["\n", "\r", "\r\n"])


@given(
    events=st.lists(st.lists(lines, min_size=1, max_size=3), max_size=4),
    comments=st.lists(lines, max_size=3),
    data=st.data(),
)
def test_line_ends_and_chunk_boundaries_do_not_change_the_events(
    events: list[list[str]], comments: list[str], data: st.DataObject
) -> None:
    rows = [row for event in events for row in [*(f"data: {line}" for line in event), ""]]
    for comment in comments:
        rows.insert(data.draw(st.integers(0, len(rows))), f":{comment}")
    stream = b""
    for row in rows:
        end = data.draw(line_ends)
        if stream.endswith(b"\r") and not row and end == "\n":
            end = "\r"      # CR, then an empty line ended by LF, would be one CRLF
        stream += (row + end).encode()
    borders = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    chunks = [stream[a:b] for a, b in zip([0, *borders], [*borders, len(stream)], strict=True)]
    assert [event.data for event in decode(chunks)] == ["\n".join(event) for event in events]
