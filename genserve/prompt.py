"""Prompt: the text, token ids or chat that a caller gives to a text model; validated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from genserve.errors import InvalidRequest, require

Role = Literal["system", "user", "assistant"]

COMPLETION_TOKENS = 16      # the default `max_tokens` of `/v1/completions` and `complete`
# A template may take milliseconds per message, and the chats of all other clients wait for it.
MAX_CHAT_MESSAGES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a chat.

    Raises:
        InvalidRequest: an unknown role, content that is not text, or `reasoning_content` of another role
            than the assistant.
    """

    role: Role
    content: str
    reasoning_content: str = ""     # the reasoning before the answer; the template decides what it shows

    def __post_init__(self) -> None:
        require(self.role in get_args(Role), "role", f"must be one of {', '.join(get_args(Role))}")
        require(isinstance(self.content, str), "content", "must be text")
        require(isinstance(self.reasoning_content, str), "reasoning_content", "must be text")
        may_reason = self.role == "assistant" or not self.reasoning_content
        require(may_reason, "reasoning_content", "is only for messages of the assistant")

    def as_dict(self) -> dict[str, str]:
        """Return the message as JSON and templates have it; `reasoning_content` only if it is not empty."""
        reasoning = {"reasoning_content": self.reasoning_content} if self.reasoning_content else {}
        return {"role": self.role, "content": self.content, **reasoning}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """The turns of a chat, with the options of the chat template.

    Raises:
        InvalidRequest: no message, or more than MAX_CHAT_MESSAGES; or both `continue_final_message` and
            `add_generation_prompt`.
    """

    messages: tuple[Message, ...]
    add_generation_prompt: bool | None = None   # begin the assistant's turn; None: unless one is continued
    continue_final_message: bool = False        # leave the last turn open, for the model to continue
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)    # variables of the template

    def __post_init__(self) -> None:
        _require_some_messages(len(self.messages))
        require(
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
    """Return the chat of some messages; raises the errors of `read_messages`."""
    return messages if isinstance(messages, Chat) else Chat(messages=read_messages(messages))


def read_messages(messages: str | Sequence[Message | Mapping[str, str]]) -> tuple[Message, ...]:
    """Validate messages; a text alone is one turn of the user.

    Raises:
        InvalidRequest: no message, more than MAX_CHAT_MESSAGES, or an invalid one; `field` has its index.
    """
    if isinstance(messages, str):
        return (Message(role="user", content=messages),)
    _require_some_messages(len(messages))
    return tuple(_read_message(message, index) for index, message in enumerate(messages))


def _require_some_messages(number: int) -> None:
    require(number > 0, "messages", "must not be empty")
    rule = f"has {number} messages; the limit is {MAX_CHAT_MESSAGES}"
    require(number <= MAX_CHAT_MESSAGES, "messages", rule)


def _read_message(message: Message | Mapping[str, str], index: int) -> Message:
    if isinstance(message, Message):
        return message
    place = f"messages[{index}]"
    require({"role", "content"} <= set(message), place, "must have the keys role and content")
    for key in message:
        known = key in ("role", "content", "reasoning_content")
        require(known, place, f"has the unknown key {str(key)[:64]!r}")
    try:
        return Message(**message)  # type: ignore[arg-type]  # it checks
    except InvalidRequest as error:
        raise InvalidRequest(f"{place}.{error.message}", field=f"{place}.{error.field}") from None


# One prompt or several, as texts or as token ids, for `/v1/completions` and `complete`.
Prompts: TypeAlias = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]


def read_prompts(prompts: Prompts) -> list[str] | list[list[int]]:
    """Return the prompts as a list of texts or of lists of token ids.

    Raises:
        InvalidRequest: no prompt, or one of another type; `field` is `prompt`.
    """
    items: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
    if items and all(_is_id(item) for item in items):
        items = [items]
    require(bool(items), "prompt", "is empty")
    if all(isinstance(item, str) for item in items):
        return items
    are_ids = all(isinstance(item, Sequence) and all(map(_is_id, item)) for item in items)
    require(are_ids, "prompt", "must be text, token ids, or a list of texts or of lists of token ids")
    return [list(item) for item in items]


def _is_id(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)
