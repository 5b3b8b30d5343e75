"""Request context: what the server learns about one request, for its log line, its span and its API key."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from genserve.completion import ABORT, ERROR, Timings
from genserve.errors import GenserveError, drop_frames


class LogLevels(NamedTuple):
    """The levels of a request's line when it has ended; a generation or a change that succeeds is INFO."""

    success: int = logging.INFO
    failure: int = logging.WARNING


DEFAULT_LEVELS = LogLevels()


class KeyShare(NamedTuple):
    """An API key's share of an engine: keys that compete get tokens in proportion to their weights."""

    name: str = ""          # empty: requests without a key, which share one
    weight: float = 1.0


NO_KEY = KeyShare()
VERBOSE = LogLevels(success=logging.DEBUG)
MAY_FAIL = LogLevels(success=logging.DEBUG, failure=logging.DEBUG)


class LoggedAnswer(Protocol):
    """The facts about a generated answer; an `AnswerRecord` has them."""

    @property
    def num_prompt_tokens(self) -> int:
        """The number of tokens of its prompt."""

    @property
    def num_cached_tokens(self) -> int:
        """How many of these were in the prefix cache."""

    @property
    def num_new_tokens(self) -> int:
        """The number of tokens generated so far."""

    @property
    def finish_reason(self) -> str | None:
        """Why it ended; None: it still runs."""

    @property
    def timings(self) -> Timings | None:
        """How long its parts took, so far; None: it is not known."""

    @property
    def first_token_s(self) -> float | None:
        """When its first token was generated, `time.monotonic()`; None: it has none."""

    @property
    def last_token_s(self) -> float | None:
        """When its last token so far was generated, `time.monotonic()`; None: it has none."""


class LoggedSpan(Protocol):
    """The span of a request for a collector of traces."""

    def end(self, request: RequestContext) -> None:
        """Send the facts about the request, which has ended."""


class Use(Protocol):
    """The use of something that stays as it is until the use ends."""

    def end(self) -> None:
        """End it."""


@dataclass(slots=True, kw_only=True, eq=False)
class RequestContext:
    """The facts about one request, to which each part of the server adds what it learns.

    Attributes:
        id: the `X-Request-Id`, or the id of a KServe request; may be empty.
        client: the address of a gRPC client, as gRPC writes it.
        started_s: when the request arrived, `time.monotonic()`.
        uses: its uses of models by their names, which stay loaded until it has ended.
        model: the requested model, as the client wrote it, or the chosen one.
        answers: the answers that are generated for it, those to one prompt together.
        num_choices: how many answers each prompt has.
        key: its API key.
        controls: whether it changes the server, or tries to.
        change: the details of the change.
        left_out: the places and types of its tools and messages that the model does not see.
        error: the error that it was rejected or failed with.
        field: the field that is invalid, as far as its names are the server's, not the client's.
        operation: OpenTelemetry's word for what a model does: `chat`, `text_completion`, `embeddings`; empty:
            nothing.
        streams: whether the answer is a stream.
        span: ended with the request; None: the server sends no spans.
        levels: the levels of its log line.
        load_s: how long it has waited for its models to be loaded, seconds.
        receive: returns the next ASGI message of its client, after the body that it has disconnected; None: a
            call over gRPC, which is cancelled then.
    """

    id: str
    client: str = ""
    started_s: float = field(default_factory=time.monotonic)
    uses: dict[str, Use] = field(default_factory=dict)
    model: str = ""
    answers: Sequence[LoggedAnswer] = ()
    num_choices: int = 1
    key: KeyShare = NO_KEY
    controls: bool = False
    change: str = ""
    left_out: str = ""
    error: GenserveError | None = None
    field: str = ""
    operation: str = ""
    streams: bool = False
    span: LoggedSpan | None = None
    levels: LogLevels = DEFAULT_LEVELS
    load_s: float = 0.0
    receive: Callable[[], Awaitable[Any]] | None = None

    def end_uses(self) -> None:
        """End the uses of models; a second call does nothing."""
        while self.uses:
            self.uses.popitem()[1].end()

    def fail(self, error: GenserveError) -> None:
        """Record the error that it was rejected or failed with, without its frames, which hold this."""
        self.error = error
        drop_frames(error)

    def finish_reasons(self) -> list[str]:
        """Return why each answer ended, in the words of the metric `genserve_requests_total`."""
        other = ABORT if self.error is None else ERROR
        return [answer.finish_reason or other for answer in self.answers]

    @property
    def prompt_tokens(self) -> int:
        """The tokens of all prompts together."""
        return sum(answer.num_prompt_tokens for answer in self._first_answers)

    @property
    def cached_tokens(self) -> int:
        """How many of them were found in the prefix cache; tokens that its own choices share do not count."""
        return sum(answer.num_cached_tokens for answer in self._first_answers)

    @property
    def completion_tokens(self) -> int:
        """The tokens of all answers together."""
        return sum(answer.num_new_tokens for answer in self.answers)

    @property
    def _first_answers(self) -> Sequence[LoggedAnswer]:
        return self.answers[:: self.num_choices]

    def tokens_per_s(self) -> float | None:
        """Return the tokens of all answers per second after the first one; None: there is no second one."""
        firsts_s = [answer.first_token_s for answer in self.answers if answer.first_token_s is not None]
        lasts_s = [answer.last_token_s for answer in self.answers if answer.last_token_s is not None]
        seconds = max(lasts_s, default=0.0) - min(firsts_s, default=0.0)
        return (self.completion_tokens - len(firsts_s)) / seconds if seconds else None

    def timings(self) -> Timings | None:
        """Return the longest times of the answers, and their drafted tokens together; None: not known."""
        known = [timings for answer in self.answers if (timings := answer.timings) is not None]
        return Timings.of_all(known) if known else None

    def first_token_s(self) -> float | None:
        """Return the seconds from its arrival to its first token; None: it has none."""
        times = [answer.first_token_s for answer in self.answers if answer.first_token_s is not None]
        return min(times) - self.started_s if times else None


# The request that the code runs for. Tasks and worker threads inherit it, not the threads of models.
CURRENT_REQUEST: ContextVar[RequestContext | None] = ContextVar("current_request", default=None)


def current_request() -> RequestContext:
    """Return the request that the code runs for; code without one gets a new one, which nobody reads."""
    return CURRENT_REQUEST.get() or RequestContext(id="")
