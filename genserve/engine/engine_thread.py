"""Engine thread: the thread that owns an engine, and runs its steps while there are requests."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

from genserve.completion import Delta, PromptProgress
from genserve.engine.admission_control import AdmissionControl, QueueLimits
from genserve.engine.engine import Engine, StepResult
from genserve.engine.engine_request import LogitsRequest, Request
from genserve.engine.generation_request import GenerationOutput, GenerationRequest, OutputSink
from genserve.engine.input_queue import Arrivals, InputQueue, Reservation
from genserve.engine.logits_model import LogitsAdapter
from genserve.engine.step_reporter import StepReporter
from genserve.engine.token_sequence import SequenceOutput, TokenSequence
from genserve.errors import SEE_LOG, Closed, GenserveError, ModelFailed, ModelNotFound, Overloaded
from genserve.generation_metrics import GenerationMetrics
from genserve.request_context import NO_KEY, KeyShare
from genserve.sampling.logits_array import LogitsArray

logger = logging.getLogger(__name__)

# How long a step may wait for loops over logits that always resume, as a share of the last decode step.
_GATHER_SHARE = 0.5
_GATHER_SHARE_WITH_SEQUENCES = 0.1
_ADAPTER_WAIT_S = 1.0  # so often the thread shows that it does not hang while all wait for adapters


# Makes the token sequences of a request, one for each choice.
SequencesOf: TypeAlias = Callable[[GenerationRequest], Sequence[TokenSequence]]


def no_sequences(request: GenerationRequest) -> Sequence[TokenSequence]:
    """Stands for a `SequencesOf` where the engine is only asked for logits."""
    raise NotImplementedError(request.model)


# Ends the reasoning of a token sequence at its next token.
EndReasoning: TypeAlias = Callable[[TokenSequence], None]


def no_reasoning(sequence: TokenSequence) -> None:
    """Stands for an `EndReasoning` where no sequence reasons."""


class AdapterSource(Protocol):
    """The adapters of a model; see `textmodel.Adapters`."""

    def acquire(
        self, name: str, *, count: int, priority: int, on_change: Callable[[], None]
    ) -> LogitsAdapter:
        """Return an adapter, which will be in memory, until it is released `count` times; does not wait.

        `on_change` is called, on any thread, when it is in memory or cannot be.
        """

    def release(self, adapter: Any) -> None:
        """Give an adapter back."""


class EngineThread:
    """The thread that owns an engine, and the queue in front of it; a `TextEngine`.

    Public methods are safe from any thread. Every sequence that `submit` accepts ends with exactly one last
    output, and every logits request receives its logits or an error exactly once. Nothing follows once a
    request is cancelled.

    Attributes:
        stalled: whether the thread was seen to hang within a step; set by who watches the thread.
        num_turns: how often the thread has looked for work; increases while there are requests.
        num_steps: how many forwards it has run.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        name: str,
        max_num_seqs: int,
        limits: QueueLimits,
        metrics: GenerationMetrics,
        sequences_of: SequencesOf = no_sequences,
        end_reasoning: EndReasoning = no_reasoning,
        adapters: AdapterSource | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        """Start the thread.

        Args:
            engine: owned by the thread from now on.
            name: the name of the model.
            max_num_seqs: sequences that run concurrently.
            limits: the limits of the queue.
            metrics: the metrics that the thread reports.
            sequences_of: called by `submit`, on the thread of its caller.
            end_reasoning: called on the thread, between two steps.
            adapters: the adapters that requests can name; None: they name none.
            on_close: called by `close` when the thread has ended.
        """
        admission = AdmissionControl(max_num_seqs=max_num_seqs, limits=limits, metrics=metrics)
        self._queue: InputQueue[TokenSequence] = InputQueue(clock=engine.clock, admission=admission)
        self._engine = engine
        self._metrics = metrics
        self._reporter = StepReporter(metrics)
        self._sequences_of = sequences_of
        self._end_reasoning = end_reasoning
        self._adapters = adapters
        self._on_close = on_close
        self._open: dict[Request, None] = {}  # the requests taken from the queue that have not ended
        # The sequences whose callers want to know how much of the prompt was read, and how much they know of.
        self._reading: dict[TokenSequence, int] = {}
        self._decode_s = 0.0  # the duration of the last step that only decoded
        self.stalled = False
        self.num_turns = 0
        self.num_steps = 0
        self._cpu_clock: int | None = None  # None: the thread has not started, or there is no such clock
        self._thread = threading.Thread(target=self._run, name=f"engine-{name}", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs; False after `close` or an uncaught exception."""
        return self._thread.is_alive() and self._queue.is_open

    @property
    def ready(self) -> bool:
        """Whether the thread runs, and goes on with its requests if it has any."""
        return self.alive and not self.stalled

    def cpu_s(self) -> float | None:
        """Return the processor time that the thread has used; None: it has ended, or it is unknown."""
        try:
            return None if self._cpu_clock is None else time.clock_gettime(self._cpu_clock)
        except OSError:
            return None

    @property
    def num_running(self) -> int:
        """Token sequences, beams and logits requests that hold blocks of the KV cache."""
        return self._engine.num_running

    @property
    def cache_usage(self) -> float:
        """Share of the KV cache that running requests hold, 0 to 1."""
        return self._engine.cache_usage

    @property
    def num_accepted(self) -> int:
        """See `AdmissionControl`."""
        return self._queue.admission.num_accepted

    @property
    def num_preparing(self) -> int:
        """See `AdmissionControl`."""
        return self._queue.admission.num_preparing

    @property
    def num_waiting_tokens(self) -> int:
        """See `AdmissionControl`."""
        return self._queue.admission.num_waiting_tokens

    @property
    def capacity(self) -> int:
        """See `AdmissionControl`."""
        return self._queue.admission.capacity

    @property
    def num_free(self) -> int:
        """See `InputQueue`."""
        return self._queue.num_free

    @property
    def seconds_per_slot(self) -> float | None:
        """See `InputQueue`."""
        return self._queue.seconds_per_slot

    @property
    def now_s(self) -> float:
        """The time of the engine's clock, to which deadlines refer."""
        return self._engine.clock()

    def reserve(
        self, count: int, *, priority: int = 0, share: KeyShare = NO_KEY, is_resumed: bool = False
    ) -> Reservation:
        """See `InputQueue.reserve`."""
        return self._queue.reserve(count, priority=priority, share=share, is_resumed=is_resumed)

    def submit(
        self, *requests: GenerationRequest, sink: OutputSink, reservation: Reservation | None = None
    ) -> None:
        """Make the token sequences of requests, and accept all of them or none; see `TextEngine.submit`.

        Blocks of their prompts that are on the disk are read first, unless the queue has no room for them.
        """
        made = [self._sequences_of(request) for request in requests]
        sequences = [sequence for choices in made for sequence in choices]
        try:
            self._set_adapters(sequences)
            if self._engine.disk_cache is not None:
                self._queue.check(sequences)
                for choices in made:  # which have the same prompt
                    for stored in self._engine.disk_cache.read_ahead(
                        choices[0], is_cached=self._engine.is_cached, has_snapshot=self._engine.has_snapshot
                    ):
                        self._queue.restore(stored)
            self.submit_sequences(*sequences, sink=sink, reservation=reservation)
        except BaseException:
            for sequence in sequences:
                self._release_adapter(sequence)
            raise

    def _set_adapters(self, sequences: Sequence[TokenSequence]) -> None:
        """Give sequences, and the first beams of their searches, the adapters that their requests name.

        Those of one name have the same one, even if it is replaced meanwhile.
        """
        named: defaultdict[str, list[TokenSequence]] = defaultdict(list)
        for sequence in sequences:
            if sequence.request.adapter is not None:
                named[sequence.request.adapter].append(sequence)
        for name, users in named.items():
            if self._adapters is None:
                raise ModelNotFound(f"model {users[0].request.model!r} has no adapter {name!r}")
            adapter = self._adapters.acquire(
                name,
                count=len(users),
                priority=users[0].priority,
                on_change=self._queue.adapters_changed,
            )
            for user in users:
                user.adapter = adapter
                for beam in user.group.requests:
                    beam.adapter = adapter

    def _release_adapter(self, sequence: TokenSequence) -> None:
        if sequence.adapter is not None and self._adapters is not None:
            self._adapters.release(sequence.adapter)
            sequence.adapter = None

    def submit_sequences(
        self, *sequences: TokenSequence, sink: OutputSink, reservation: Reservation | None = None
    ) -> None:
        """Accept token sequences together, as `InputQueue.submit` does; their outputs go to `sink`.

        If none of them has its first step within the limit of the queue, they end with Overloaded.
        """
        for sequence in sequences:
            sequence.sink = sink
        self._queue.submit(sequences, reservation=reservation)

    def submit_logits(self, requests: Sequence[LogitsRequest]) -> None:
        """See `InputQueue.submit_logits`."""
        self._queue.submit_logits(requests)

    def cancel(self, request: GenerationRequest | LogitsRequest) -> None:
        """See `InputQueue.cancel`."""
        self._queue.cancel(request)

    def end_reasoning(self, request: GenerationRequest) -> None:
        """See `InputQueue.end_reasoning`."""
        self._queue.end_reasoning(request)

    def drain(self, *, timeout_s: float) -> None:
        """See `InputQueue.drain`."""
        self._queue.drain(timeout_s=timeout_s)

    def close(self) -> None:
        """End all requests with `Closed`, and the thread; a second call does nothing."""
        self._queue.close()
        self._thread.join()
        if self._engine.disk_cache is not None:
            self._engine.disk_cache.close()
        if self._on_close:
            self._on_close()

    def _run(self) -> None:
        # Asked by the thread itself, since the call would crash the process for a thread that has ended.
        if sys.platform == "linux":
            self._cpu_clock = time.pthread_getcpuclockid(threading.get_ident())
        try:
            while self._queue.wait_for_work(busy=bool(self._open)):
                self.num_turns += 1
                self._add_arrivals()
                self._gather()
                stepped = self._step()
                self._reject_overdue()
                self._queue.record_without_adapters(self._engine.num_without_adapters)
                if not stepped:
                    self._wait_for_slot()
                self._reporter.occupancy(self._engine, waiting_tokens=self.num_waiting_tokens)
            self._end_all(
                Closed("the model was unloaded, or the server stopped, before the answer was complete")
            )
        except BaseException:
            logger.exception("engine thread died")
            failure = ModelFailed("the engine failed", remedy=f"load its model again; {SEE_LOG}")
            self._queue.fail(failure)
            self._end_all(failure)

    def _add_arrivals(self) -> None:
        arrivals = self._pop_arrivals()
        for stored in arrivals.stored:
            self._engine.restore(stored)
        for sequence in arrivals.sequences:
            self._engine.add(sequence)
            if sequence.request.return_progress and not (sequence.choice or sequence.is_resumed):
                self._reading[sequence] = -1
        for request in arrivals.logits_requests:
            self._engine.add_logits(request)
        if arrivals.cancelled:
            cancelled = self._open_of(arrivals.cancelled)
            self._engine.remove(cancelled)
            self._end_cancelled(cancelled)
        if arrivals.ending_reasoning:
            for one in self._open_of(arrivals.ending_reasoning):
                if isinstance(one, TokenSequence):
                    self._end_reasoning(one)
        if arrivals.adapters_changed or arrivals.sequences:
            self._reject_without_adapter()

    def _pop_arrivals(self) -> Arrivals[TokenSequence]:
        # All of them are open before the engine has one, so that each ends if the engine fails.
        arrivals = self._queue.pop()
        self._open.update(dict.fromkeys((*arrivals.sequences, *arrivals.logits_requests)))
        for sequence in arrivals.sequences:
            self._reporter.arrived(sequence)
        return arrivals

    def _open_of(self, requests: Container[GenerationRequest | LogitsRequest]) -> list[Request]:
        """Return the sequences and logits requests of some requests that have not ended."""
        return [
            one for one in self._open if (one.request if isinstance(one, TokenSequence) else one) in requests
        ]

    def _open_sequences(self) -> Iterator[TokenSequence]:
        return (request for request in self._open if isinstance(request, TokenSequence))

    def _gather(self) -> None:
        """Wait briefly for loops over logits that always resume, so that they share the step.

        Otherwise loops that receive logits together and resume microseconds apart would fall into groups
        that alternate, with steps as long as one step for all of them.
        """
        if not self._open:
            return
        share = _GATHER_SHARE_WITH_SEQUENCES if any(self._open_sequences()) else _GATHER_SHARE
        while self._queue.is_open:
            num_awaited, seconds = self._engine.expected_to_resume(within_s=share * self._decode_s)
            if not num_awaited:
                return
            self._queue.wait_for_change(seconds, num_awaited=num_awaited)
            self._add_arrivals()

    def _wait_for_slot(self) -> None:
        """Wait until a reserved slot is free or an adapter in memory, or a sequence has to end."""
        now_s = self._engine.clock()
        ends_s = min(self._engine.next_deadline_s, self._queue.next_overdue_s)
        most_s = self._engine.reserved_s if self._engine.num_waiting else _ADAPTER_WAIT_S
        self._queue.wait_for_change(max(0.0, min(most_s, ends_s - now_s)))

    def _step(self) -> bool:
        """Run a step; False if there are requests, but none of them can be computed now.

        All slots are reserved for paused loops, or all requests wait for adapters.
        """
        started_s = time.monotonic()
        result = self._engine.step()
        if result is None:
            now_s = self._engine.clock()
            self._deliver(self._outputs(self._engine.expire(), now_s), now_s=now_s)
            return not self._open
        self.num_steps += 1
        seconds = time.monotonic() - started_s
        now_s = self._engine.clock()
        started = self._queue.record_step(
            result.started,
            seconds=seconds,
            full=result.full,
            num_waiting=self._engine.num_waiting,
            now_s=now_s,
        )
        outputs = self._outputs(result, now_s)
        if self._reading:
            outputs = [*self._progress(now_s), *outputs]
        if not result.num_prompt_tokens:
            self._decode_s = seconds
        self._reporter.step(result, outputs, started, seconds=seconds, now_s=now_s)
        self._deliver(outputs, now_s=now_s)
        for request, logits in result.logits:
            self._deliver_logits(request, logits)
        for failed, error in result.failed.items():
            if isinstance(failed, LogitsRequest):
                self._deliver_logits(failed, error)
        return True

    def _reject_overdue(self) -> None:
        """End the sequences that have waited too long for their first step."""
        self._reject(self._queue.overdue(self._open_sequences()))

    def _reject_without_adapter(self) -> None:
        """End the sequences whose adapters cannot be had."""
        self._reject(
            [
                (sequence, error)
                for sequence in self._open_sequences()
                if sequence.adapter is not None and (error := sequence.adapter.error) is not None
            ]
        )

    def _reject(self, rejected: Sequence[tuple[TokenSequence, GenserveError]]) -> None:
        """Remove sequences from the engine, and deliver their errors."""
        if rejected:
            self._engine.remove(sequence for sequence, _ in rejected)
            self._deliver(rejected, now_s=self._engine.clock())

    def _outputs(self, result: StepResult, now_s: float) -> list[SequenceOutput]:
        outputs: list[SequenceOutput] = [
            (request, error) for request, error in result.failed.items() if isinstance(request, TokenSequence)
        ]
        for sequence in result.advanced:
            delta = sequence.pop_delta(now_s)
            if delta is not None:
                outputs.append((sequence, delta))
        return outputs

    def _progress(self, now_s: float) -> Iterator[SequenceOutput]:
        """Yield how much was read of the prompts of which the last step has read a part."""
        for sequence, num_known in tuple(self._reading.items()):
            num_prompt_tokens = num_read = sequence.num_prompt_tokens
            for reader in sequence.group.requests[:1]:  # none: all beams have ended
                num_read = min(reader.num_computed_tokens, num_prompt_tokens)
            if sequence.started_s is None or num_read == num_known:
                continue
            self._reading[sequence] = num_read
            if num_read == num_prompt_tokens:
                del self._reading[sequence]
            progress = PromptProgress(
                prompt_tokens=num_prompt_tokens,
                read_tokens=num_read,
                cached_tokens=sequence.num_cached_tokens,
                seconds=now_s - sequence.started_s,
            )
            yield sequence, progress

    def _deliver(self, outputs: Sequence[SequenceOutput], *, now_s: float) -> None:
        """Pass the outputs to their sinks, and end each sequence that has its last output."""
        batches: defaultdict[OutputSink, list[GenerationOutput]] = defaultdict(list)
        for sequence, content in outputs:
            output = GenerationOutput(sequence.request, sequence.choice, content, sequence.started_s)
            batches[sequence.sink].append(output)
            self._record_output(sequence, content, now_s=now_s)
        for sink, batch in batches.items():
            try:
                sink.deliver(batch)
            except RuntimeError:  # its event loop is closed, so the outputs cannot be read any more
                for output in batch:
                    self.cancel(output.request)

    def _record_output(
        self, sequence: TokenSequence, content: Delta | GenserveError, *, now_s: float
    ) -> None:
        if isinstance(content, GenserveError):
            if not isinstance(content, Overloaded):  # which is counted as a rejection
                self._metrics.request_failed()
            self._end(sequence)
            return
        self._reporter.delta(sequence, content, now_s=now_s)
        if content.finish_reason is not None:
            self._end(sequence)

    def _deliver_logits(self, request: LogitsRequest, content: LogitsArray | GenserveError) -> None:
        if isinstance(content, GenserveError):
            self._metrics.request_failed()
        self._end(request)
        try:
            request.deliver(content)
        except Exception:
            logger.exception("the receiver of logits failed")

    def _end(self, request: Request) -> None:
        """Stop counting a request that has left the engine, and has had its last output."""
        del self._open[request]
        if isinstance(request, TokenSequence):
            self._reading.pop(request, None)
            self._reporter.ended(request)
            self._release_adapter(request)
        self._queue.remove(request)

    def _end_cancelled(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._metrics.request_cancelled()
            self._end(request)

    def _end_all(self, error: GenserveError) -> None:
        arrivals = self._pop_arrivals()
        try:
            self._engine.remove(self._open)
            self._reporter.occupancy(self._engine, waiting_tokens=self.num_waiting_tokens)
        except Exception:  # the engine has failed; its requests end nevertheless
            logger.exception("the engine did not drop its requests")
        self._end_cancelled(self._open_of(arrivals.cancelled))
        outputs: list[SequenceOutput] = [(sequence, error) for sequence in self._open_sequences()]
        self._deliver(outputs, now_s=self._engine.clock())
        for request in tuple(self._open):
            if isinstance(request, LogitsRequest):
                self._deliver_logits(request, error)
