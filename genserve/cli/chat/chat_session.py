"""Chat session: the model and the conversation of a chat, and each answer printed as it streams."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from rich.console import Console, ConsoleDimensions
from rich.text import Text

from genserve.cli.chat.conversation import Conversation, Exchange
from genserve.cli.chat.keyboard import held_keys
from genserve.cli.chat.markdown_stream import answer_display
from genserve.cli.console import make_console, visible
from genserve.cli.model_access import ModelSwitch, OpenedModel
from genserve.completion import FinishReason, Stream, Usage
from genserve.errors import ContextLengthExceeded, GenserveError
from genserve.prompt import Chat, Message, Messages
from genserve.sampling.sampling_options import SamplingOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintedAnswer:
    """A printed answer with its timing."""

    text: str
    num_tokens: int
    token_ids: tuple[int, ...] = ()
    first_token_s: float | None = None          # from the question to the first token; None: no token
    last_token_s: float | None = None           # from the question to the last token
    finish_reason: FinishReason | None = None   # None: stopped by Ctrl-C
    usage: Usage | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """The rate after the first token; None: too few tokens."""
        if self.first_token_s is None or self.last_token_s is None or self.last_token_s <= self.first_token_s:
            return None
        return (self.num_tokens - 1) / (self.last_token_s - self.first_token_s)

    def summary(self, *, max_length: int | None) -> str:
        """Return token counts and timing as one line; `max_length` is the context length, if known."""
        parts = [f"{self.num_tokens} tokens"]
        if self.first_token_s is not None:
            parts.append(f"first after {self.first_token_s * 1000:.0f} ms")
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:.1f} tokens/s")
        if self.usage is not None:
            used = self.usage.prompt_tokens + self.usage.completion_tokens
            parts.append(f"context {used}" + (f" of {max_length}" if max_length else ""))
        parts.append(self.finish_reason.value if self.finish_reason else "stopped")
        return " · ".join(parts)


def print_answer(
    open_stream: Callable[[], Stream], *, write: Callable[[str], None], clock: Callable[[], float]
) -> PrintedAnswer:
    """Print an answer as it streams. Ctrl-C ends it, and the text so far is returned.

    Args:
        open_stream: sends the request; times count from this call.
        write: prints a piece of text.
        clock: a monotonic clock, in seconds.

    Raises:
        GenserveError: the model failed, or rejected the request.
    """
    started_s = clock()
    texts: list[str] = []
    token_ids: list[int] = []
    times_s: list[float] = []
    finish_reason, usage = None, None
    try:
        with open_stream() as stream:
            for delta in stream:
                times_s += [clock() - started_s] * len(delta.token_ids)
                token_ids += delta.token_ids
                texts.append(delta.text)
                write(delta.text)
                finish_reason, usage = delta.finish_reason, delta.usage
    except KeyboardInterrupt:
        pass  # leaving the block has closed the stream
    return PrintedAnswer(
        text="".join(texts),
        num_tokens=usage.completion_tokens if usage else len(times_s),
        token_ids=tuple(token_ids),
        first_token_s=times_s[0] if times_s else None,
        last_token_s=times_s[-1] if times_s else None,
        finish_reason=finish_reason,
        usage=usage,
    )


class ChatSession:
    """The state of one chat.

    Attributes:
        model: answers the next question.
        models: what else could answer.
        conversation: the messages.
        options: the sampling parameters of the next answer.
        first_options: the sampling parameters with which a chat with this model begins.
        answers: all printed answers, including undone ones.
        shows_markdown: whether answers are rendered, on a terminal that can.
        file: of the conversation, once it was saved or loaded.
    """

    def __init__(
        self,
        models: ModelSwitch,
        *,
        model: str | None,
        conversation: Conversation,
        initial_options: Callable[[OpenedModel], SamplingOptions],
    ) -> None:
        """Begin a chat.

        Args:
            models: opens the model, and closes it after the chat.
            model: its name; None: the default one.
            conversation: what was said before.
            initial_options: the sampling parameters with which a chat with a model begins.

        Raises:
            GenserveError: the model does not exist or cannot be loaded, or the server does not answer.
        """
        self.models = models
        self.conversation = conversation
        self.answers: list[PrintedAnswer] = []
        self.shows_markdown = True
        self.file: Path | None = None
        self.console = make_console()
        if self.console.is_dumb_terminal:
            self.console.size = ConsoleDimensions(*shutil.get_terminal_size())   # rich takes 80 columns
        self._initial_options = initial_options
        self.model = models.switch(model)
        self.options = self.first_options = initial_options(self.model)

    def switch(self, name: str) -> None:
        """Answer with another model from now on; options that the user has changed stay.

        Raises:
            GenserveError: the model does not exist or cannot be loaded; the old one stays.
        """
        self.use(self.models.switch(name))

    def use(self, model: OpenedModel) -> None:
        """Answer with an open model; see `switch`."""
        first: dict[str, object] = {**self.first_options}
        changed = {name: value for name, value in self.options.items() if first.get(name, self) != value}
        self.model = model
        self.conversation.forget_token_ids()
        self.first_options = self._initial_options(model)
        self.options = cast("SamplingOptions", {**self.first_options, **changed})

    def ask(self, question: str) -> PrintedAnswer:
        """Print the answer to a question, and append both to the conversation unless there is an error.

        Raises:
            GenserveError: the model failed, or rejected the request.
        """
        answer = self._print_answer(self.conversation.messages_with(question))
        if answer.text or answer.finish_reason is not None:
            self.conversation.add(
                Exchange(question=question, answer=answer.text, token_ids=answer.token_ids)
            )
        return answer

    def ask_instead(self, question: str) -> PrintedAnswer:
        """Ask this in place of the last question, which stays if there is no answer; see `ask`."""
        with self._last_replaced():
            return self.ask(question)

    def continue_from(self, text: str, token_ids: tuple[int, ...]) -> PrintedAnswer:
        """Replace the last answer by one that begins with a text, of these tokens; see `ask`."""
        with self._last_replaced() as last:
            begun = [*self.conversation.messages_with(last.question), Message(role="assistant", content=text)]
            chat = Chat(messages=tuple(begun), continue_final_message=True)
            answer = self._print_answer(chat, begun=text)
            self.conversation.add(
                replace(last, answer=text + answer.text, token_ids=token_ids + answer.token_ids)
            )
        return answer

    def take(self, question: str, answer: PrintedAnswer, *, replaces_last: bool) -> None:
        """Append an answer that was printed elsewhere, or replace the last exchange by it."""
        if replaces_last:
            self.conversation.undo()
        self.conversation.add(Exchange(question=question, answer=answer.text, token_ids=answer.token_ids))
        self.answers.append(answer)

    def cut_last_answer(self, text: str, token_ids: tuple[int, ...]) -> None:
        """Replace the last answer by its beginning."""
        with self._last_replaced() as last:
            self.conversation.add(replace(last, answer=text, token_ids=token_ids))

    @contextmanager
    def _last_replaced(self) -> Iterator[Exchange]:
        """Take the last exchange off, and put it back unless another one is added."""
        last = self.conversation.undo()
        assert last is not None
        num_left = len(self.conversation)
        try:
            yield last
        finally:
            if len(self.conversation) == num_left:
                self.conversation.add(last)

    def _print_answer(self, messages: Messages, *, begun: str = "") -> PrintedAnswer:
        with held_keys(), shown_answer(self.console, with_markdown=self.shows_markdown) as write:
            write(begun)
            answer = print_answer(
                lambda: open_stream(self.model, messages, self.options),
                write=write,
                clock=time.perf_counter,
            )
        self.answers.append(answer)
        return answer

    def show(self, text: str) -> None:
        """Print an earlier answer."""
        with shown_answer(self.console, with_markdown=self.shows_markdown) as write:
            write(text)

    def summarize(self, answer: PrintedAnswer) -> None:
        """Print the token counts and the timing of an answer, and an empty line before the next prompt."""
        self.note(answer.summary(max_length=self.model.max_length))
        self.console.print()

    def note(self, text: str) -> None:
        """Print a remark of the chat program, dimmed, wrapped between words."""
        self._say(Text(visible(text), style="dim"))

    def report(self, error: GenserveError) -> None:
        """Print an error and its remedy as one paragraph."""
        text = Text.assemble((f"error[{error.code}]", "bold red"), f": {visible(error.message.rstrip())}")
        self._say(text.append(f"; {visible(error.remedy)}" if error.remedy else ""))

    def _say(self, text: Text) -> None:
        self.console.print(text, soft_wrap=not self.console.is_terminal)


def open_stream(model: OpenedModel, messages: Messages, options: SamplingOptions) -> Stream:
    """Return the stream of an answer. In a chat `max_tokens` is a limit: the context may leave room for less.

    Raises:
        GenserveError: the model rejects the request.
    """
    try:
        return model.text_model.chat_stream(messages, **options)
    except ContextLengthExceeded as error:
        if error.field != "max_tokens":
            raise
    options = options.copy()
    options["max_tokens"] = None
    return model.text_model.chat_stream(messages, **options)


def defect(error: Exception) -> GenserveError:
    """Return the error to print for one that nobody expected."""
    return GenserveError(f"{type(error).__name__}: {error}", remedy="please report this defect")


@contextmanager
def shown_answer(console: Console, *, with_markdown: bool) -> Iterator[Callable[[str], None]]:
    """Yield the function that shows an answer; on a terminal a spinner turns until its first text."""
    display = answer_display(console, with_markdown=with_markdown)
    has_text = False

    def write(text: str) -> None:
        nonlocal has_text
        if text:
            spinner.close()
            display.feed(text)
            has_text = True

    with ExitStack() as spinner:
        if console.is_interactive:
            spinner.enter_context(console.status("", spinner_style="dim"))
        try:
            yield write
            has_text |= not console.is_terminal     # there an empty answer is an empty line
        finally:
            spinner.close()
            if has_text:
                display.finish()
