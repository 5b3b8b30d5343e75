"""Prompt: the text, token ids or chat that a caller gives to a text model; validated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from genserve.errors import InvalidRequest

__all__ = [
    "COMPLETION_TOKENS",
    "MAX_CHAT_MESSAGES",
    "Chat",
    "Message",
    "Messages",
    "Prompt",
    "Prompts",
    "Role",
    "read_chat",
    "read_messages",
    "read_prompts",
]

Role = Literal["system", "user", "assistant"]

# A template may take milliseconds for each message, and everyone else's chats wait for it.
MAX_CHAT_MESSAGES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a chat.

    Raises:
        InvalidRequest: an unknown role, content that is not text, or a thought that is not the assistant's.
    """

    role: Role
    content: str
    reasoning_content: str = ""     # what it thought aloud before; of it a template may show what it wants

    def __post_init__(self) -> None:
        _require(self.role in get_args(Role), "role", f"must be one of {', '.join(get_args(Role))}")
        _require(isinstance(self.content, str), "content", "must be text")
        _require(isinstance(self.reasoning_content, str), "reasoning_content", "must be text")
        thinks = self.role == "assistant" or not self.reasoning_content
        _require(thinks, "reasoning_content", "belongs to the assistant's messages")

    def as_dict(self) -> dict[str, str]:
        """Return it as JSON and templates have it, without a thought if there is none."""
        thought = {"reasoning_content": self.reasoning_content} if self.reasoning_content else {}
        return {"role": self.role, "content": self.content, **thought}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """The turns of a chat, and what the model's chat template is to make of them.

    Raises:
        InvalidRequest: no message, or more than MAX_CHAT_MESSAGES; or the last is to be continued and
            answered as well.
    """

    messages: tuple[Message, ...]
    add_generation_prompt: bool | None = None   # begin the assistant's turn; None: unless one is continued
    continue_final_message: bool = False        # leave the last turn open, for the model to go on with it
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)    # variables of the template

    def __post_init__(self) -> None:
        _require_some_messages(len(self.messages))
        _require(
            not (self.continue_final_message and self.add_generation_prompt),
            "continue_final_message",
            "cannot be combined with add_generation_prompt",
        )

    @property
    def begins_turn(self) -> bool:
        """Whether the prompt ends with the beginning of the assistant's turn."""
        return not self.continue_final_message and self.add_generation_prompt is not False


# A text, its token ids, or a chat.
Prompt: TypeAlias = str | Sequence[int] | Chat

# A chat as callers write it; a text alone is one turn of the user.
Messages: TypeAlias = str | Sequence[Message | Mapping[str, str]] | Chat


def read_chat(messages: Messages) -> Chat:
    """Make a chat from loose messages. Raises what `read_messages` raises."""
    return messages if isinstance(messages, Chat) else Chat(messages=read_messages(messages))


def read_messages(messages: str | Sequence[Message | Mapping[str, str]]) -> tuple[Message, ...]:
    """Make messages from loose ones: a text alone is one turn of the user.

    Raises:
        InvalidRequest: none at all, more than MAX_CHAT_MESSAGES, or one whose keys are not role and
            content, or are wrong; `field` has its index.
    """
    if isinstance(messages, str):
        return (Message(role="user", content=messages),)
    _require_some_messages(len(messages))
    return tuple(_read_message(message, index) for index, message in enumerate(messages))


def _require_some_messages(number: int) -> None:
    _require(number > 0, "messages", "must not be empty")
    rule = f"has {number} messages; the limit is {MAX_CHAT_MESSAGES}"
    _require(number <= MAX_CHAT_MESSAGES, "messages", rule)


def _read_message(message: Message | Mapping[str, str], index: int) -> Message:
    if isinstance(message, Message):
        return message
    place = f"messages[{index}]"
    known = {"role", "content"} <= set(message) <= {"role", "content", "reasoning_content"}
    _require(known, place, "must have the keys role and content")
    try:
        return Message(**message)  # type: ignore[arg-type]  # it checks
    except InvalidRequest as error:
        raise InvalidRequest(f"{place}.{error.message}", field=f"{place}.{error.field}") from None


# What `/v1/completions` and `complete` take: one prompt or several, as texts or as token ids.
Prompts: TypeAlias = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]

# How many tokens these make at the most where nothing is said.
COMPLETION_TOKENS = 16


def read_prompts(prompts: Prompts) -> list[str] | list[list[int]]:
    """Return the prompts one by one.

    Raises:
        InvalidRequest: none at all, or no such things; `field` is `prompt`.
    """
    several: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
    if several and all(_is_id(part) for part in several):
        several = [several]
    _require(bool(several), "prompt", "is empty")
    if all(isinstance(part, str) for part in several):
        return several
    lists = all(isinstance(part, Sequence) and all(_is_id(i) for i in part) for part in several)
    _require(lists, "prompt", "must be text, token ids, or a list of texts or of lists of token ids")
    return [list(part) for part in several]


def _is_id(part: object) -> bool:
    return isinstance(part, int) and not isinstance(part, bool)


def _require(holds: bool, field: str, rule: str) -> None:  # noqa: FBT001  # reads as a sentence
    if not holds:
        raise InvalidRequest(f"{field} {rule}", field=field)
