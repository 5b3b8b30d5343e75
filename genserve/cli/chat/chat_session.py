"""Chat session: holds the model and the conversation of a chat, and prints each answer as it streams."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, cast

from rich.console import Console, ConsoleDimensions, RenderableType
from rich.text import Text

from genserve.cli.chat.conversation import Conversation, Exchange
from genserve.cli.chat.keyboard import held_keys, interrupts_deferred
from genserve.cli.chat.markdown_stream import answer_display
from genserve.cli.console import counted, error_heading, make_console, visible
from genserve.cli.opened_models import ModelSwitch, OpenedModel
from genserve.completion import Delta, FinishReason, PromptProgress, Stream, Usage
from genserve.errors import GenserveError
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
        parts = [counted(self.num_tokens, "token")]
        if self.first_token_s is not None:
            parts.append(f"first after {self.first_token_s * 1000:.0f} ms")
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:.1f} tokens/s")
        if self.usage is not None:
            used = self.usage.prompt_tokens + self.usage.completion_tokens
            parts.append(f"context {used}" + (f" of {max_length}" if max_length else ""))
        parts.append(self.finish_reason.value if self.finish_reason else "stopped")
        return " · ".join(parts)

    def timing_summary(self) -> str:
        """Return how long the parts of the answer took, as one line; empty: it is not known."""
        usage = self.usage
        if usage is None or (timings := usage.timings) is None:
            return ""
        num_read = usage.prompt_tokens - usage.cached_tokens
        parts = [f"waited {timings.queue_s:.2f} s", f"read {counted(num_read, 'token')} of the prompt"]
        parts[-1] += f" in {timings.prefill_s:.2f} s"
        if timings.prefill_s > 0:
            parts[-1] += f" ({num_read / timings.prefill_s:.1f} tokens/s)"
        if usage.cached_tokens:
            parts.append(f"{usage.cached_tokens} cached")
        parts.append(f"answered in {timings.decode_s:.2f} s")
        if timings.drafted_tokens:
            parts.append(f"{timings.accepted_tokens} of {timings.drafted_tokens} drafted tokens accepted")
        return " · ".join(parts)


def print_answer(
    open_stream: Callable[[], Stream],
    *,
    write: Callable[[str], None],
    clock: Callable[[], float],
    show_progress: Callable[[PromptProgress], None] | None = None,
) -> PrintedAnswer:
    """Print an answer as it streams. Ctrl-C ends it, and the result has the text so far.

    Args:
        open_stream: sends the request; times count from this call.
        write: prints a piece of text.
        clock: a monotonic clock, in seconds.
        show_progress: shows how much of the prompt was read; None: nothing does.

    Raises:
        GenserveError: the model failed, or rejected the request.
    """
    started_s = clock()
    received: list[tuple[Delta, float]] = []
    try:
        with open_stream() as stream:
            for delta in stream:
                received.append((delta, clock() - started_s))
                write(delta.text)
                if show_progress is not None and isinstance(delta, PromptProgress):
                    show_progress(delta)
    except KeyboardInterrupt:
        pass  # leaving the block has closed the stream
    times_s = [at_s for delta, at_s in received for _ in delta.token_ids]
    last = received[-1][0] if received else None
    usage = last.usage if last else None
    return PrintedAnswer(
        text="".join(delta.text for delta, _ in received),
        num_tokens=usage.completion_tokens if usage else len(times_s),
        token_ids=tuple(token_id for delta, _ in received for token_id in delta.token_ids),
        first_token_s=times_s[0] if times_s else None,
        last_token_s=times_s[-1] if times_s else None,
        finish_reason=last.finish_reason if last else None,
        usage=usage,
    )


class ChatSession:
    """The state of one chat.

    Attributes:
        model: answers the next question.
        models: opens other models that could answer.
        conversation: the messages.
        options: the sampling parameters of the next answer.
        first_options: the sampling parameters with which a chat with this model begins.
        answers: all printed answers, including undone ones.
        shows_markdown: whether answers are rendered, on a terminal that can.
        file: the file that the conversation was saved to or loaded from; None: there is none.
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
            model: the name of the model; None: the default model.
            conversation: the messages so far.
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
            self.console.size = ConsoleDimensions(*shutil.get_terminal_size())   # rich assumes 80 columns
        self._initial_options = initial_options
        self.model = models.switch(model)
        self.options = self.first_options = initial_options(self.model)

    def switch(self, name: str) -> None:
        """Answer with another model from now on; options that the user has changed stay.

        Raises:
            GenserveError: the model does not exist or cannot be loaded; the old model stays.
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
        """Print the answer to a question, and append both to the conversation.

        Without an answer the question is the conversation's unanswered one.

        Raises:
            GenserveError: the model failed, or rejected the request.
        """
        self.conversation.unanswered = question
        answer = self._print_answer(self.conversation.messages_with(question))
        if answer.text or answer.finish_reason is not None:
            self.conversation.add(
                Exchange(question=question, answer=answer.text, token_ids=answer.token_ids)
            )
        return answer

    def ask_instead(self, question: str) -> PrintedAnswer:
        """Ask a question in place of the last one, which stays if there is no answer; see `ask`."""
        with self._last_replaced():
            return self.ask(question)

    def continue_from(self, text: str, token_ids: tuple[int, ...]) -> PrintedAnswer:
        """Replace the last answer by an answer that begins with a text, given with its tokens; see `ask`."""
        with self._last_replaced() as last:
            begun = [*self.conversation.messages_with(last.question), Message(role="assistant", content=text)]
            chat = Chat(messages=tuple(begun), continue_final_message=True)
            answer = self._print_answer(chat, begun=text)
            self.conversation.add(
                replace(last, answer=text + answer.text, token_ids=token_ids + answer.token_ids)
            )
        return answer

    def add_answer(self, question: str, answer: PrintedAnswer, *, replaces_last: bool) -> None:
        """Append an answer that was printed elsewhere, or replace the last exchange with it."""
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
        """Remove the last exchange, and put it back unless another exchange is added."""
        last = self.conversation.undo()
        assert last is not None
        num_left = len(self.conversation)
        try:
            yield last
        finally:
            if len(self.conversation) == num_left:
                self.conversation.add(last)

    def _print_answer(self, messages: Messages, *, begun: str = "") -> PrintedAnswer:
        options: SamplingOptions = {**self.options, "return_cache_match": True}
        with held_keys(), shown_answer(self.console, with_markdown=self.shows_markdown) as shown:
            shown.write(begun)
            answer = print_answer(
                lambda: self.model.text_model.chat_stream(messages, return_progress=True, **options),
                write=shown.write,
                clock=time.perf_counter,
                show_progress=shown.show_progress,
            )
        self.answers.append(answer)
        return answer

    def show(self, text: str) -> None:
        """Print an earlier answer."""
        with shown_answer(self.console, with_markdown=self.shows_markdown) as shown:
            shown.write(text)

    def summarize(self, answer: PrintedAnswer) -> None:
        """Print the token counts and the timing of an answer, and an empty line before the next prompt."""
        self.note(answer.summary(max_length=self.model.max_length))
        self.print("")

    def note(self, text: str) -> None:
        """Print a remark of the chat program, dimmed, wrapped between words."""
        self._print_text(Text(visible(text), style="dim"))

    def report(self, error: GenserveError) -> None:
        """Print an error and its remedy as one paragraph."""
        text = Text.assemble((error_heading(error), "bold red"), f": {visible(error.message.rstrip())}")
        self._print_text(text.append(f"; {visible(error.remedy)}" if error.remedy else ""))

    def _print_text(self, text: Text) -> None:
        self.print(text, soft_wrap=not self.console.is_terminal)

    def print(self, renderable: RenderableType, *, soft_wrap: bool | None = None) -> None:
        """Print on the terminal; Ctrl-C does not interrupt it halfway."""
        with interrupts_deferred():
            self.console.print(renderable, soft_wrap=soft_wrap)


def defect(error: Exception) -> GenserveError:
    """Return the error to print for an unexpected exception."""
    return GenserveError(f"{type(error).__name__}: {error}", remedy="please report this defect")


class _ShownAnswer(NamedTuple):
    """How to show an answer: its text, and before that how much of the prompt was read."""

    write: Callable[[str], None]
    show_progress: Callable[[PromptProgress], None]


@contextmanager
def shown_answer(console: Console, *, with_markdown: bool) -> Iterator[_ShownAnswer]:
    """Show an answer; on a terminal a spinner turns until the first text."""
    display = answer_display(console, with_markdown=with_markdown)
    status = console.status("", spinner_style="dim")
    has_text = False

    @interrupts_deferred()
    def write(text: str) -> None:
        nonlocal has_text
        if text:
            spinner.close()
            display.feed(text)
            has_text = True

    @interrupts_deferred()
    def show_progress(progress: PromptProgress) -> None:
        share = progress.read_tokens / progress.prompt_tokens
        # A space, since rich keeps the text before when the new one is empty.
        status.update(f"[dim]reading the prompt {100 * share:.0f} %[/]" if share < 1 else " ")

    with ExitStack() as spinner:
        if console.is_interactive:
            spinner.enter_context(status)
        try:
            yield _ShownAnswer(write, show_progress)
            has_text |= not console.is_terminal     # outside a terminal, an empty answer is an empty line
        finally:
            with interrupts_deferred():
                spinner.close()
                if has_text:
                    display.finish()
