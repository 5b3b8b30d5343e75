"""Engine thread: the thread that owns an engine, and runs its steps while there are requests."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from genserve.completion import Delta
from genserve.errors import SEE_LOG, Closed, GenserveError, ModelFailed, Overloaded
from genserve.generation.admission_control import AdmissionControl, QueueLimits
from genserve.generation.engine import Engine, StepResult
from genserve.generation.engine_request import LogitsRequest, Request, TokenSequence
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
        self._on_close = on_close
        self._states: dict[Request, RequestState] = {}          # of the sequences in the engine
        self._unanswered: dict[Request, LogitsRequest] = {}
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
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of the sequences that wait for their first step."""
        return self._admission.num_tokens

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

    @property
    def _busy(self) -> bool:
        return bool(self._states or self._unanswered)

    def _run(self) -> None:
        # From within: for a thread that has ended, the call would crash the process.
        if sys.platform == "linux":
            self._cpu_clock = time.pthread_getcpuclockid(threading.get_ident())
        try:
            while self._wait_for_work(busy=self._busy):
                self.num_turns += 1
                self._add_arrivals()
                self._gather()
                stepped = self._step()
                self._reject_overdue()
                if not stepped:
                    self._wait_for_place()
                self._report_occupancy()
            self._end_all(
                Closed("the model was unloaded, or the server stopped, before the answer was complete")
            )
        except BaseException:
            logger.exception("engine thread died")
            failure = ModelFailed("the engine failed", remedy=f"load its model again; {SEE_LOG}")
            with self._changed:
                self._failure = failure
            self._end_all(failure)

    def _register_arrivals(self) -> Arrivals:
        """Take over the new requests, all of them before the engine has one: so each ends if it fails."""
        arrivals = self._take_arrivals()
        self._states.update((state.sequence, state) for state in arrivals.sequences)
        self._unanswered.update((request, request) for request in arrivals.logits_requests)
        return arrivals

    def _add_arrivals(self) -> None:
        arrivals = self._register_arrivals()
        for state in arrivals.sequences:
            self._engine.add(state.sequence)
        for request in arrivals.logits_requests:
            self._engine.add_logits(request)
        if arrivals.cancelled:
            cancelled = {answer for request in arrivals.cancelled for answer in request.answers}
            cancelled &= self._states.keys() | self._unanswered.keys()
            self._engine.remove(cancelled)
            for left in cancelled:
                self._metrics.request_cancelled()
                self._end(left)

    def _gather(self) -> None:
        """Wait briefly for loops over logits that always resume, so that they share the step.

        Otherwise loops that are answered together and resume microseconds apart fall into groups that
        take turns, with steps as long as one for all of them.
        """
        if not self._busy:
            return
        share = _GATHER_SHARE_WITH_SEQUENCES if self._states else _GATHER_SHARE
        while not self._closing:
            num_awaited, seconds = self._engine.expected_to_resume(within_s=share * self._decode_s)
            if not num_awaited:
                return
            self._wait_for_change(seconds, num_awaited=num_awaited)
            self._add_arrivals()

    def _wait_for_place(self) -> None:
        """Wait until a held place becomes free, or a sequence that waits for it has to end."""
        now_s = self._engine.clock()
        ends_s = min(self._engine.next_deadline_s, self._next_overdue_s)
        self._wait_for_change(max(0.0, min(self._engine.held_s, ends_s - now_s)))

    def _report_occupancy(self) -> None:
        self._metrics.occupancy(
            running=self._engine.num_running,
            waiting=self._engine.num_waiting,
            waiting_tokens=self._admission.num_tokens,
            cache_usage=self._engine.cache_usage,
        )

    def _step(self) -> bool:
        """Run a step; False if there are requests, but all places are held for paused loops."""
        started_s = time.monotonic()
        result = self._engine.step()
        if result is None:
            expired = self._outputs(self._engine.expire())
            self._deliver(expired, now_s=self._engine.clock())
            return not self._busy
        self._num_steps += 1
        seconds = time.monotonic() - started_s
        now_s = self._engine.clock()
        outputs = self._outputs(result)
        self._note_step(result, outputs, seconds=seconds, now_s=now_s)
        self._deliver(outputs, now_s=now_s)
        for request, logits in result.answered:
            self._answer(request, logits)
        for failed, error in result.failed.items():
            if failed in self._unanswered:
                self._answer(self._unanswered[failed], error)
        return True

    def _note_step(
        self, result: StepResult, outputs: Sequence[RequestOutput], *, seconds: float, now_s: float
    ) -> None:
        started = self._start(
            result.started,
            seconds=seconds,
            full=result.full,
            num_waiting=self._engine.num_waiting,
            now_s=now_s,
        )
        for state in started:
            state.sequence.started_s = max(now_s - seconds, state.submission.arrived_s)
            self._metrics.queued(state.sequence.started_s - state.submission.arrived_s)
        if not result.num_prompt_tokens:
            self._decode_s = seconds
        self._metrics.step(
            seconds=seconds, prompt_tokens=result.num_prompt_tokens, preempted=result.num_preempted
        )
        self._metrics.speculated(drafted=result.num_drafted, accepted=result.num_accepted)
        num_tokens, latencies_s = _note_tokens(outputs, now_s=now_s)
        self._metrics.generated(
            tokens=num_tokens, prompt_tokens=result.num_prompt_tokens, latencies_s=latencies_s
        )

    def _reject_overdue(self) -> None:
        """End the sequences that have waited too long for their first step."""
        overdue = self._overdue(self._states)
        if overdue:
            self._engine.remove(sequence for sequence, _ in overdue)
            self._deliver(overdue, now_s=self._engine.clock())

    def _outputs(self, result: StepResult) -> list[RequestOutput]:
        outputs: list[RequestOutput] = [
            (self._states[request].sequence, error)
            for request, error in result.failed.items()
            if request in self._states
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
            state = self._states[sequence]
            batches[state.sink].append((sequence, content))
            self._note_output(sequence, content, state, now_s=now_s)
        for sink, batch in batches.items():
            try:
                sink.deliver(batch)
            except RuntimeError:  # its event loop is closed, so the outputs cannot be read any more
                for sequence, _ in batch:
                    self.cancel(sequence)

    def _note_output(
        self, sequence: TokenSequence, content: Delta | GenserveError, state: RequestState, *, now_s: float
    ) -> None:
        if isinstance(content, GenserveError):
            if not isinstance(content, Overloaded):     # which is counted as a rejection
                self._metrics.request_failed()
            self._end(sequence)
            return
        if sequence.first_token_s is None and content.token_ids:
            sequence.first_token_s = now_s
            self._metrics.first_token(
                seconds=now_s - state.submission.arrived_s,
                prompt_tokens=sequence.num_prompt_tokens,
                cached_tokens=sequence.num_cached_tokens,
            )
        if content.finish_reason is not None:
            seconds, num_tokens = now_s - state.submission.arrived_s, sequence.num_new_tokens
            logger.debug("finished: %s, %d tokens in %.3f s", content.finish_reason, num_tokens, seconds)
            first_token_s = now_s if sequence.first_token_s is None else sequence.first_token_s
            started_s = now_s if sequence.started_s is None else sequence.started_s
            self._metrics.request_finished(
                content.finish_reason,
                seconds=seconds,
                prefill_seconds=first_token_s - started_s,
                decode_seconds=now_s - first_token_s,
                prompt_tokens=sequence.num_prompt_tokens,
                new_tokens=num_tokens,
            )
            self._end(sequence)

    def _answer(self, request: LogitsRequest, content: LogitsArray | GenserveError) -> None:
        if isinstance(content, GenserveError):
            self._metrics.request_failed()
        self._end(request)
        try:
            request.answer(content)
        except Exception:
            logger.exception("the receiver of logits failed")

    def _end(self, request: Request) -> None:
        state = self._states.pop(request, None)
        self._unanswered.pop(request, None)
        if state is None:
            self._leave(request, num_seqs=1)
            return
        submission = state.submission
        submission.num_open -= 1
        submission.most_tokens = max(submission.most_tokens, state.sequence.num_new_tokens)
        if not submission.num_open:
            self._metrics.choices_finished(most_tokens=submission.most_tokens)
        self._leave(request, num_seqs=state.num_seqs, started_s=state.sequence.started_s)

    def _end_all(self, error: GenserveError) -> None:
        arrivals = self._register_arrivals()
        try:
            self._engine.remove([*self._states, *self._unanswered])
            self._report_occupancy()
        except Exception:   # of an engine that has failed; its requests end nevertheless
            logger.exception("the engine did not drop its requests")
        for request in arrivals.cancelled:
            for answer in request.answers:
                if answer in self._states or answer in self._unanswered:
                    self._metrics.request_cancelled()
                    self._end(answer)
        outputs: list[RequestOutput] = [(state.sequence, error) for state in self._states.values()]
        self._deliver(outputs, now_s=self._engine.clock())
        for request in tuple(self._unanswered.values()):
            self._answer(request, error)


def _note_tokens(outputs: Sequence[RequestOutput], *, now_s: float) -> tuple[int, dict[float, int]]:
    """Return the number of new tokens, and the number of sequences by the seconds since their previous ones.

    These are few entries, since most sequences received their previous tokens in the same step.
    """
    num_tokens = 0
    latencies_s: defaultdict[float, int] = defaultdict(int)
    for sequence, content in outputs:
        if isinstance(content, Delta) and content.token_ids:
            num_tokens += len(content.token_ids)
            if sequence.last_token_s is not None:
                latencies_s[now_s - sequence.last_token_s] += 1
            sequence.last_token_s = now_s
    return num_tokens, latencies_s
