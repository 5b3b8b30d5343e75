"""Engine thread: the thread that owns an engine, and runs its steps while there are requests."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from genserve.completion import Delta
from genserve.errors import SEE_LOG, Closed, GenserveError, ModelFailed, Overloaded
from genserve.generation.admission_control import AdmissionControl, QueueLimits
from genserve.generation.engine import Engine, StepResult
from genserve.generation.engine_request import LogitsRequest, Request
from genserve.generation.request_inbox import (
    Arrivals,
    OutputSink,
    RequestInbox,
    RequestOutput,
    RequestState,
)
from genserve.generation_metrics import GenerationMetrics
from genserve.sampling.logits_array import LogitsArray

logger = logging.getLogger(__name__)

# How long a step may wait for loops over logits that always resume, as a share of the last decode step.
_GATHER_SHARE = 0.5
_GATHER_SHARE_WITH_SEQUENCES = 0.1


class EngineThread(RequestInbox):
    """The thread that owns an engine; requests are submitted to it as to any `RequestInbox`.

    Public methods are safe from any thread. Every sequence that `submit` accepts ends with exactly one last
    output, and every logits request is answered exactly once, unless it is cancelled: then nothing follows.

    Attributes:
        stalled: whether it was seen to hang within a step; set by who watches it.
        num_turns: how often the thread has looked for work; it counts while there are requests.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        name: str,
        max_num_seqs: int,
        limits: QueueLimits,
        metrics: GenerationMetrics,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        """Start the thread; `on_close` is called by `close` when it has ended."""
        admission = AdmissionControl(max_num_seqs=max_num_seqs, limits=limits, metrics=metrics)
        super().__init__(clock=engine.clock, admission=admission)
        self._engine = engine
        self._metrics = metrics
        self._reporter = StepReporter(metrics)
        self._on_close = on_close
        self._open = OpenRequests()
        self._decode_s = 0.0                # of the last step that only decoded
        self._num_steps = 0
        self.stalled = False
        self.num_turns = 0
        self._cpu_clock: int | None = None      # of the thread; None: it has not started, or there is none
        self._thread = threading.Thread(target=self._run, name=f"engine-{name}", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs; False after `close` or an uncaught exception."""
        return self._thread.is_alive() and not self._closing and self._failure is None

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
    def num_steps(self) -> int:
        """Forwards run so far."""
        return self._num_steps

    def max_tokens_per_sequence(self, num_sequences: int) -> int:
        """Return up to which length `num_sequences` sequences always fit into the KV cache together."""
        return self._engine.max_tokens_per_sequence(num_sequences)

    def close(self) -> None:
        """End all requests with `Closed`, and the thread; a second call does nothing."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        if self._on_close:
            self._on_close()

    def _run(self) -> None:
        # From within: for a thread that has ended, the call would crash the process.
        if sys.platform == "linux":
            self._cpu_clock = time.pthread_getcpuclockid(threading.get_ident())
        try:
            while self._wait_for_work(busy=bool(self._open)):
                self.num_turns += 1
                self._add_arrivals()
                self._gather()
                stepped = self._step()
                self._reject_overdue()
                if not stepped:
                    self._wait_for_place()
                self._reporter.occupancy(self._engine, waiting_tokens=self.num_waiting_tokens)
            self._end_all(
                Closed("the model was unloaded, or the server stopped, before the answer was complete")
            )
        except BaseException:
            logger.exception("engine thread died")
            failure = ModelFailed("the engine failed", remedy=f"load its model again; {SEE_LOG}")
            with self._changed:
                self._failure = failure
            self._end_all(failure)

    def _add_arrivals(self) -> None:
        arrivals = self._take_arrivals()
        self._open.add(arrivals)    # all of them before the engine has one: so each ends if it fails
        for state in arrivals.sequences:
            self._engine.add(state.sequence)
        for request in arrivals.logits_requests:
            self._engine.add_logits(request)
        if arrivals.cancelled:
            cancelled = self._open.answers_of(arrivals.cancelled)
            self._engine.remove(cancelled)
            self._end_cancelled(cancelled)

    def _gather(self) -> None:
        """Wait briefly for loops over logits that always resume, so that they share the step.

        Otherwise loops that are answered together and resume microseconds apart fall into groups that
        take turns, with steps as long as one for all of them.
        """
        if not self._open:
            return
        share = _GATHER_SHARE_WITH_SEQUENCES if self._open.sequences else _GATHER_SHARE
        while not self._closing:
            num_awaited, seconds = self._engine.expected_to_resume(within_s=share * self._decode_s)
            if not num_awaited:
                return
            self._wait_for_change(seconds, num_awaited=num_awaited)
            self._add_arrivals()

    def _wait_for_place(self) -> None:
        """Wait until a held place becomes free, or a sequence that waits for it has to end."""
        now_s = self._engine.clock()
        ends_s = min(self._engine.next_deadline_s, self._waiting.next_overdue_s)
        self._wait_for_change(max(0.0, min(self._engine.held_s, ends_s - now_s)))

    def _step(self) -> bool:
        """Run a step; False if there are requests, but all places are held for paused loops."""
        started_s = time.monotonic()
        result = self._engine.step()
        if result is None:
            expired = self._outputs(self._engine.expire())
            self._deliver(expired, now_s=self._engine.clock())
            return not self._open
        self._num_steps += 1
        seconds = time.monotonic() - started_s
        now_s = self._engine.clock()
        outputs = self._outputs(result)
        started = self._start(
            result.started,
            seconds=seconds,
            full=result.full,
            num_waiting=self._engine.num_waiting,
            now_s=now_s,
        )
        if not result.num_prompt_tokens:
            self._decode_s = seconds
        self._reporter.step(result, outputs, started, seconds=seconds, now_s=now_s)
        self._deliver(outputs, now_s=now_s)
        for request, logits in result.answered:
            self._answer(request, logits)
        for failed, error in result.failed.items():
            if failed in self._open.logits_requests:
                self._answer(self._open.logits_requests[failed], error)
        return True

    def _reject_overdue(self) -> None:
        """End the sequences that have waited too long for their first step."""
        overdue = self._overdue(self._open.sequences)
        if overdue:
            self._engine.remove(sequence for sequence, _ in overdue)
            self._deliver(overdue, now_s=self._engine.clock())

    def _outputs(self, result: StepResult) -> list[RequestOutput]:
        outputs: list[RequestOutput] = [
            (self._open.sequences[request].sequence, error)
            for request, error in result.failed.items()
            if request in self._open.sequences
        ]
        for sequence in result.advanced:
            delta = sequence.take_delta()
            if delta is not None:
                outputs.append((sequence, delta))
        return outputs

    def _deliver(self, outputs: Sequence[RequestOutput], *, now_s: float) -> None:
        """Hand the outputs to their sinks, and end the sequences of which they are the last."""
        batches: defaultdict[OutputSink, list[RequestOutput]] = defaultdict(list)
        for sequence, content in outputs:
            state = self._open.sequences[sequence]
            batches[state.sink].append((sequence, content))
            self._note_output(content, state, now_s=now_s)
        for sink, batch in batches.items():
            try:
                sink.deliver(batch)
            except RuntimeError:  # its event loop is closed, so the outputs cannot be read any more
                for sequence, _ in batch:
                    self.cancel(sequence)

    def _note_output(self, content: Delta | GenserveError, state: RequestState, *, now_s: float) -> None:
        if isinstance(content, GenserveError):
            if not isinstance(content, Overloaded):     # which is counted as a rejection
                self._metrics.request_failed()
            self._end(state.sequence)
            return
        self._reporter.delta(content, state, now_s=now_s)
        if content.finish_reason is not None:
            self._end(state.sequence)

    def _answer(self, request: LogitsRequest, content: LogitsArray | GenserveError) -> None:
        if isinstance(content, GenserveError):
            self._metrics.request_failed()
        self._end(request)
        try:
            request.answer(content)
        except Exception:
            logger.exception("the receiver of logits failed")

    def _end(self, request: Request) -> None:
        state = self._open.remove(request)
        if state is None:
            self._leave(request, num_seqs=1)
            return
        self._reporter.ended(state)
        self._leave(request, num_seqs=state.num_seqs, started_s=state.sequence.started_s)

    def _end_cancelled(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._metrics.request_cancelled()
            self._end(request)

    def _end_all(self, error: GenserveError) -> None:
        arrivals = self._take_arrivals()
        self._open.add(arrivals)
        try:
            self._engine.remove(self._open.all())
            self._reporter.occupancy(self._engine, waiting_tokens=self.num_waiting_tokens)
        except Exception:   # of an engine that has failed; its requests end nevertheless
            logger.exception("the engine did not drop its requests")
        self._end_cancelled(self._open.answers_of(arrivals.cancelled))
        outputs: list[RequestOutput] = [(state.sequence, error) for state in self._open.sequences.values()]
        self._deliver(outputs, now_s=self._engine.clock())
        for request in tuple(self._open.logits_requests.values()):
            self._answer(request, error)


class OpenRequests:
    """The requests that an engine's thread has taken over and that have not ended.

    Attributes:
        sequences: the token sequences, with their states.
        logits_requests: the others.
    """

    def __init__(self) -> None:
        self.sequences: dict[Request, RequestState] = {}
        self.logits_requests: dict[Request, LogitsRequest] = {}

    def __bool__(self) -> bool:
        return bool(self.sequences or self.logits_requests)

    def all(self) -> list[Request]:
        """Return both kinds."""
        return [*self.sequences, *self.logits_requests]

    def answers_of(self, requests: Iterable[Request]) -> set[Request]:
        """Return the answers of the requests, without those that have ended."""
        answers = {answer for request in requests for answer in request.answers}
        return answers & (self.sequences.keys() | self.logits_requests.keys())

    def add(self, arrivals: Arrivals) -> None:
        """Take over new requests."""
        self.sequences.update((state.sequence, state) for state in arrivals.sequences)
        self.logits_requests.update((request, request) for request in arrivals.logits_requests)

    def remove(self, request: Request) -> RequestState | None:
        """Remove a request that ends, and return its state if it is a sequence."""
        self.logits_requests.pop(request, None)
        return self.sequences.pop(request, None)


class StepReporter:
    """Times the tokens of sequences, and reports them and the steps that yield them as metrics."""

    def __init__(self, metrics: GenerationMetrics) -> None:
        self._metrics = metrics

    def step(
        self,
        result: StepResult,
        outputs: Sequence[RequestOutput],
        started: Sequence[RequestState],
        *,
        seconds: float,
        now_s: float,
    ) -> None:
        """Report a step.

        Args:
            result: of the step.
            outputs: of it.
            started: the sequences that had their first step with it.
            seconds: that it took.
            now_s: when it ended.
        """
        for state in started:
            assert state.sequence.started_s is not None
            self._metrics.queued(state.sequence.started_s - state.submission.arrived_s)
        num_prompt_tokens = result.num_prompt_tokens
        self._metrics.step(seconds=seconds, prompt_tokens=num_prompt_tokens, preempted=result.num_preempted)
        self._metrics.speculated(drafted=result.num_drafted, accepted=result.num_accepted)
        num_tokens = 0
        # Few entries, since most sequences received their previous tokens in the same step.
        latencies_s: defaultdict[float, int] = defaultdict(int)
        for sequence, content in outputs:
            if isinstance(content, Delta) and content.token_ids:
                num_tokens += len(content.token_ids)
                if sequence.last_token_s is not None:
                    latencies_s[now_s - sequence.last_token_s] += 1
                sequence.last_token_s = now_s
        self._metrics.generated(tokens=num_tokens, prompt_tokens=num_prompt_tokens, latencies_s=latencies_s)

    def occupancy(self, engine: Engine, *, waiting_tokens: int) -> None:
        """Report the requests in the engine and the use of its KV cache."""
        self._metrics.occupancy(
            running=engine.num_running,
            waiting=engine.num_waiting,
            waiting_tokens=waiting_tokens,
            cache_usage=engine.cache_usage,
        )

    def delta(self, delta: Delta, state: RequestState, *, now_s: float) -> None:
        """Report the first token of a sequence, and the end of its answer."""
        sequence, arrived_s = state.sequence, state.submission.arrived_s
        if sequence.first_token_s is None and delta.token_ids:
            sequence.first_token_s = now_s
            self._metrics.first_token(
                seconds=now_s - arrived_s,
                prompt_tokens=sequence.num_prompt_tokens,
                cached_tokens=sequence.num_cached_tokens,
            )
        if delta.finish_reason is None:
            return
        seconds, num_tokens = now_s - arrived_s, sequence.num_new_tokens
        logger.debug("finished: %s, %d tokens in %.3f s", delta.finish_reason, num_tokens, seconds)
        first_token_s = now_s if sequence.first_token_s is None else sequence.first_token_s
        started_s = now_s if sequence.started_s is None else sequence.started_s
        self._metrics.request_finished(
            delta.finish_reason,
            seconds=seconds,
            prefill_seconds=first_token_s - started_s,
            decode_seconds=now_s - first_token_s,
            prompt_tokens=sequence.num_prompt_tokens,
            new_tokens=num_tokens,
        )

    def ended(self, state: RequestState) -> None:
        """Report the longest answer of a submission when all its sequences have ended."""
        submission = state.submission
        submission.num_open -= 1
        submission.most_tokens = max(submission.most_tokens, state.sequence.num_new_tokens)
        if not submission.num_open:
            self._metrics.choices_finished(most_tokens=submission.most_tokens)
