from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from genserve.cli.chat.chat_session import PrintedAnswer, print_answer, shown_answer
from genserve.cli.chat.conversation import Conversation, Exchange
from genserve.completion import Delta, FinishReason, PromptProgress, Stream, Timings, Usage
from genserve.errors import InvalidRequest
from genserve.prompt import Message
from tests.cli.emulated import EmulatedTerminal
from tests.cli.fake_model import FakeDeltas, FakeModel, chat_with, word_id
from tests.support.live_server import wait_until


def test_the_turns_come_in_order_after_the_system_prompt() -> None:
    conversation = Conversation(system="Be brief.")
    conversation.add(Exchange(question="Hi", answer="Hello."))
    assert conversation.messages_with("Bye") == [
        Message(role="system", content="Be brief."),
        Message(role="user", content="Hi"),
        Message(role="assistant", content="Hello."),
        Message(role="user", content="Bye"),
    ]


def test_messages_with_a_question_do_not_change_the_conversation() -> None:
    conversation = Conversation()
    conversation.messages_with("Hi")
    assert conversation.messages() == []


def test_undo_removes_and_returns_the_last_exchange() -> None:
    conversation = Conversation()
    conversation.add(Exchange(question="1", answer="one"))
    conversation.add(Exchange(question="2", answer="two"))
    assert conversation.undo() == Exchange(question="2", answer="two")
    assert [m.content for m in conversation.messages()] == ["1", "one"]
    conversation.undo()
    assert conversation.undo() is None


def test_clear_keeps_the_system_prompt() -> None:
    conversation = Conversation(system="Be brief.")
    conversation.add(Exchange(question="Hi", answer="Hello."))
    conversation.clear()
    assert conversation.messages() == [Message(role="system", content="Be brief.")]


class InterruptedDeltas(FakeDeltas):
    """Ctrl-C comes after the second delta."""

    def _answer(self, words: list[str]) -> Iterator[Delta]:
        deltas = super()._answer(words)
        yield next(deltas)
        yield next(deltas)
        raise KeyboardInterrupt


def print_deltas(deltas: FakeDeltas) -> tuple[PrintedAnswer, list[str]]:
    written: list[str] = []
    ticks = count()
    clock = lambda: float(next(ticks))  # noqa: E731
    return print_answer(lambda: Stream(deltas), write=written.append, clock=clock), written


def test_an_answer_is_written_delta_by_delta() -> None:
    deltas = FakeDeltas("good day")
    answer, written = print_deltas(deltas)
    assert written == ["GOOD", " DAY", ""]
    assert answer == PrintedAnswer(
        text="GOOD DAY",
        num_tokens=3,
        token_ids=(word_id("GOOD"), word_id("DAY"), 0),
        first_token_s=1.0,
        last_token_s=3.0,
        finish_reason=FinishReason.STOP,
        usage=Usage(prompt_tokens=10, completion_tokens=3),
    )
    assert deltas.is_closed


def test_ctrl_c_closes_the_stream_and_keeps_the_text_so_far() -> None:
    deltas = InterruptedDeltas("one two three")
    answer, _ = print_deltas(deltas)
    assert deltas.is_closed
    token_ids = word_id("ONE"), word_id("TWO")
    assert answer == PrintedAnswer(
        text="ONE TWO", num_tokens=2, token_ids=token_ids, first_token_s=1.0, last_token_s=2.0
    )


def test_ctrl_c_in_the_midst_of_rendering_ends_the_answer_and_the_console_goes_on() -> None:
    terminal = EmulatedTerminal(columns=40, rows=9)
    with shown_answer(terminal.console, with_markdown=True) as shown:
        terminal.interrupt_next_rendering()
        answer = print_answer(lambda: Stream(FakeDeltas("one two")), write=shown.write, clock=lambda: 0.0)
    assert answer.text == "ONE"
    terminal.console.print("still heard")
    assert terminal.lines() == ["ONE", "still heard"]


class ReadingDeltas(FakeDeltas):
    """Its prompt is read in two steps."""

    def _answer(self, words: list[str]) -> Iterator[Delta]:
        for num_read in (43, 100):
            yield PromptProgress(prompt_tokens=100, read_tokens=num_read, seconds=1.0)
        yield from super()._answer(words)


def test_the_progress_of_the_prompt_is_shown_until_it_was_read() -> None:
    terminal = EmulatedTerminal(columns=40, rows=9)
    seen = []
    with shown_answer(terminal.console, with_markdown=True) as shown:

        def show(progress: PromptProgress) -> None:
            shown.show_progress(progress)
            wait_until(lambda: ("reading" in "".join(terminal.lines())) == (progress.read_tokens < 100))
            seen.append("".join(terminal.lines()))

        deltas = ReadingDeltas("one two")
        print_answer(
            lambda: Stream(deltas), write=shown.write, clock=lambda: 0.0, show_progress=show
        )
    assert "reading the prompt 43 %" in seen[0]
    assert terminal.lines() == ["ONE TWO"]


def test_the_timings_of_an_answer_are_one_line() -> None:
    timings = Timings(queue_s=0.5, prefill_s=2.0, decode_s=1.0, drafted_tokens=6, accepted_tokens=4)
    usage = Usage(prompt_tokens=30, completion_tokens=5, cached_tokens=10, timings=timings)
    answer = PrintedAnswer(text="", num_tokens=5, usage=usage)
    assert answer.timing_summary() == (
        "waited 0.50 s · read 20 tokens of the prompt in 2.00 s (10.0 tokens/s) · 10 cached · answered in "
        "1.00 s · 4 of 6 drafted tokens accepted"
    )
    assert PrintedAnswer(text="", num_tokens=0).timing_summary() == ""


def test_ctrl_c_in_the_midst_of_a_note_comes_after_it() -> None:
    terminal = EmulatedTerminal(columns=40, rows=9)
    session = chat_with(FakeModel())
    session.console = terminal.console
    terminal.interrupt_next_rendering()
    with pytest.raises(KeyboardInterrupt):
        session.note("a note")
    session.note("another")
    assert terminal.lines() == ["a note", "another"]


def test_ctrl_c_before_the_first_delta_gives_an_empty_answer() -> None:
    def interrupt() -> Stream:
        raise KeyboardInterrupt

    answer = print_answer(interrupt, write=lambda _text: None, clock=lambda: 0.0)
    assert answer == PrintedAnswer(text="", num_tokens=0)


def test_the_rate_counts_the_tokens_after_the_first() -> None:
    answer = PrintedAnswer(text="", num_tokens=11, first_token_s=0.25, last_token_s=2.25)
    assert answer.tokens_per_s == 5.0
    assert answer.summary(max_length=None) == "11 tokens · first after 250 ms · 5.0 tokens/s · stopped"


def test_a_summary_of_one_token_has_no_rate() -> None:
    answer = PrintedAnswer(
        text="",
        num_tokens=1,
        first_token_s=0.25,
        last_token_s=0.25,
        finish_reason=FinishReason.LENGTH,
        usage=Usage(prompt_tokens=9, completion_tokens=1),
    )
    assert answer.summary(max_length=2048) == "1 token · first after 250 ms · context 10 of 2048 · length"
    assert answer.summary(max_length=None) == "1 token · first after 250 ms · context 10 · length"


def test_a_question_is_sent_with_the_options_and_the_conversation() -> None:
    model = FakeModel()
    session = chat_with(model, system="Be brief.")
    session.ask("hi")
    session.ask("bye")
    assert [m.content for m in model.asked[-1]] == ["Be brief.", "hi", "HI", "bye"]
    assert model.options[-1] == {"temperature": 0.5, "return_cache_match": True}


def test_a_rejected_question_is_not_part_of_the_conversation() -> None:
    session = chat_with(FakeModel())
    with pytest.raises(InvalidRequest):
        session.ask("reject this")
    assert len(session.conversation) == 0
