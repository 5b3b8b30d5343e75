"""Text engine: the interface of a text model's engine, which runs in this process or in another one."""

from __future__ import annotations

from typing import Protocol

from genserve.engine.generation_request import GenerationRequest, OutputSink
from genserve.engine.input_queue import Reservation
from genserve.request_context import NO_KEY, KeyShare


class TextEngine(Protocol):
    """Generates the answers to requests. Its methods are safe from any thread.

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
        """Whether the engine was seen to hang."""

    @property
    def num_accepted(self) -> int:
        """Sequences and logits requests that have not ended, waiting ones included."""

    @property
    def num_running(self) -> int:
        """Sequences and logits requests that run; the others wait."""

    @property
    def num_preparing(self) -> int:
        """Slots reserved for requests whose prompts are being prepared."""

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
    def num_free(self) -> int | None:
        """How many more requests with a short prompt it would accept now; None: it is not known."""

    @property
    def seconds_per_slot(self) -> float | None:
        """The time in which it can accept one more while it is full; None: it is not known."""

    @property
    def now_s(self) -> float:
        """The time of its clock, to which deadlines refer."""

    def reserve(
        self, count: int, *, priority: int = 0, share: KeyShare = NO_KEY, is_resumed: bool = False
    ) -> Reservation:
        """Keep slots for a request while its prompts are prepared; see `InputQueue.reserve`."""

    def submit(
        self, *requests: GenerationRequest, sink: OutputSink, reservation: Reservation | None = None
    ) -> None:
        """Accept requests that belong together, all of them or none; see `InputQueue.submit`.

        Not for an event loop: an engine in this process makes token sequences, which may compile a grammar
        and run the code of plug-ins. Outputs may come before it returns.

        Raises:
            InvalidRequest, ModelFailed: a plug-in rejects the request, or fails.
            NotResumable: an answer cannot begin with the tokens received of it.
            Closed, ModelNotReady, Overloaded: see `InputQueue.submit`.
        """

    def cancel(self, request: GenerationRequest) -> None:
        """Drop the choices of a request that have not ended."""

    def end_reasoning(self, request: GenerationRequest) -> None:
        """End the reasoning of a request's open choices at their next token, or as soon as it begins."""

    def drain(self, *, timeout_s: float) -> None:
        """Wait until every accepted request has ended, at most `timeout_s`."""

    def close(self) -> None:
        """End all requests with `Closed`; a second call does nothing."""
