"""Answers: what the load generator records about each request, and about a whole load."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a request has no complete answer."""

    # "connection", "tls", "timeout", "http_429", "stream_cut", "invalid_event" or "error_event"
    kind: str
    message: str


@dataclass(slots=True, kw_only=True)
class Answer:
    """One request and its answer, which grows while it streams. Times come from `time.perf_counter`."""

    sent_s: float                       # when the request was sent; when repeated, the last time
    end_s: float = 0.0                  # the last event, or the failure
    text_times_s: list[float] = field(default_factory=list)         # when each chunk with text arrived
    prompt_tokens: int | None = None    # as the server counts them; None: the server does not count them
    output_tokens: int | None = None
    rejections_s: list[float] = field(default_factory=list)         # how long each rejection took
    is_complete: bool = False
    failure: Failure | None = None

    @property
    def num_tokens(self) -> int:
        """The new tokens: the server's count, or else the chunks with text."""
        return len(self.text_times_s) if self.output_tokens is None else self.output_tokens

    @property
    def first_text_s(self) -> float | None:
        """Seconds until the first chunk with text; None: there was none."""
        return self.text_times_s[0] - self.sent_s if self.text_times_s else None

    @property
    def latency_s(self) -> float:
        """Seconds until the last event."""
        return self.end_s - self.sent_s

    @property
    def time_per_output_token_s(self) -> float | None:
        """Seconds per token after the first; None: the answer has at most one token, or no text."""
        if not self.text_times_s or self.num_tokens < 2:
            return None
        return (self.end_s - self.text_times_s[0]) / (self.num_tokens - 1)


@dataclass(slots=True, kw_only=True)
class LoadResult:
    """The answers of a load, in the order in which the requests were sent; it grows while the load runs."""

    started_s: float = 0.0
    elapsed_s: float = 0.0
    cpu_s: float = 0.0                  # CPU time of this process, the load generator
    answers: list[Answer] = field(default_factory=list)

    def complete(self) -> list[Answer]:
        """Return the complete answers."""
        return [answer for answer in self.answers if answer.is_complete]

    def failures(self) -> list[Failure]:
        """Return the failures."""
        return [answer.failure for answer in self.answers if answer.failure is not None]

    def unfinished(self) -> list[Answer]:
        """Return the answers that the end of the load cut."""
        return [answer for answer in self.answers if not answer.is_complete and answer.failure is None]
