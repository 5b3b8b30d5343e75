from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

from genserve.cli.chat.side_by_side import Contestant, answer_side_by_side
from genserve.cli.opened_models import OpenedModel
from genserve.completion import Delta, FinishReason, Stream, Usage
from genserve.errors import ModelFailed
from genserve.prompt import Message
from genserve.sampling.sampling_options import SamplingOptions
from tests.cli.emulated import EmulatedTerminal
from tests.cli.fake_model import FakeModel
from tests.cli.terminal import CTRL_C, CTRL_D, ENTER, PROMPT, Terminal

QUESTION = [Message(role="user", content="?")]


class SaidTexts:
    """Deltas with these texts; before each one it waits for its turn."""

    def __init__(self, texts: list[str], turn: threading.Semaphore) -> None:
        self._deltas = self._said(texts, turn)

    def __next__(self) -> Delta:
        return next(self._deltas)

    def close(self) -> None:
        pass

    def _said(self, texts: list[str], turn: threading.Semaphore) -> Iterator[Delta]:
        for index, text in enumerate(texts):
            turn.acquire()
            if text == "fail":
                raise ModelFailed("the model failed")
            yield Delta(text=text, token_ids=(index,))
        usage = Usage(prompt_tokens=1, completion_tokens=len(texts))
        yield Delta(text="", token_ids=(), finish_reason=FinishReason.LENGTH, usage=usage)


class Speaker(FakeModel):
    def __init__(self, texts: list[str]) -> None:
        super().__init__()
        self.texts = texts
        self.turn = threading.Semaphore(len(texts))

    def chat_stream(self, messages, **options):
        return Stream(SaidTexts(self.texts, self.turn))


def contestants(left: list[str], right: list[str]) -> tuple[Contestant, Contestant]:
    models = (
        OpenedModel(name=name, max_length=None, text_model=Speaker(texts), default_sampling_params={})
        for name, texts in (("left", left), ("right", right))
    )
    one, other = (Contestant(model.name, model, SamplingOptions()) for model in models)
    return one, other


def test_the_answers_are_in_two_columns() -> None:
    terminal = EmulatedTerminal(columns=61, rows=20)
    pair = contestants(["# Title\n\n", "words of ", "an answer that is wrapped"], ["- one\n", "- two"])
    answer_side_by_side(terminal.console, pair, QUESTION, with_markdown=True)
    assert terminal.lines() == [
        "1 left                       │ 2 right",
        "Title                        │  • one",
        "                             │  • two",
        "words of an answer that is   │",
        "wrapped                      │",
    ]
    assert [one.answer.num_tokens for one in pair if one.answer] == [3, 2]


def test_in_a_narrow_terminal_the_answers_are_below_each_other() -> None:
    terminal = EmulatedTerminal(columns=40, rows=20)
    pair = contestants(["one"], ["two"])
    answer_side_by_side(terminal.console, pair, QUESTION, with_markdown=True)
    assert terminal.lines() == ["1 left", "one", "", "2 right", "two"]


def test_long_answers_scroll_together_whatever_their_speeds() -> None:
    terminal = EmulatedTerminal(columns=60, rows=8)
    left, right = [f"- {i}\n" for i in range(30)], [f"- {i}\n" for i in range(30)]
    pair = contestants(left, right)
    slow = pair[1].model.text_model
    assert isinstance(slow, Speaker)
    slow.turn = threading.Semaphore(0)
    let_on = threading.Timer(0.3, lambda: [slow.turn.release() for _ in range(30)])
    let_on.start()
    answer_side_by_side(terminal.console, pair, QUESTION, with_markdown=True)
    numbers = [[word for word in line.split() if word.isdigit()] for line in terminal.lines()[1:]]
    assert numbers == [[str(i), str(i)] for i in range(30)]


def test_an_error_ends_one_answer_only() -> None:
    terminal = EmulatedTerminal(columns=60, rows=8)
    pair = contestants(["one", " more"], ["two", "fail"])
    answer_side_by_side(terminal.console, pair, QUESTION, with_markdown=True)
    assert pair[0].answer is not None
    assert isinstance(pair[1].error, ModelFailed)
    assert pair[1].text == "two"


def test_ctrl_c_in_the_midst_of_rendering_stops_the_answers_and_the_console_goes_on() -> None:
    terminal = EmulatedTerminal(columns=60, rows=9)
    pair = contestants(["one"], ["two"])
    turn = threading.Semaphore(0)
    for one in pair:
        assert isinstance(one.model.text_model, Speaker)
        one.model.text_model.turn = turn

    def let_on() -> None:
        terminal.painted.wait()
        turn.release(2)

    threading.Thread(target=let_on, daemon=True).start()
    terminal.interrupt_next_rendering()
    answer_side_by_side(terminal.console, pair, QUESTION, with_markdown=True)
    terminal.console.print("still heard")
    assert terminal.lines()[0] == "1 left                       │ 2 right"
    assert terminal.lines()[-1] == "still heard"


def test_the_chat_goes_on_with_the_answer_that_is_picked(tmp_path: Path) -> None:
    with Terminal("tests.cli.chat_on_terminal", home=tmp_path, columns=80) as terminal:
        terminal.expect(PROMPT)
        terminal.type("/compare other first forever" + ENTER)
        terminal.expect_screen(lambda lines: sum(line.count("FIRST FOREVER") for line in lines) == 2)
        terminal.type(CTRL_C)
        terminal.expect("go on with 1 or 2?")
        terminal.type("2" + ENTER)
        terminal.expect(PROMPT)
        terminal.type("/compare 7 second" + ENTER)
        terminal.expect("go on with 1 or 2?")
        terminal.type(CTRL_C)
        terminal.expect("the conversation is as it was")
        terminal.expect(PROMPT)
        terminal.type("last" + ENTER)
        terminal.expect("LAST")
        terminal.expect(PROMPT)
        terminal.type("/model" + ENTER)
        terminal.expect("* other")
        terminal.expect(PROMPT)
        terminal.type(CTRL_D)
        terminal.expect("last asked: ['first forever', 'FIRST FOREVER', 'last']")
        assert terminal.wait() == 0
        assert terminal.modes() == terminal.modes_before
