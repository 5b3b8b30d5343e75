"""Remote engine: the engine of a text model whose replicas run in other processes."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace

from prometheus_client import Counter

from genserve.completion import DEADLINE, Delta, FinishReason, Usage
from genserve.deploy.ingress.live_replicas import LiveReplicas
from genserve.deploy.replica.description import EngineSizes
from genserve.deploy.replica.replica_load import ReplicaLoad
from genserve.deploy.replica_messages import Call
from genserve.engine.admission_control import REPLICAS_FULL, RetryTimes
from genserve.engine.generation_request import GenerationOutput, GenerationRequest, OutputSink
from genserve.engine.input_queue import Reservation
from genserve.errors import SEE_LOG, Closed, GenserveError, ModelFailed, Overloaded, ReplicaLost
from genserve.request_context import NO_KEY, KeyShare
from genserve.textmodel.logits_config import LengthLimit
from genserve.textmodel.sequence_builder import SequenceBuilder

logger = logging.getLogger(__name__)

_CLOSE_S = 10.0  # for the event loop to end the requests
# A replica ends an answer at its deadline; this much later the ingress does, since no replica may have it.
DEADLINE_MARGIN_S = 1.0


class RemoteLogits:
    """The logits stage of a text model in its replicas; a `LogitsFigures`.

    A request is valid if each of the replicas has room for it, so that another one can take it over. Replicas
    come and go, so the sizes may change at any time.

    Attributes:
        identity: stands for what the replicas serve; see `identity_of`.
        vocab_size: length of a row of logits.
        metadata: the metadata of the model's file.
    """

    def __init__(
        self,
        name: str,
        replicas: LiveReplicas,
        *,
        identity: str,
        vocab_size: int,
        metadata: Mapping[str, str],
    ) -> None:
        """Have the sizes of the replicas of a model that have an identity."""
        self.identity = identity
        self.vocab_size = vocab_size
        self.metadata = metadata
        self._name = name
        self._replicas = replicas

    @property
    def sizes(self) -> Sequence[EngineSizes]:
        """The sizes of each replica that lives, or of the replicas that lived last."""
        return self._replicas.sizes(self.identity, self._name)

    @property
    def max_num_seqs(self) -> int:
        """Sequences that run concurrently in each replica."""
        return min(one.max_num_seqs for one in self.sizes)

    @property
    def max_length(self) -> int:
        """Maximum tokens of prompt and answer together."""
        return min(one.max_length for one in self.sizes)

    @property
    def context_length(self) -> int:
        """The tokens of a sequence that the model itself takes."""
        return min(one.context_length for one in self.sizes)

    @property
    def length_limit(self) -> LengthLimit:
        """Why `max_length` is not more."""
        return min(self.sizes, key=lambda one: one.max_length).length_limit

    @property
    def block_size(self) -> int:
        """Tokens of a block of the KV cache."""
        return min(one.block_size for one in self.sizes)

    @property
    def num_blocks(self) -> int:
        """Blocks of the smallest KV cache."""
        return min(one.num_blocks for one in self.sizes)

    @property
    def kv_cache_bytes(self) -> int:
        """Largest size of the smallest KV cache; 0: there is none."""
        return min(one.kv_cache_bytes for one in self.sizes)


class RemoteEngine:
    """Generates by calls to replicas, each for one choice or for one beam search; a `TextEngine`.

    Admission is the replica's: it rejects what its queue does not hold. Requests are rejected here if all
    replicas are known to be full.

    Attributes:
        stalled: False: a replica that hangs says so, and its calls go on at other replicas.
    """

    stalled = False

    def __init__(
        self,
        name: str,
        replicas: LiveReplicas,
        *,
        event_loop: asyncio.AbstractEventLoop,
        logits: RemoteLogits,
        builder: SequenceBuilder,
        rejections: Counter,
    ) -> None:
        """Call the replicas of a text model.

        Args:
            name: the name of the model.
            replicas: the replicas of the model.
            event_loop: the loop on which the replicas are called.
            logits: the figures of the replicas that take the calls.
            builder: checks requests, and reads answers that end here.
            rejections: counts what is rejected here, by model and reason.
        """
        self._name = name
        self._replicas = replicas
        self._event_loop = event_loop
        self._logits = logits
        self._builder = builder
        self._rejections = rejections.labels(name, REPLICAS_FULL)
        self._retry_times = RetryTimes()
        self._idle = threading.Condition()
        # Guarded by the condition.
        self._calls: dict[GenerationRequest, list[_ChoicesCall]] = {}   # the calls of open requests
        self._num_open = 0  # choices
        self._num_preparing = 0
        self._closing = False

    @property
    def capacity(self) -> int:
        """Sequences that may run and wait in each replica."""
        return min(one.capacity for one in self._logits.sizes)

    @property
    def alive(self) -> bool:
        """Whether it has not been closed."""
        return not self._closing

    @property
    def ready(self) -> bool:
        """Whether a replica can take a request."""
        return self.alive and self._replicas.num_alive > 0

    @property
    def num_accepted(self) -> int:
        """Choices that have not ended."""
        return self._num_open

    @property
    def num_running(self) -> int:
        """All choices that have not ended: which ones wait is known to the replicas."""
        return self._num_open

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens that waited in all replicas when they were last asked."""
        return self._replicas.load.waiting_tokens

    @property
    def cache_usage(self) -> float:
        """Mean share of the replicas' KV caches that was held when they were last asked."""
        return self._replicas.load.kv_usage

    @property
    def num_preparing(self) -> int:
        """Slots reserved for requests whose prompts are being prepared."""
        return self._num_preparing

    @property
    def num_free(self) -> int | None:
        """See `TextEngine`: the sum of all replicas, without the requests that are being prepared here."""
        num_free = self._load().num_free
        return None if num_free is None else max(0, num_free - self._num_preparing)

    @property
    def seconds_per_slot(self) -> float | None:
        """See `TextEngine`: the sum of all replicas."""
        return self._load().seconds_per_slot or None

    def _load(self) -> ReplicaLoad:
        return self._replicas.replicas.load(self._logits.identity)

    @property
    def now_s(self) -> float:
        """The clock's time, to which deadlines refer."""
        return time.monotonic()

    def reserve(
        self, count: int, *, priority: int = 0, share: KeyShare = NO_KEY, is_resumed: bool = False
    ) -> Reservation:
        """Count a request that is being prepared; on the event loop.

        Raises:
            Closed: `close` was called.
            Overloaded: all replicas are known to be full. Not raised for a priority that goes before other
                priorities, and for a key, for which the replicas may have room nevertheless.
        """
        if priority >= 0 and share == NO_KEY and not is_resumed:
            self._check_room(count)
        with self._idle:
            self._check_open()
            self._num_preparing += count
        return Reservation(self, count, priority=priority, arrived_s=self.now_s, queued=False)

    def _check_room(self, count: int) -> None:
        num_free = self.num_free
        if num_free is not None and num_free < count:
            self._rejections.inc()
            seconds = self.seconds_per_slot
            raise Overloaded(
                f"the replicas of '{self._name}' have room for {num_free} more requests",
                retry_after_s=self._retry_times.after_s(seconds, max_s=None, now_s=self.now_s),
                remedy="try again later, or add replicas",
                reason=REPLICAS_FULL,
            )

    def check_reserved(self, reservation: Reservation) -> None:
        """See `Reservation.check`."""
        self._check_open()

    def release(self, reservation: Reservation) -> None:
        """See `Reservation.release`."""
        with self._idle:
            if not reservation.released:
                reservation.released = True
                self._num_preparing -= reservation.count

    def submit(
        self, *requests: GenerationRequest, sink: OutputSink, reservation: Reservation | None = None
    ) -> None:
        """Check requests and call replicas for them; a rejection by a replica is an output.

        Raises:
            InvalidRequest, ModelFailed: see `SequenceBuilder.check`.
            Closed: `close` was called.
        """
        for request in requests:
            self._builder.check(request)
        calls = [
            _ChoicesCall(request, choices, sink)
            for request in requests
            for choices in _choices_by_call(request)
        ]
        with self._idle:
            if reservation is not None:
                self.release(reservation)
            self._check_open()
            for call in calls:
                self._calls.setdefault(call.request, []).append(call)
                self._num_open += len(call.open)
        self._event_loop.call_soon_threadsafe(self._start, calls)

    def cancel(self, request: GenerationRequest) -> None:
        """Drop the choices of a request that have not ended."""
        with self._idle:
            calls = tuple(self._calls.get(request, ()))
        for call in calls:
            self._event_loop.call_soon_threadsafe(self._end, call, None)

    def end_reasoning(self, request: GenerationRequest) -> None:
        """See `TextEngine`: the calls of the request are made again, for what the client has not received."""
        with self._idle:
            calls = tuple(self._calls.get(request, ()))
        for call in calls:
            self._event_loop.call_soon_threadsafe(self._restart, call)

    def _restart(self, call: _ChoicesCall) -> None:
        """Make a call again that ends its reasoning; on the event loop."""
        if not call.open or call.task is None or call.ends_reasoning:
            return
        call.ends_reasoning = True
        call.task.cancel()
        call.task = self._event_loop.create_task(self._run(call))

    def drain(self, *, timeout_s: float) -> None:
        """Wait until every request has ended, at most `timeout_s`."""
        with self._idle:
            self._idle.wait_for(lambda: not self._calls, timeout_s)

    def close(self) -> None:
        """End all requests with `Closed`; a second call does nothing. Blocks, off the event loop."""
        error = Closed("the model was unloaded, or the server stopped, before the answer was complete")
        with self._idle:
            self._closing = True
            calls = [call for calls in self._calls.values() for call in calls]
        for call in calls:
            self._event_loop.call_soon_threadsafe(self._end, call, error)
        self.drain(timeout_s=_CLOSE_S)

    def _check_open(self) -> None:
        if self._closing:
            raise Closed("the model is being unloaded", remedy="try again when the model is ready")

    def _start(self, calls: Sequence[_ChoicesCall]) -> None:
        for call in calls:
            if call.open:  # not cancelled meanwhile
                call.task = self._event_loop.create_task(self._run(call))

    async def _run(self, call: _ChoicesCall) -> None:
        error: GenserveError | None = None
        deadline_s = call.request.deadline_s
        limit = asyncio.timeout(None if deadline_s is None else deadline_s + DEADLINE_MARGIN_S - self.now_s)
        try:
            try:
                async with limit:
                    await self._read(call)
            except TimeoutError:
                if not limit.expired():
                    raise
                self._deliver(call, call.last_deltas(self._builder))
        except GenserveError as failure:
            error = failure
        except Exception:
            logger.exception("a call of model %s failed", self._name)
            error = ModelFailed("the call of a replica failed", remedy=SEE_LOG)
        self._end(call, error or ReplicaLost("the replica ended the answer before its last token"))

    async def _read(self, call: _ChoicesCall) -> None:
        message = Call(identity=self._logits.identity, request=call.message(now_s=self.now_s))
        async with aclosing(self._replicas.replicas.generate(message)) as arriving:  # type: ignore[type-var]
            async for deltas in arriving:
                self._deliver(call, deltas)

    def _deliver(self, call: _ChoicesCall, deltas: Iterable[Delta]) -> None:
        num_open = len(call.open)
        call.deliver(deltas)
        self._forget(call, num_ended=num_open - len(call.open))

    def _end(self, call: _ChoicesCall, error: GenserveError | None) -> None:
        """End what is open of a call, with an error or by cancelling it; on the event loop."""
        num_open = len(call.open)
        if error is not None:
            call.fail(error)
        call.open.clear()
        self._forget(call, num_ended=num_open)
        if call.task is not None and call.task is not asyncio.current_task():
            call.task.cancel()

    def _forget(self, call: _ChoicesCall, *, num_ended: int) -> None:
        if not num_ended:
            return
        with self._idle:
            self._num_open -= num_ended
            calls = self._calls[call.request]
            if not any(one.open for one in calls):
                del self._calls[call.request]
            if not self._calls:
                self._idle.notify_all()


class _ChoicesCall:
    """The call of a replica for some choices of a request.

    Attributes:
        request: the client's request.
        open: the choices that have not ended.
        task: the task that reads the deltas; None: the call has not started.
        ends_reasoning: whether the reasoning of its answers is to end.
    """

    def __init__(self, request: GenerationRequest, choices: range, sink: OutputSink) -> None:
        self.request = request
        self.open = set(choices)
        self.task: asyncio.Task[None] | None = None
        self.ends_reasoning = False
        self._choices = choices
        self._received: list[list[int]] = [[] for _ in choices]     # token ids
        self._sink = sink

    def message(self, *, now_s: float) -> GenerationRequest:
        """Return the request to a replica, with the time that is left."""
        seeds = self.request.seeds[self._choices.start : self._choices.stop]
        received = self._received if any(self._received) else ()
        rest = self.request.rest(elapsed_s=now_s - self.request.arrived_s, received=received)
        return replace(
            rest,
            seeds=seeds,
            is_checked=True,
            ends_reasoning=self.ends_reasoning,
            return_progress=rest.return_progress and not self._choices.start,   # all read the same prompt
        )

    def deliver(self, deltas: Iterable[Delta]) -> None:
        """Pass deltas, whose choices are numbered within the call, to the sink."""
        outputs: list[GenerationOutput] = []
        for delta in deltas:
            choice = self._choices[delta.choice]
            if choice not in self.open:  # cancelled
                continue
            self._received[delta.choice] += delta.token_ids
            if delta.finish_reason is not None:
                self.open.discard(choice)
            content = replace(delta, choice=0) if delta.choice else delta
            outputs.append(GenerationOutput(self.request, choice, content))
        if outputs:
            self._sink.deliver(outputs)

    def last_deltas(self, builder: SequenceBuilder) -> list[Delta]:
        """Return the last delta of each open choice, as an engine makes it at the deadline."""
        return [
            self._last_delta(number, builder)
            for number, choice in enumerate(self._choices)
            if choice in self.open
        ]

    def _last_delta(self, number: int, builder: SequenceBuilder) -> Delta:
        text = builder.text(self.request, choice=self._choices[number])
        for token_id in self._received[number]:
            text.push(token_id)
        held_back = text.flush()
        return Delta(
            text=held_back,
            token_ids=(),
            choice=number,
            finish_reason=FinishReason.LENGTH if text.stop is None else FinishReason.STOP,
            stop_reason=DEADLINE if text.stop is None else text.stop,
            usage=Usage(
                prompt_tokens=self.request.num_prompt_tokens,
                completion_tokens=len(self._received[number]),
            ),
        )

    def fail(self, error: GenserveError) -> None:
        """End the open choices with an error."""
        if self.open:
            choices = sorted(self.open)
            self._sink.deliver([GenerationOutput(self.request, choice, error) for choice in choices])


def _choices_by_call(request: GenerationRequest) -> list[range]:
    """Return the choices of each call: one, or the answers of a beam search."""
    if request.params.use_beam_search:
        return [range(request.num_choices)]
    return [range(choice, choice + 1) for choice in range(request.num_choices)]
