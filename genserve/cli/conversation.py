"""Conversation: what was said in one chat."""

from __future__ import annotations

from dataclasses import dataclass

from genserve.request import Message

__all__ = ["Conversation", "Exchange"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A question and its answer, which may have been stopped early."""

    question: str
    answer: str


class Conversation:
    """The system prompt and the exchanges so far.

    Attributes:
        system: what the model is told before the first turn; None: nothing.
    """

    def __init__(self, *, system: str | None = None) -> None:
        self.system = system
        self._exchanges: list[Exchange] = []

    def messages(self) -> list[Message]:
        """Return the turns so far, the system prompt first."""
        messages = [Message(role="system", content=self.system)] if self.system else []
        for exchange in self._exchanges:
            messages.append(Message(role="user", content=exchange.question))
            messages.append(Message(role="assistant", content=exchange.answer))
        return messages

    def messages_with(self, question: str) -> list[Message]:
        """Return the turns so far and one more of the user."""
        return [*self.messages(), Message(role="user", content=question)]

    def add(self, question: str, *, answer: str) -> None:
        """Keep an exchange."""
        self._exchanges.append(Exchange(question=question, answer=answer))

    def undo(self) -> Exchange | None:
        """Forget the last exchange and return it; None if there is none."""
        return self._exchanges.pop() if self._exchanges else None

    def clear(self) -> None:
        """Forget all exchanges; the system prompt stays."""
        self._exchanges.clear()

    def __len__(self) -> int:
        """The number of exchanges."""
        return len(self._exchanges)
