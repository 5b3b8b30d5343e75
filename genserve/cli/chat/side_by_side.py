"""Side by side: two models or two seeds answer the same question, in two columns while both stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from queue import SimpleQueue

from prompt_toolkit import prompt
from rich.console import Console
from rich.text import Text

from genserve.cli.chat.chat_session import ChatSession, PrintedAnswer, defect, open_stream, print_answer
from genserve.cli.chat.live_lines import Line, LiveLines, pause_s, rendered_lines
from genserve.cli.chat.markdown_stream import markdown_lines, shows_markdown
from genserve.cli.console import visible
from genserve.cli.model_access import OpenedModel
from genserve.errors import GenserveError
from genserve.prompt import Message
from genserve.sampling.sampling_options import SamplingOptions
from genserve.sampling.sampling_params import sampling_params

_MIN_COLUMNS = 50       # in a narrower terminal the answers are below each other
_FRAME_S = 0.05
_PATIENCE_S = 1.0       # for the end of an answer after Ctrl-C: a server may have vanished
_BETWEEN = Line(" │ ", 3)


def compare(session: ChatSession, name: str, *, question: str | None) -> None:
    """Let the model of a chat and another one, or the same with another seed, answer; the user picks.

    Args:
        session: the chat, which goes on with the answer that is picked.
        name: of the other model, or the other seed.
        question: None: the last one of the chat, whose answer may be replaced.

    Raises:
        GenserveError: the other model cannot be opened, or the seed is invalid.
    """
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
        session.take(asked, picked.answer, replaces_last=last is not None)


def _pair(session: ChatSession, name: str, opened: ExitStack) -> tuple[Contestant, Contestant]:
    ours, theirs = session.options, session.options.copy()
    if not name.isdecimal() or name in session.models.names():
        model = opened.enter_context(session.models.open(name))
        return Contestant(session.model.name, session.model, ours), Contestant(model.name, model, theirs)
    theirs["seed"] = int(name)
    sampling_params(theirs)
    seed = ours.get("seed")
    title = "a random seed" if seed is None else f"seed {seed}"
    return Contestant(title, session.model, ours), Contestant(f"seed {name}", session.model, theirs)


def _picked(pair: tuple[Contestant, Contestant]) -> Contestant | None:
    """Return the answer that the user picks; None: neither, or there is none."""
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
    """One of the two that answer, on a thread of its own.

    Attributes:
        title: the model, and what else tells it from the other one.
        model: the model.
        text: what it has said.
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
        """Begin to answer; put an item after each change, and end when the event is set."""

        def write(text: str) -> None:
            self.text += text
            changed.put(None)
            if stopped.is_set():
                raise KeyboardInterrupt     # ends the answer as Ctrl-C does in a single one

        def run() -> None:
            try:
                self.answer = print_answer(
                    lambda: open_stream(self.model, messages, self._options),
                    write=write,
                    clock=time.perf_counter,
                )
            except GenserveError as error:
                self.error = error
            except Exception as error:  # a defect, which must not be waited for
                self.error = defect(error)
            changed.put(None)

        # Not waited for at the end of the program.
        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether nothing more will come."""
        return self.answer is not None or self.error is not None

    def wait(self, until_s: float) -> None:
        """Wait for the end of an answer that was stopped, until a time: its text is the answer then."""
        if self._thread is not None:
            self._thread.join(max(0.0, until_s - time.perf_counter()))
        if not self.is_done and self.text:
            self.answer = PrintedAnswer(text=self.text, num_tokens=0)

    def lines(self, console: Console, *, width: int, with_markdown: bool) -> list[Line]:
        """Return what it has said, at a width in columns."""
        text = visible(self.text)
        if with_markdown:
            return markdown_lines(console, text, width=width)
        return rendered_lines(console, Text(text), width=width)


def answer_side_by_side(
    console: Console, pair: tuple[Contestant, Contestant], messages: Sequence[Message], *, with_markdown: bool
) -> None:
    """Show both answers while they stream; Ctrl-C stops both."""
    # A Ctrl-C while a main thread waits for an Event may become a RuntimeError of its lock.
    changed: SimpleQueue[None] = SimpleQueue()
    stopped = threading.Event()
    changed.put(None)   # the titles are shown at once
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
                _show(console, live, pair, with_markdown=with_markdown)
                took_s = time.perf_counter() - started_s
                time.sleep(max(_FRAME_S, pause_s(took_s)))
    except KeyboardInterrupt:
        stopped.set()
        with suppress(KeyboardInterrupt):
            until_s = time.perf_counter() + _PATIENCE_S
            for one in pair:
                one.wait(until_s)
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
    are_done = [one.is_done or is_last for one in pair]     # looked at before the lines, which may grow
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
