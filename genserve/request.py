"""Request: what a caller asks of generation, and what comes back.

The small frozen records that every face (HTTP, SDK, command line, decoding loop) shares.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, TypeAlias, get_args

from genserve.errors import InvalidRequest, StreamBroken

__all__ = [
    "COMPLETION_TOKENS",
    "MAX_CHAT_MESSAGES",
    "Chat",
    "Completion",
    "Delta",
    "FinishReason",
    "Message",
    "Messages",
    "Prompt",
    "Prompts",
    "Role",
    "StopReason",
    "TokenLogprob",
    "TopTokens",
    "Usage",
    "join_choices",
    "join_deltas",
    "likeliest",
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


class FinishReason(StrEnum):
    """Why the text of a request ended."""

    END_OF_SEQUENCE = "eos_token"     # the model said so, or one of `stop_token_ids` did
    STOP_STRING = "stop_sequence"     # one of `stop` appeared
    LENGTH = "length"                 # `max_tokens`, the end of the context, or the deadline
    REPETITION = "repetition"         # it went round in circles, as `repetition_detection` has it


# Which stop it was: the stop string, the id out of `stop_token_ids`, or a word for another rule.
StopReason: TypeAlias = str | int


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens counted for one request."""

    prompt_tokens: int
    completion_tokens: int
    # Of the prompt: not computed, since they lay in the KV cache. Says nothing of the answer: not compared.
    cached_tokens: int = field(default=0, compare=False)


# Ids of the most likely tokens and their log-probabilities, natural logs, the best first.
TopTokens: TypeAlias = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """How likely a token was after those before it, and which would have been the most likely."""

    logprob: float                              # natural log
    top: TopTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one step adds to the answer of a request; a stream is a row of these.

    The last one of a choice, and only the last one, has a `finish_reason` and a `usage`.
    """

    text: str                                   # whole characters; may be empty while some are held back
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()            # natural log, one per token id; nan: a loop's own pick
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    top_logprobs: tuple[TopTokens, ...] = ()    # one per token id, if asked for; empty: a loop's own pick
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the prompt's tokens but the first; in the first delta
    stop_reason: StopReason | None = None       # beside the finish_reason: what ended the text
    choice: int = 0                             # which of the request's answers, where it has several


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The whole answer to a request."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    logprobs: tuple[float, ...] = ()            # natural log, one per token id; empty if not asked for
    top_logprobs: tuple[TopTokens, ...] = ()    # one per token id; empty if not asked for
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the prompt's tokens but the first, if asked for
    stop_reason: StopReason | None = None       # what ended the text, where a request has a name for it
    prompt_token_ids: tuple[int, ...] = ()      # of `complete` alone


def join_deltas(deltas: Iterable[Delta]) -> Completion:
    """Join the deltas of a whole stream.

    Raises:
        StreamBroken: the last one does not finish the answer.
    """
    parts = list(deltas)
    last = parts[-1] if parts else None
    if last is None or last.finish_reason is None or last.usage is None:
        raise StreamBroken("the answer ended before its last part")
    return Completion(
        text="".join(delta.text for delta in parts),
        token_ids=tuple(token_id for delta in parts for token_id in delta.token_ids),
        logprobs=tuple(logprob for delta in parts for logprob in delta.logprobs),
        top_logprobs=tuple(top for delta in parts for top in delta.top_logprobs),
        prompt_logprobs=tuple(logprob for delta in parts for logprob in delta.prompt_logprobs),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        usage=last.usage,
    )


def join_choices(deltas: Iterable[Delta]) -> tuple[Completion, ...]:
    """Join the deltas of a whole stream of several answers; they come in the order of their numbers.

    Raises:
        StreamBroken: the last delta of an answer does not finish it.
    """
    by_choice: defaultdict[int, list[Delta]] = defaultdict(list)
    for delta in deltas:
        by_choice[delta.choice].append(delta)
    return tuple(join_deltas(by_choice[choice]) for choice in sorted(by_choice))


def likeliest(completions: Sequence[Completion]) -> list[int]:
    """Return the places of the answers, the one with the highest mean log-probability of its tokens first.

    One whose decoding loop picked a token by itself, of which no probability is known, comes last.
    """
    means = [_mean(completion.logprobs) for completion in completions]
    return sorted(range(len(means)), key=lambda place: -means[place])


def _mean(logprobs: Sequence[float]) -> float:
    mean = math.fsum(logprobs) / len(logprobs) if logprobs else -math.inf
    return -math.inf if math.isnan(mean) else mean


def _require(holds: bool, field: str, rule: str) -> None:  # noqa: FBT001  # reads as a sentence
    if not holds:
        raise InvalidRequest(f"{field} {rule}", field=field)
