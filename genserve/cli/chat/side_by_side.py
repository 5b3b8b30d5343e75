"""Side by side: shows the answers of two models or two seeds to a question, in two columns as they stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from queue import SimpleQueue

from prompt_toolkit import prompt
from rich.console import Console
from rich.text import Text

from genserve.cli.chat.chat_session import ChatSession, PrintedAnswer, defect, print_answer
from genserve.cli.chat.keyboard import interrupts_deferred
from genserve.cli.chat.live_lines import Line, LiveLines, pause_s, rendered_lines
from genserve.cli.chat.markdown_stream import markdown_lines, shows_markdown
from genserve.cli.console import visible
from genserve.cli.opened_models import OpenedModel
from genserve.errors import GenserveError, InvalidRequest
from genserve.prompt import Message
from genserve.sampling.sampling_options import SamplingOptions
from genserve.sampling.sampling_params import sampling_params

_MIN_COLUMNS = 50       # in a narrower terminal one answer is below the other
_FRAME_S = 0.05
_PATIENCE_S = 1.0       # how long to wait for an answer to end after Ctrl-C: a server may have vanished
_BETWEEN = Line(" │ ", 3)


def compare(session: ChatSession, name: str, *, question: str | None) -> None:
    """Let two models, or one model with two seeds, answer a question, and let the user pick an answer.

    Args:
        session: the chat, which continues with the picked answer.
        name: the name of the second model, or the second seed.
        question: the question to answer; None: the chat's last one, whose answer, if any, may be replaced.

    Raises:
        GenserveError: the second model cannot be opened, or the seed is invalid or changes nothing.
    """
    question = question or session.conversation.unanswered
    last = session.conversation.last if question is None else None
    messages = session.conversation.messages()[: -2 if last else None]
    asked = last.question if last else question or ""
    with ExitStack() as opened:
        pair = _pair(session, name, opened)
        turns = [*messages, Message(role="user", content=asked)]
        answer_side_by_side(session.console, pair, turns, with_markdown=session.shows_markdown)
        for number, one in enumerate(pair, 1):
            if one.answer is not None:
                session.note(f"{number} {one.answer.summary(max_length=one.model.max_length)}")
            if one.error is not None:
                session.report(one.error)
        picked = _picked(pair)
        if picked is None or picked.answer is None:
            session.note("the conversation is as it was")
            return
        if picked.model is not session.model:
            session.models.adopt(opened.pop_all())
            session.use(picked.model)
        session.add_answer(asked, picked.answer, replaces_last=last is not None)


def _pair(session: ChatSession, name: str, opened: ExitStack) -> tuple[Contestant, Contestant]:
    ours, theirs = session.options, session.options.copy()
    if not name.isdecimal() or name in session.models.names():
        model = opened.enter_context(session.models.open(name))
        return Contestant(session.model.name, session.model, ours), Contestant(model.name, model, theirs)
    theirs["seed"] = int(name)
    defaults = session.model.default_sampling_params
    if sampling_params({**defaults, **theirs}).temperature == 0:
        raise InvalidRequest(
            "at temperature 0 every seed gives the same answer",
            remedy="/set temperature 0.7, or compare with another model",
        )
    seed = ours.get("seed")
    title = "a random seed" if seed is None else f"seed {seed}"
    return Contestant(title, session.model, ours), Contestant(f"seed {name}", session.model, theirs)


def _picked(pair: tuple[Contestant, Contestant]) -> Contestant | None:
    """Return the contestant that the user picks; None: the user picks neither, or neither has answered."""
    known = {str(number): one for number, one in enumerate(pair, 1) if one.answer is not None}
    if not known:
        return None
    keep = " or ".join(known)
    try:
        while (typed := prompt(f"go on with {keep}? (Enter: neither) ").strip()) not in {"", *known}:
            pass
    except (KeyboardInterrupt, EOFError):
        return None
    return known.get(typed)


class Contestant:
    """One of two models that answer, on a thread of its own.

    Attributes:
        title: the name of the model, with whatever else distinguishes it from the other contestant.
        model: the model.
        text: the text so far.
        answer: the whole answer; None: it is not complete.
        error: why there is no whole answer.
    """

    def __init__(self, title: str, model: OpenedModel, options: SamplingOptions) -> None:
        self.title = title
        self.model = model
        self.text = ""
        self.answer: PrintedAnswer | None = None
        self.error: GenserveError | None = None
        self._options = options
        self._thread: threading.Thread | None = None

    def begin(
        self, messages: Sequence[Message], *, changed: SimpleQueue[None], stopped: threading.Event
    ) -> None:
        """Begin to answer; put an item into `changed` after each change, and end when `stopped` is set."""

        def write(text: str) -> None:
            self.text += text
            changed.put(None)
            if stopped.is_set():
                raise KeyboardInterrupt     # ends the answer as Ctrl-C does in a chat

        def run() -> None:
            try:
                self.answer = print_answer(
                    lambda: self.model.text_model.chat_stream(messages, **self._options),
                    write=write,
                    clock=time.perf_counter,
                )
            except GenserveError as error:
                self.error = error
            except Exception as error:  # a defect must end the answer, since the chat waits for it
                self.error = defect(error)
            changed.put(None)

        # The program does not wait for the thread when it ends.
        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether the answer has ended."""
        return self.answer is not None or self.error is not None

    def wait(self, until_s: float) -> None:
        """Wait until a time for a stopped answer to end, whose text is then the answer."""
        if self._thread is not None:
            self._thread.join(max(0.0, until_s - time.perf_counter()))
        if not self.is_done and self.text:
            self.answer = PrintedAnswer(text=self.text, num_tokens=0)

    def lines(self, console: Console, *, width: int, with_markdown: bool) -> list[Line]:
        """Return the lines of the answer at a width in columns."""
        text = visible(self.text)
        if with_markdown:
            return markdown_lines(console, text, width=width)
        return rendered_lines(console, Text(text), width=width)


def answer_side_by_side(
    console: Console, pair: tuple[Contestant, Contestant], messages: Sequence[Message], *, with_markdown: bool
) -> None:
    """Show both answers while they stream; Ctrl-C stops both."""
    # If Ctrl-C comes while the main thread waits for an Event, the Event's lock may raise RuntimeError.
    changed: SimpleQueue[None] = SimpleQueue()
    stopped = threading.Event()
    changed.put(None)   # show the titles at once
    live = LiveLines(console)
    with_markdown = with_markdown and shows_markdown(console)
    for one in pair:
        one.begin(messages, changed=changed, stopped=stopped)
    try:
        while not all(one.is_done for one in pair):
            changed.get()
            while not changed.empty():
                changed.get()
            if not console.is_dumb_terminal:
                started_s = time.perf_counter()
                with interrupts_deferred():
                    _show(console, live, pair, with_markdown=with_markdown)
                took_s = time.perf_counter() - started_s
                time.sleep(max(_FRAME_S, pause_s(took_s)))
    except KeyboardInterrupt:
        stopped.set()
        with suppress(KeyboardInterrupt):
            until_s = time.perf_counter() + _PATIENCE_S
            for one in pair:
                one.wait(until_s)
    with interrupts_deferred():
        _show(console, live, pair, with_markdown=with_markdown, is_last=True)
        live.keep()


def _show(
    console: Console,
    live: LiveLines,
    pair: tuple[Contestant, Contestant],
    *,
    with_markdown: bool,
    is_last: bool = False,
) -> None:
    width = console.width - 1
    beside = width >= _MIN_COLUMNS
    columns = (width - _BETWEEN.width) // 2 if beside else max(1, width)
    are_done = [one.is_done or is_last for one in pair]     # read this before the lines, which may grow
    left, right = (_titled(console, index, one, columns, with_markdown) for index, one in enumerate(pair, 1))
    growing = [len(lines) - 1 for lines, is_done in zip((left, right), are_done, strict=True) if not is_done]
    if beside:
        live.show(_beside(left, right, columns), num_stable=min(growing, default=None))
    elif are_done[0]:
        live.show([*left, Line("", 0), *right])
    else:
        live.show(left)


def _titled(console: Console, number: int, one: Contestant, columns: int, with_markdown: bool) -> list[Line]:
    title = Text(f"{number} {visible(one.title)}", style="bold")
    return [
        *rendered_lines(console, title, width=columns),
        *one.lines(console, width=columns, with_markdown=with_markdown),
    ]


def _beside(left: list[Line], right: list[Line], columns: int) -> list[Line]:
    none = Line("", 0)
    rows = max(len(left), len(right))
    pairs = zip(left + [none] * (rows - len(left)), right + [none] * (rows - len(right)), strict=True)
    at = columns + _BETWEEN.width
    return [Line(a.text + " " * (columns - a.width) + _BETWEEN.text + b.text, at + b.width) for a, b in pairs]
