"""Completion: the answer of a text model, whole or as a stream of deltas."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, Self, TypeAlias

from genserve.errors import DeadlineExceeded, StreamBroken
from genserve.prompt import ToolCall

# The stop string, the id out of `stop_token_ids`, or the name of another stop rule.
StopReason: TypeAlias = str | int
DEADLINE = "deadline"       # `max_time_ms` has passed
# Ids of the likeliest tokens with their log-probabilities (natural logarithm), the likeliest first.
TopTokens: TypeAlias = tuple[tuple[int, float], ...]


class FinishReason(StrEnum):
    """Why the text of a request ended, in vLLM's and OpenAI's words; `stop_reason` tells what stopped it."""

    STOP = "stop"               # an end-of-sequence token, one of `stop_token_ids`, a stop string or rule
    LENGTH = "length"           # `max_tokens`, the context length, or the deadline
    REPETITION = "repetition"   # a loop, found by `repetition_detection`


# vLLM's words in logs and metrics for an answer without a finish reason.
ABORT = "abort"     # the client disconnected
ERROR = "error"     # the request failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """How long the parts of one answer took, in seconds, and what became of its drafted tokens."""

    queue_s: float              # from the request's arrival to the first step
    prefill_s: float            # from the first step to the first token
    decode_s: float             # from the first token to the last
    drafted_tokens: int = 0     # that speculation proposed
    accepted_tokens: int = 0    # how many of these are in the answer

    @classmethod
    def of_all(cls, answers: Sequence[Timings]) -> Timings:
        """Return the timings of answers that are generated together: the longest times, and all drafts."""
        if len(answers) == 1:
            return answers[0]
        return cls(
            queue_s=max(one.queue_s for one in answers),
            prefill_s=max(one.prefill_s for one in answers),
            decode_s=max(one.decode_s for one in answers),
            drafted_tokens=sum(one.drafted_tokens for one in answers),
            accepted_tokens=sum(one.accepted_tokens for one in answers),
        )


class CacheMatchEnd(StrEnum):
    """Why the prefix cache had no more of a prompt."""

    DIFFERENT = "different"     # cached prompts go on with other tokens
    UNKNOWN = "unknown"         # no cached prompt goes on: none was longer, or what followed was evicted
    COMPLETE = "complete"       # it had all of the prompt, whose last token is always computed
    OFF = "off"                 # the request, or the model, does not read the cache


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheMatch:
    """How far a prompt was the same as one in the prefix cache, and what was different there."""

    matched_tokens: int         # the tokens before the first that differs; whole blocks of them were used
    end: CacheMatchEnd
    prompt_token_ids: tuple[int, ...] = ()      # of the prompt, from there
    # The tokens of the cached prompt that has most in common, from there. Empty: no prompt goes on there, or
    # only prompts of other API keys do.
    cached_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The number of tokens of one request, and the time that they took."""

    prompt_tokens: int
    completion_tokens: int
    # The rest is not compared: the answer does not depend on it.
    cached_tokens: int = field(default=0, compare=False)    # of the prompt, found in the prefix cache
    # None: not known, because the server does not say, or because several replicas generated the answer.
    timings: Timings | None = field(default=None, compare=False)
    cache_match: CacheMatch | None = field(default=None, compare=False)     # with `return_cache_match`
    receipt: Mapping[str, Any] | None = field(default=None, compare=False)  # with `return_receipt`, as JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """The log-probability of a token given the tokens before it, and the likeliest tokens in its place."""

    logprob: float                              # natural log
    top: TopTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """The new part of a tool call. The first one of a call has its id and name."""

    index: int              # the number of the call in the answer
    arguments: str = ""     # the JSON text that is added to the arguments
    id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageDelta:
    """The new part of an answer, by the fields of its message."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """The new part of an answer; a stream consists of these.

    Only the last delta of a choice has a `finish_reason` and a `usage`.
    """

    text: str                                   # whole characters; empty while some are held back
    token_ids: tuple[int, ...]
    # Natural logarithms, one per token id; nan for a token that a decoding loop chose itself, unless it is
    # among those in `top_logprobs`.
    logprobs: tuple[float, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    top_logprobs: tuple[TopTokens, ...] = ()    # one per token id, if requested
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # from the second token; in the first delta
    stop_reason: StopReason | None = None       # details of the finish_reason
    choice: int = 0                             # the index of the answer, in a request with several
    tool_calls: tuple[ToolCallDelta, ...] = ()  # from `chat_stream` with tools; not part of the text
    # In the first delta, what `usage.cached_tokens` is in the last one.
    cached_tokens: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptProgress(Delta):
    """How much of the prompt has been read: a delta without text, before the first token, on request.

    Its `cached_tokens` are those of the prompt that were in the prefix cache.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    prompt_tokens: int
    read_tokens: int        # of the prompt, including the cached ones
    seconds: float          # since the first step


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The whole answer to a request."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    logprobs: tuple[float, ...] = ()            # natural logarithm, one per token id, if requested
    top_logprobs: tuple[TopTokens, ...] = ()    # one per token id, if requested
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # from the second token, if requested
    stop_reason: StopReason | None = None       # details of the finish_reason
    prompt_token_ids: tuple[int, ...] = ()      # from `complete` only
    tool_calls: tuple[ToolCall, ...] = ()       # from `chat` with tools; not part of the text


def ends_with_stop_string(part: Delta | Completion) -> bool:
    """Whether a stop string or a stop rule ended the text, not a token; some dialects tell these apart."""
    return part.finish_reason is FinishReason.STOP and isinstance(part.stop_reason, str)


def join_deltas(deltas: Iterable[Delta]) -> Completion:
    """Join the deltas of a whole stream.

    Raises:
        StreamBroken: the last delta has no finish reason.
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
        tool_calls=joined_calls(call for delta in parts for call in delta.tool_calls),
    )


def joined_calls(deltas: Iterable[ToolCallDelta]) -> tuple[ToolCall, ...]:
    """Join the deltas of an answer's tool calls."""
    begun: dict[int, list[ToolCallDelta]] = {}
    for delta in deltas:
        begun.setdefault(delta.index, []).append(delta)
    return tuple(
        ToolCall(id=parts[0].id, name=parts[0].name, arguments="".join(part.arguments for part in parts))
        for parts in begun.values()
    )


def join_choices(deltas: Iterable[Delta]) -> tuple[Completion, ...]:
    """Join the deltas of a whole stream of several answers; returns the answers by their index.

    Raises:
        StreamBroken: the last delta of an answer has no finish reason.
    """
    by_choice: defaultdict[int, list[Delta]] = defaultdict(list)
    for delta in deltas:
        by_choice[delta.choice].append(delta)
    return tuple(join_deltas(by_choice[choice]) for choice in sorted(by_choice))


def likeliest(completions: Sequence[Completion]) -> list[int]:
    """Return the indices of the answers by the mean log-probability of their tokens, the highest first.

    An answer with a token of unknown probability comes last.
    """
    means = [_mean(completion.logprobs) for completion in completions]
    return sorted(range(len(means)), key=lambda index: -means[index])


def _mean(logprobs: Sequence[float]) -> float:
    mean = math.fsum(logprobs) / len(logprobs) if logprobs else -math.inf
    return -math.inf if math.isnan(mean) else mean


def require_tokens(ended: Iterable[Delta | Completion]) -> None:
    """Check that the answers to a request are not all empty because its deadline has passed.

    Args:
        ended: the answers, or the last delta of each.

    Raises:
        DeadlineExceeded: they are.
    """
    if all(
        part.stop_reason == DEADLINE and part.usage is not None and not part.usage.completion_tokens
        for part in ended
    ):
        raise DeadlineExceeded(
            "the request's deadline passed before its first token",
            remedy="raise max_time_ms, or try again when the server has less to do",
        )


class _Deltas(Protocol):
    """A generator of deltas, or the stream of an engine."""

    def __next__(self) -> Delta: ...

    def close(self) -> None: ...


class Stream:
    """An iterator over the deltas of one answer, for one thread.

    Close it, or use it as a context manager, to stop the answer early. It keeps the deltas that were read, so
    `final` can be called at any point.
    """

    def __init__(self, deltas: _Deltas) -> None:
        self._deltas = deltas
        self._read: list[Delta] = []

    @property
    def text_stream(self) -> Iterator[str]:
        """The texts of the deltas that have any."""
        return (delta.text for delta in self if delta.text)

    def final(self) -> Completion:
        """Read the remaining deltas and return the whole answer.

        Raises:
            StreamBroken: the stream was closed, or broke, before its last delta.
        """
        for _ in self:
            pass
        return join_deltas(self._read)

    def close(self) -> None:
        """Stop the answer and free its resources. A second call does nothing."""
        self._deltas.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        delta = next(self._deltas)
        self._read.append(delta)
        return delta

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()
