"""Request: what a caller asks of generation, and what comes back.

The small frozen records that every face (HTTP, SDK, command line, decoding loop) shares.
"""

from __future__ import annotations

import difflib
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Literal, TypeAlias, TypedDict, get_args

from genserve.errors import InvalidRequest, StreamBroken

__all__ = [
    "MAX_TOP_LOGPROBS",
    "Completion",
    "Delta",
    "FinishReason",
    "Message",
    "Prompt",
    "Role",
    "SamplingOptions",
    "SamplingParams",
    "TokenLogprob",
    "TopTokens",
    "Usage",
    "join_choices",
    "join_deltas",
    "read_messages",
    "sampling_params",
]

Role = Literal["system", "user", "assistant"]

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_CACHE_SALT_CHARS = 256
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a chat.

    Raises:
        InvalidRequest: an unknown role, or content that is not text.
    """

    role: Role
    content: str

    def __post_init__(self) -> None:
        _require(self.role in get_args(Role), "role", f"must be one of {', '.join(get_args(Role))}")
        _require(isinstance(self.content, str), "content", "must be text")


# A text, its token ids, or a chat.
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to pick tokens and when to stop; checked once, when it is made.

    Raises:
        InvalidRequest: a value is out of range; `field` is the name of the parameter.
    """

    max_tokens: int | None = None           # generated tokens only; None: all the room the context leaves
    temperature: float = 0.0                # 0: greedy, ties go to the lowest id
    top_k: int = 0                          # keep the k best tokens; 0: all
    top_p: float = 1.0                      # keep the smallest set that reaches this probability; 1: all
    stop: tuple[str, ...] = ()              # the text ends before the first of these
    stop_token_ids: tuple[int, ...] = ()    # ends the text like the end-of-sequence token does
    ignore_eos: bool = False                # go on after the end-of-sequence token (for benchmarks)
    seed: int | None = None                 # same seed, same text, whatever else runs; None: a fresh one
    logprobs: bool = False                  # report the log-probability of each picked token
    top_logprobs: int = 0                   # beside it, those of so many of the most likely ones
    prompt_logprobs: int | None = None      # the same for each token of the prompt; None: nothing
    cache_salt: str | None = None           # who has the same one shares cached prefixes, nobody else

    def __post_init__(self) -> None:
        for name in ("max_tokens", "top_k", "seed"):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            _require(whole or (value is None and name != "top_k"), name, "must be a whole number")
        for name in ("temperature", "top_p"):
            _require(isinstance(getattr(self, name), int | float), name, "must be a number")
        _require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "must be at least 1")
        _require(
            math.isfinite(self.temperature) and 0.0 <= self.temperature <= 100.0,
            "temperature",
            "must be between 0 and 100",
        )
        _require(0 <= self.top_k < 2**31, "top_k", "must be between 0 (off) and 2^31 - 1")
        _require(0.0 < self.top_p <= 1.0, "top_p", "must be above 0 and at most 1")
        _require(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"takes at most {MAX_STOP_STRINGS} strings")
        for index, text in enumerate(self.stop):
            _require(
                isinstance(text, str) and 0 < len(text) <= MAX_STOP_STRING_CHARS,
                f"stop[{index}]",
                f"must have 1 to {MAX_STOP_STRING_CHARS} characters",
            )
        _require(
            len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
            "stop_token_ids",
            f"takes at most {MAX_STOP_TOKEN_IDS} ids",
        )
        _require(
            all(isinstance(i, int) and i >= 0 for i in self.stop_token_ids),
            "stop_token_ids",
            "must be whole numbers, 0 or more",
        )
        _require(
            self.seed is None or 0 <= self.seed < 2**64, "seed", "must be between 0 and 2^64 - 1"
        )
        for name, number in (("top_logprobs", self.top_logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            whole = isinstance(number, int) and not isinstance(number, bool)
            allowed = whole and 0 <= (number or 0) <= MAX_TOP_LOGPROBS
            _require(
                allowed or (number is None and name == "prompt_logprobs"),
                name,
                f"must be between 0 and {MAX_TOP_LOGPROBS}",
            )
        _require(self.logprobs or not self.top_logprobs, "top_logprobs", "needs logprobs")
        salt = self.cache_salt
        _require(
            salt is None or (isinstance(salt, str) and 0 < len(salt) <= MAX_CACHE_SALT_CHARS),
            "cache_salt",
            f"must have 1 to {MAX_CACHE_SALT_CHARS} characters",
        )


class SamplingOptions(TypedDict, total=False):
    """The keyword arguments of `LLM` and of the clients: `SamplingParams`, taken loosely."""

    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool
    seed: int | None
    logprobs: bool
    top_logprobs: int
    prompt_logprobs: int | None
    cache_salt: str | None


def sampling_params(options: Mapping[str, Any]) -> SamplingParams:
    """Make parameters from loose options; `stop` may be one string.

    Raises:
        InvalidRequest: an unknown name, with the nearest known one, or a value out of range.
    """
    known = [option.name for option in fields(SamplingParams)]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise InvalidRequest(f"there is no sampling parameter {name!r}", field=name, remedy=remedy)
    values = dict(options)
    stop = values.get("stop") or ()
    _require(isinstance(stop, Iterable), "stop", "must be text, or a list of texts")
    values["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    stop_token_ids = values.get("stop_token_ids") or ()
    _require(isinstance(stop_token_ids, Iterable), "stop_token_ids", "must be a list of whole numbers")
    values["stop_token_ids"] = tuple(stop_token_ids)
    return SamplingParams(**values)


def read_messages(messages: str | Sequence[Message | Mapping[str, str]]) -> tuple[Message, ...]:
    """Make messages from loose ones: a text alone is one turn of the user.

    Raises:
        InvalidRequest: none at all, or one whose keys are not role and content, or are wrong; `field`
            has its index.
    """
    if isinstance(messages, str):
        return (Message(role="user", content=messages),)
    _require(len(messages) > 0, "messages", "must not be empty")
    return tuple(_read_message(message, index) for index, message in enumerate(messages))


def _read_message(message: Message | Mapping[str, str], index: int) -> Message:
    if isinstance(message, Message):
        return message
    place = f"messages[{index}]"
    _require(set(message) == {"role", "content"}, place, "must have the keys role and content")
    try:
        return Message(role=message["role"], content=message["content"])  # type: ignore[arg-type]  # it checks
    except InvalidRequest as error:
        raise InvalidRequest(f"{place}.{error.message}", field=f"{place}.{error.field}") from None


class FinishReason(StrEnum):
    """Why the text of a request ended."""

    END_OF_SEQUENCE = "eos_token"     # the model said so, or one of `stop_token_ids` did
    STOP_STRING = "stop_sequence"     # one of `stop` appeared
    LENGTH = "length"                 # `max_tokens`, or the end of the context


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


def _require(holds: bool, field: str, rule: str) -> None:  # noqa: FBT001  # reads as a sentence
    if not holds:
        raise InvalidRequest(f"{field} {rule}", field=field)
