"""Step reporter: the metrics of an engine's steps, and of the sequences that they generate."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence

from genserve.completion import Delta
from genserve.engine.engine import Engine, StepResult
from genserve.engine.engine_request import SubmittedSequence
from genserve.engine.token_sequence import SequenceOutput, TokenSequence
from genserve.generation_metrics import GenerationMetrics

logger = logging.getLogger(__name__)


class StepReporter:
    """Times the tokens of sequences, and reports them and the steps that yield them as metrics."""

    def __init__(self, metrics: GenerationMetrics) -> None:
        self._metrics = metrics
        # The counts of recurrent states that were reported so far; they stay 0 for other models.
        self._snapshot_hits = 0
        self._recomputed_tokens = 0

    def arrived(self, sequence: TokenSequence) -> None:
        """Report a sequence that waits for its first step."""
        if sequence.request.adapter is not None:
            self._metrics.adapter_requests(sequence.request.adapter, waiting=1)

    def step(
        self,
        result: StepResult,
        outputs: Sequence[SequenceOutput],
        started: Sequence[SubmittedSequence],
        *,
        seconds: float,
        now_s: float,
    ) -> None:
        """Report a step.

        Args:
            result: the result of the engine's step.
            outputs: the outputs that the callers receive.
            started: the sequences that had their first step.
            seconds: the duration of the step.
            now_s: when the step ended.
        """
        for first in started:
            assert first.started_s is not None
            self._metrics.queued(first.started_s - first.submission.arrived_s)
            if isinstance(first, TokenSequence) and first.request.adapter is not None:
                self._metrics.adapter_requests(first.request.adapter, waiting=-1, running=1)
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
            waiting=engine.num_waiting + engine.num_without_adapters.total(),
            waiting_tokens=waiting_tokens,
            cache_usage=engine.cache_usage,
        )
        if engine.has_states:
            hits, recomputed = engine.num_snapshot_hits, engine.num_recomputed_tokens
            self._metrics.states(
                usage=engine.state_usage,
                snapshot_hits=hits - self._snapshot_hits,
                recomputed_tokens=recomputed - self._recomputed_tokens,
            )
            self._snapshot_hits, self._recomputed_tokens = hits, recomputed

    def delta(self, sequence: TokenSequence, delta: Delta, *, now_s: float) -> None:
        """Report the first token of a sequence, and the end of its answer."""
        arrived_s = sequence.submission.arrived_s
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
        timings = sequence.timings(now_s)
        self._metrics.request_finished(
            delta.finish_reason,
            seconds=seconds,
            prefill_seconds=timings.prefill_s,
            decode_seconds=timings.decode_s,
            prompt_tokens=sequence.num_prompt_tokens,
            new_tokens=num_tokens,
        )
        if sequence.request.adapter is not None:
            self._metrics.adapter_finished(sequence.request.adapter, new_tokens=num_tokens)

    def ended(self, sequence: TokenSequence) -> None:
        """Report a sequence that has ended, and the longest answer when all of its submission have."""
        if sequence.request.adapter is not None:
            has_started = sequence.started_s is not None
            self._metrics.adapter_requests(
                sequence.request.adapter, waiting=-1 + has_started, running=-has_started
            )
        submission = sequence.submission
        submission.num_open -= 1
        submission.max_new_tokens = max(submission.max_new_tokens, sequence.num_new_tokens)
        if not submission.num_open:
            self._metrics.choices_finished(most_tokens=submission.max_new_tokens)
