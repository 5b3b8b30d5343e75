"""Failover: the calls of a lost replica go on at another one, after the tokens that the client has."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from enum import StrEnum
from typing import Any

from genserve.completion import Delta
from genserve.deploy.replica.replica_load import ReplicaLoad
from genserve.deploy.replica_messages import (
    Broadcast,
    Call,
    InferenceItem,
    ReplicaSet,
)
from genserve.engine.generation_request import GenerationRequest
from genserve.errors import (
    Closed,
    GenserveError,
    ModelNotReady,
    NotResumable,
    Overloaded,
    ReplicaLost,
    VersionReplaced,
)
from genserve.generation_metrics import Metrics
from genserve.inference import InferenceRequest

logger = logging.getLogger(__name__)

# A request may be the cause of the loss, so at most so many more replicas get it.
MAX_FAILOVERS = 2
# An answer that has begun waits until another replica has room for it, or is ready. A call that no replica
# takes fails after two minutes (`routed_replicas.py`), so this is enough for a second one.
_RETRY_S = 0.5
_MAX_PAUSE_S = 180.0


class Outcome(StrEnum):
    """What becomes of a call whose replica is lost; the label of `genserve_interrupted_calls_total`."""

    RESUMED = "resumed"  # it goes on after the tokens that were sent
    RETRIED = "retried"  # nothing had been sent, so it begins again
    FAILED = "failed"  # its client gets an error


class Failover:
    """The replicas of one model, any of which may die at any time; a `ReplicaSet` over another one.

    An answer that a lost replica leaves incomplete is continued by another replica of the same identity with
    the same seed, so it is the one that would have come without the loss, and no part of it comes twice. No
    other version of the model continues it. An inference is repeated
    if it has no response yet and belongs to no sequence, whose state is lost. The lost replica may have
    executed it, so a model with effects besides its responses has them twice.

    A call fails with its third replica: what kills each one that it reaches must not end them all.
    """

    def __init__(
        self,
        replicas: ReplicaSet,
        *,
        name: str,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Call `replicas`, the replicas of the model `name`; `clock` and `sleep` are in seconds."""
        self._replicas = replicas
        self._name = name
        self._metrics = metrics
        self._clock = clock
        self._sleep = sleep
        for outcome in Outcome:  # or a rate would miss the first one
            metrics.interrupted_calls.labels(name, outcome.value)

    async def generate(self, call: Call[GenerationRequest]) -> AsyncIterator[Sequence[Delta]]:
        """See `ReplicaSet`.

        Raises:
            NotResumable: no other replica can continue the answer; see `engine/resumption.py`. Or none
                has the identity of the call any more.
            VersionReplaced: no replica has the identity of the call any more, and no answer has begun.
            ReplicaLost: too many replicas were lost.
            Overloaded, ModelNotReady: no replica takes the call; after the first token, for three minutes.
        """
        answers = _ReceivedAnswers(call)
        losses = self._losses(call.request.id)
        started_s = self._clock()
        while True:
            elapsed_s = self._clock() - started_s
            try:
                items = self._replicas.generate(answers.rest(elapsed_s))
                async with aclosing(items):  # type: ignore[type-var]
                    async for deltas in items:
                        losses.end()
                        answers.add(deltas)
                        yield deltas
            except NotResumable as error:
                losses.fail(error)
                raise
            except VersionReplaced as error:
                if not answers.num_tokens:
                    raise
                lost = _of_ended_version(self._name)
                losses.fail(lost)
                raise lost from error
            except (Overloaded, ModelNotReady) as error:
                if not answers.num_tokens:
                    raise
                if losses.pause_s >= _MAX_PAUSE_S:
                    losses.fail(error)
                    raise
                # All answers of a lost replica wait alike, and should not come back together.
                await self._sleep(_RETRY_S * random.uniform(0.5, 1.5))
            except (ReplicaLost, Closed) as error:
                if answers.are_complete:
                    return
                outcome = Outcome.RESUMED if answers.num_tokens else Outcome.RETRIED
                losses.begin(error, outcome, received=f"{answers.num_tokens} tokens")
            else:
                return

    async def infer(self, call: Call[InferenceRequest]) -> AsyncIterator[InferenceItem]:
        """See `ReplicaSet`.

        Raises:
            ReplicaLost: too many replicas were lost, or the inference cannot be repeated.
        """
        request = call.request
        losses = self._losses(request.id)
        num_responses = 0
        while True:
            try:
                items = self._replicas.infer(call)
                async with aclosing(items):  # type: ignore[type-var]
                    async for item in items:
                        losses.end()
                        num_responses += 1
                        yield item
            except (ReplicaLost, Closed) as error:
                if num_responses or request.correlation_id:
                    lost = self._unrepeatable(request, num_responses)
                    losses.fail(lost)
                    raise lost from error
                losses.begin(error, Outcome.RETRIED, received="no response")
            else:
                return

    def load(self, identity: str) -> ReplicaLoad:
        """See `ReplicaSet`."""
        return self._replicas.load(identity)

    async def broadcast(self, method: Broadcast) -> list[Any]:
        """See `ReplicaSet`."""
        return await self._replicas.broadcast(method)

    def _unrepeatable(self, request: InferenceRequest, num_responses: int) -> ReplicaLost:
        reason, remedy = f"{num_responses} of its responses have been sent", "send the request again"
        if request.correlation_id:
            reason = f"it had the state of sequence {request.correlation_id}"
            remedy = "start the sequence again"
        message = f"the replica of '{self._name}' died, and the request cannot be repeated: {reason}"
        return ReplicaLost(message, remedy=remedy)

    def _losses(self, request_id: str) -> _Losses:
        return _Losses(self._name, request_id, metrics=self._metrics, clock=self._clock)


def _of_ended_version(name: str) -> NotResumable:
    return NotResumable(
        f"the replica of '{name}' was lost, and the answer cannot be continued: all others have another "
        "version",
        remedy="send the request again",
    )


class _ReceivedAnswers:
    """What a client has received of the answers to a call."""

    def __init__(self, call: Call[GenerationRequest]) -> None:
        self._call = call
        request = call.request
        self._token_ids = [list(ids) for ids in request.resumed_token_ids] or [[] for _ in request.seeds]
        self._num_open = request.num_choices

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self._token_ids))

    @property
    def are_complete(self) -> bool:
        return not self._num_open

    def add(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            self._token_ids[delta.choice] += delta.token_ids
            self._num_open -= delta.finish_reason is not None

    def rest(self, elapsed_s: float) -> Call[GenerationRequest]:
        """Return the call for what is missing, the given time after it began."""
        received = self._token_ids if self.num_tokens else ()
        return replace(self._call, request=self._call.request.rest(elapsed_s=elapsed_s, received=received))


class _Losses:
    """The replicas that one call has lost."""

    def __init__(self, name: str, request_id: str, *, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._name = name
        self._extra = {"request_id": request_id or None}
        self._metrics = metrics
        self._clock = clock
        self._count = 0
        self._since_s: float | None = None  # when the last one was lost, until another one responds

    @property
    def pause_s(self) -> float:
        """For how long no replica has responded; infinite: none was lost."""
        return math.inf if self._since_s is None else self._clock() - self._since_s

    def begin(self, error: GenserveError, outcome: Outcome, *, received: str) -> None:
        """Record a loss after which the call goes on; raises ReplicaLost after too many."""
        self._count += 1
        if self._count > MAX_FAILOVERS:
            lost = ReplicaLost(
                f"{self._count} replicas of '{self._name}' died or stopped while they had the request",
                remedy="look into the logs of the replicas: the request may be the cause",
            )
            self.fail(lost)
            raise lost from error
        if self._since_s is None:
            self._since_s = self._clock()
        self._count_outcome(outcome)
        logger.warning(
            "the call of '%s' is %s at another replica, after %s: %s",
            self._name,
            outcome,
            received,
            error.message,
            extra=self._extra,
        )

    def end(self) -> None:
        """Record that a replica responds."""
        if self._since_s is not None:
            seconds, self._since_s = self._clock() - self._since_s, None
            self._metrics.interruption_seconds.labels(self._name).observe(seconds)

    def fail(self, error: GenserveError) -> None:
        """Record that the call fails with this error."""
        self._count_outcome(Outcome.FAILED)
        logger.error("the call of '%s' fails: %s", self._name, error.message, extra=self._extra)

    def _count_outcome(self, outcome: Outcome) -> None:
        self._metrics.interrupted_calls.labels(self._name, outcome.value).inc()
