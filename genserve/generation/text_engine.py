"""Text engine: the interface of a text model's engine, which runs in this process or in another one."""

from __future__ import annotations

from typing import Protocol

from genserve.generation.engine_request import Request, TokenSequence
from genserve.generation.request_inbox import OutputSink, Reservation


class TextEngine(Protocol):
    """Generates the answers of token sequences. Its methods are safe from any thread.

    `EngineThread` is one; `RemoteEngine` asks the replicas of a deployment.
    """

    @property
    def alive(self) -> bool:
        """Whether it has not been closed, and has not failed."""

    @property
    def ready(self) -> bool:
        """Whether it goes on with its requests if it has any."""

    @property
    def stalled(self) -> bool:
        """Whether it was seen to hang."""

    @property
    def num_accepted(self) -> int:
        """Requests that have not ended."""

    @property
    def num_running(self) -> int:
        """How many of them run; the others wait."""

    @property
    def num_preparing(self) -> int:
        """Places reserved for requests whose prompts are being prepared."""

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of the sequences that wait for their first step."""

    @property
    def cache_usage(self) -> float:
        """Share of the KV cache that running requests hold, 0 to 1."""

    @property
    def capacity(self) -> int:
        """How many sequences one request can have."""

    @property
    def now_s(self) -> float:
        """The time of its clock, to which deadlines refer."""

    def max_tokens_per_sequence(self, num_sequences: int) -> int:
        """Return up to which length `num_sequences` sequences always fit into the KV cache together."""

    def reserve(self, count: int, *, priority: int = 0, is_resumed: bool = False) -> Reservation:
        """Keep places for a request while its prompts are prepared; see `RequestInbox.reserve`."""

    def submit(
        self, *sequences: TokenSequence, sink: OutputSink, reservation: Reservation | None = None
    ) -> None:
        """Accept the token sequences of a request, all of them or none; see `RequestInbox.submit`."""

    def cancel(self, request: Request) -> None:
        """Drop a token sequence; does nothing if it has ended."""

    def drain(self, *, timeout_s: float) -> None:
        """Wait until every accepted request has ended, at most `timeout_s`."""

    def close(self) -> None:
        """End all requests with `Closed`; a second call does nothing."""
