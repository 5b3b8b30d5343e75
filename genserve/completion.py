"""Completion: the answer of a text model, whole or as a stream of deltas."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, Self, TypeAlias

from genserve.errors import StreamBroken
from genserve.prompt import ToolCall

# The stop string, the id out of `stop_token_ids`, or the name of another stop rule.
StopReason: TypeAlias = str | int
# Ids of the likeliest tokens with their log-probabilities (natural logarithm), the likeliest first.
TopTokens: TypeAlias = tuple[tuple[int, float], ...]


class FinishReason(StrEnum):
    """Why the text of a request ended."""

    END_OF_SEQUENCE = "eos_token"     # an end-of-sequence token, or one of `stop_token_ids`
    STOP_STRING = "stop_sequence"     # one of `stop`
    LENGTH = "length"                 # `max_tokens`, the context length, or the deadline
    REPETITION = "repetition"         # a loop, found by `repetition_detection`


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The number of tokens of one request."""

    prompt_tokens: int
    completion_tokens: int
    # Tokens of the prompt that were in the prefix cache. Not compared: the answer does not depend on it.
    cached_tokens: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """The log-probability of a token given the tokens before it, and the likeliest tokens in its place."""

    logprob: float                              # natural log
    top: TopTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """The new part of a tool call. The first one of a call has its id and name."""

    index: int              # of the call in the answer
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
    # Natural logarithms, one per token id; nan for a token that a decoding loop picked without logits.
    logprobs: tuple[float, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    top_logprobs: tuple[TopTokens, ...] = ()    # one per token id, if requested
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the prompt from its second token; in the first delta
    stop_reason: StopReason | None = None       # details of the finish_reason
    choice: int = 0                             # the index of the answer, in a request with several
    tool_calls: tuple[ToolCallDelta, ...] = ()  # from `chat_stream` with tools; not part of the text


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The whole answer to a request."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    logprobs: tuple[float, ...] = ()            # natural logarithm, one per token id, if requested
    top_logprobs: tuple[TopTokens, ...] = ()    # one per token id, if requested
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the prompt from its second token, if requested
    stop_reason: StopReason | None = None       # details of the finish_reason
    prompt_token_ids: tuple[int, ...] = ()      # from `complete` only
    tool_calls: tuple[ToolCall, ...] = ()       # from `chat` with tools; not part of the text


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
