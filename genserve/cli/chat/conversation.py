"""Conversation: the system prompt, questions and answers of a chat, which a JSON file can store."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from genserve.errors import InvalidRequest
from genserve.files import replacement
from genserve.prompt import Message, read_messages

_MAX_FILE_BYTES = 64 * 2**20
_PAGE_FORMAT = "genserve-conversations"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A question and its answer; Ctrl-C may have cut the answer short."""

    question: str
    answer: str
    token_ids: tuple[int, ...] = ()     # the answer's tokens; empty: the open model does not know them


class Conversation:
    """The system prompt and the exchanges so far.

    Attributes:
        system: the system prompt, if any.
        unanswered: the question after the exchanges, if there was an error or Ctrl-C instead of an answer.
    """

    def __init__(self, *, system: str | None = None) -> None:
        self.system = system
        self.unanswered: str | None = None
        self._exchanges: list[Exchange] = []

    def messages(self) -> list[Message]:
        """Return the messages so far, the system prompt first."""
        messages = [Message(role="system", content=self.system)] if self.system else []
        for exchange in self._exchanges:
            messages.append(Message(role="user", content=exchange.question))
            messages.append(Message(role="assistant", content=exchange.answer))
        return messages

    def messages_with(self, question: str) -> list[Message]:
        """Return the messages so far and a new user message."""
        return [*self.messages(), Message(role="user", content=question)]

    def add(self, exchange: Exchange) -> None:
        """Append an exchange, in place of an unanswered question."""
        self._exchanges.append(exchange)
        self.unanswered = None

    def forget_token_ids(self) -> None:
        """Remove the token ids, which mean nothing to another model."""
        self._exchanges = [replace(exchange, token_ids=()) for exchange in self._exchanges]

    @property
    def last(self) -> Exchange | None:
        """The last exchange, or None."""
        return self._exchanges[-1] if self._exchanges else None

    def undo(self) -> Exchange | None:
        """Remove and return the last exchange; None: no exchange is left. An unanswered question stays."""
        return self._exchanges.pop() if self._exchanges else None

    def clear(self) -> None:
        """Remove all exchanges and the unanswered question; the system prompt stays."""
        self._exchanges.clear()
        self.unanswered = None

    def __len__(self) -> int:
        """The number of exchanges."""
        return len(self._exchanges)


def read_conversation(path: Path) -> tuple[Conversation, bool]:
    """Return the conversation in a file, and whether the file has nothing else.

    The file is `{"messages": [...]}`, a list of OpenAI's messages alone, or an export of the chat page, whose
    newest conversation is read as the page shows it.

    Raises:
        InvalidRequest: the file cannot be read, is not JSON in UTF-8, or has another shape.
    """
    try:
        if not path.is_file():
            raise InvalidRequest(f"{path} is not a file" if path.exists() else f"there is no file {path}")
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise InvalidRequest(f"{path} is larger than {_MAX_FILE_BYTES >> 20} MiB")
        content = json.loads(path.read_bytes().decode())
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path} is not UTF-8, at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path} is not JSON: {error}", remedy="/save writes such files") from None
    is_of_page = isinstance(content, dict) and content.get("format") == _PAGE_FORMAT
    if is_of_page:
        content = _shown_on_page(content, path)
    found = content.get("messages") if isinstance(content, dict) else content
    if not isinstance(found, list) or not all(isinstance(message, dict) for message in found):
        remedy = "/save and the chat page's export write such files"
        raise InvalidRequest(f"{path} has no list of messages", remedy=remedy)
    try:
        return _conversation_of(read_messages(found) if found else ()), not is_of_page
    except InvalidRequest as error:
        raise InvalidRequest(f"{path}: {error.message}") from None


def _shown_on_page(exported: dict[str, Any], path: Path) -> list[dict[str, str]]:
    """Return the messages of the newest conversation in an export of the page (`web/src/exchange.ts`)."""
    try:
        newest = max(exported["conversations"], key=lambda each: each["updated"])
        messages, chosen, parent = [], newest["chosen"], "root"
        if newest["system"]:
            messages.append({"role": "system", "content": newest["system"]})
        left = dict(newest["messages"])     # a broken file may lead in circles
        while (message := left.pop(chosen.get(parent), None)) is not None:
            messages.append({"role": message["role"], "content": message["content"]})
            parent = message["id"]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise InvalidRequest(f"{path} is not a whole export of the chat page") from None
    return messages


def _conversation_of(messages: Sequence[Message]) -> Conversation:
    begins = 1 if messages and messages[0].role == "system" else 0
    conversation = Conversation(system=messages[0].content if begins else None)
    turns = messages[begins:]
    for index, message in enumerate(turns):
        role = ("user", "assistant")[index % 2]
        if message.role != role:
            raise InvalidRequest(f"messages[{index + begins}] is of the {message.role}, not of the {role}")
    if len(turns) % 2:
        raise InvalidRequest("the last question has no answer")
    for question, answer in zip(turns[::2], turns[1::2], strict=True):
        conversation.add(Exchange(question=question.content, answer=answer.content))
    return conversation


def save_conversation(conversation: Conversation, path: Path, *, may_replace: bool) -> None:
    """Write the messages to a file, completely or not at all.

    Raises:
        InvalidRequest: the file exists and must not be replaced, or cannot be written.
    """
    messages = [message.as_dict() for message in conversation.messages()]
    text = json.dumps({"messages": messages}, ensure_ascii=False, indent=2) + "\n"
    try:
        if not may_replace:
            path.open("x").close()      # reserves the name: a second chat cannot take it too
        try:
            with replacement(path) as complete:
                complete.write_bytes(text.encode(errors="replace"))
        except OSError:
            if not may_replace:
                path.unlink(missing_ok=True)
            raise
    except FileExistsError:
        raise InvalidRequest(f"{path} exists", remedy="name another file, or remove it") from None
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be written: {error.strerror}") from None
