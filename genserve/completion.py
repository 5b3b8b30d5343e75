"""Completion: the answer of a text model, whole or as a stream of deltas."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, Self, TypeAlias

from genserve.errors import StreamBroken

__all__ = [
    "Completion",
    "Delta",
    "FinishReason",
    "StopReason",
    "Stream",
    "TokenLogprob",
    "TopTokens",
    "Usage",
    "join_choices",
    "join_deltas",
    "likeliest",
]


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


class _Deltas(Protocol):
    """What a stream reads from: a generator, or an engine's stream."""

    def __next__(self) -> Delta: ...

    def close(self) -> None: ...


class Stream:
    """The deltas of one answer; close it, or use it as a context manager, to stop the answer early.

    What was read is kept, so that `final` can be asked at any point. For one thread.
    """

    def __init__(self, deltas: _Deltas) -> None:
        self._deltas = deltas
        self._read: list[Delta] = []

    @property
    def text_stream(self) -> Iterator[str]:
        """The texts alone, as they come; empty ones are left out."""
        return (delta.text for delta in self if delta.text)

    def final(self) -> Completion:
        """Read what is still to come, and return the whole answer.

        Raises:
            StreamBroken: the stream was closed, or broke, before its last delta.
        """
        for _ in self:
            pass
        return join_deltas(self._read)

    def close(self) -> None:
        """Stop the answer, and free what it holds. A second call does nothing."""
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
