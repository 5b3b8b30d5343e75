"""Chat session: one chat with a model: ask, print, remember."""

from __future__ import annotations

import time

from rich.text import Text

from genserve.cli.conversation import Conversation
from genserve.cli.model_access import OpenedModel
from genserve.cli.printed_answer import PrintedAnswer, print_answer
from genserve.cli.render import make_console, write_text
from genserve.sampling.params import SamplingOptions

__all__ = ["ChatSession"]


class ChatSession:
    """What a chat is made of.

    Attributes:
        conversation: what was said.
        options: how to pick tokens, from the next question on.
        first_options: those that the chat began with.
        answers: what was printed so far, undone ones too.
    """

    def __init__(self, model: OpenedModel, *, conversation: Conversation, options: SamplingOptions) -> None:
        self.model = model
        self.conversation = conversation
        self.options = options
        self.first_options = options
        self.answers: list[PrintedAnswer] = []
        self.console = make_console()

    def ask(self, question: str) -> PrintedAnswer:
        """Print the answer and remember both; on an error nothing is remembered.

        Raises:
            GenserveError: the model failed, or the question was refused.
        """
        messages = self.conversation.messages_with(question)
        answer = print_answer(
            lambda: self.model.text_model.chat_stream(messages, **self.options),
            write=lambda text: write_text(self.console, text),
            clock=time.perf_counter,
        )
        is_stopped = answer.finish_reason is None
        write_text(self.console, " [stopped]\n" if is_stopped else "\n")
        self.answers.append(answer)
        if answer.text or not is_stopped:
            self.conversation.add(question, answer=answer.text)
        return answer

    def note(self, text: str) -> None:
        """Print a line that is not the model's."""
        self.console.print(Text(text, style="dim"))
