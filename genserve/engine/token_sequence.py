"""Token sequence: one prompt and its growing answer, as the engine and a decoding loop see them."""

from __future__ import annotations

import operator
from collections.abc import Coroutine, Generator, Mapping, Sequence
from enum import Enum, auto
from types import coroutine
from typing import Any, TypeAlias

from genserve.completion import (
    DEADLINE,
    Delta,
    FinishReason,
    StopReason,
    Timings,
    TokenLogprob,
    Usage,
)
from genserve.engine.delta_builder import AnswerText, DeltaBuilder
from genserve.engine.engine_request import SequenceGroup, SubmittedSequence
from genserve.engine.generation_request import GenerationRequest, OutputSink
from genserve.engine.receipt import Receipt
from genserve.engine.sequence_plugins import LogitsProcessor, SequencePlugins
from genserve.errors import GenserveError, ModelFailed
from genserve.sampling.batch_sampler import SamplingState
from genserve.sampling.grammar_bitmask import StructuredOutputGrammar
from genserve.sampling.logits_array import LogitsArray
from genserve.sampling.logits_processors import TokenizedParams
from genserve.sampling.sampling_params import SamplingParams

_CHECK_FINISHED = "check `sequence.finished` before each append"
_KEEP_GRAMMAR = "append only tokens of sequence.sample(), and do not undo the grammar in a logits processor"


class Awaited(Enum):
    """The value that a decoding loop awaits; both kinds come from the same forward."""

    TOKEN = auto()  # a token; one call samples the tokens of all sequences
    LOGITS = auto()  # the row of logits itself


class TokenSequence(SubmittedSequence):
    """One prompt and its growing answer; the argument of a repository's `decode(self, sequence)`.

    The decoding loop may read everything here, await `sample()` or `logits()`, and call `append`.
    Belongs to the engine's thread.

    Attributes:
        params: the sampling parameters of the request.
        sampling: the rules by which its tokens are sampled, and their state; survives a preemption.
        deadline_s: when the engine ends the sequence, by the engine's clock; None: never.
        first_token_s, last_token_s: when its first and its last token so far were sampled, by the engine's
            clock; None: not yet.
        finish_reason: why the answer ended; None while the sequence runs.
        stop_reason: the stop string, token id or rule that ended the answer, if any.
        plugins: the plug-ins of the decoder stage.
        search: the beam search of which the sequence is a choice; None: no beam search. Set by `BeamSearch`.
        loop, awaited: its decoding loop and the value that the loop awaits; None: the loop has not started,
            or has ended. Written by `DecodingLoops`.
        request, choice: its request and its number among the choices; set by `SequenceBuilder`.
        receipt: the receipt of the answer; None: the request does not ask for it. Set by `SequenceBuilder`.
        sink: receives the sequence's outputs; set by `submit`.
    """

    __slots__ = (
        "_delta",
        "_eos_token_ids",
        "_max_length",
        "_num_scored",
        "_num_to_score",
        "_stop_token_ids",
        "_text",
        "_vocab_size",
        "awaited",
        "choice",
        "deadline_s",
        "finish_reason",
        "first_token_s",
        "last_token_s",
        "loop",
        "params",
        "plugins",
        "receipt",
        "request",
        "sampling",
        "search",
        "sink",
        "stop_reason",
    )

    request: GenerationRequest
    choice: int
    sink: OutputSink

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        *,
        params: SamplingParams,
        seed: int,
        eos_token_ids: frozenset[int],
        text: AnswerText,
        max_length: int,
        vocab_size: int,
        tokenized: TokenizedParams | None = None,
        plugins: SequencePlugins | None = None,
        deadline_s: float | None = None,
        grammar: StructuredOutputGrammar | None = None,
    ) -> None:
        super().__init__(prompt_token_ids, cache_salt=params.cache_salt, priority=params.priority)
        self.params = params
        self.finish_reason: FinishReason | None = None
        self.stop_reason: StopReason | None = None
        self.deadline_s = deadline_s
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.plugins = plugins or SequencePlugins()
        self.search: SequenceGroup | None = None
        self.receipt: Receipt | None = None
        self.loop: Coroutine[Any, Any, None] | None = None
        self.awaited: Awaited | None = None
        self._eos_token_ids: frozenset[int] = frozenset() if params.ignore_eos else eos_token_ids
        self._stop_token_ids = frozenset(params.stop_token_ids)
        self.sampling = SamplingState(
            params,
            seed=seed,
            num_prompt_tokens=self.num_prompt_tokens,
            ending_ids=frozenset(i for i in self.ending_ids if i < vocab_size),
            tokenized=tokenized or TokenizedParams(),
            plugins=self.plugins,
            grammar=grammar,
        )
        self._text = text
        self._delta = DeltaBuilder(params, num_prompt_tokens=self.num_prompt_tokens)
        self._num_scored = 0
        self._num_to_score = 0 if params.prompt_logprobs is None else self.num_prompt_tokens - 1
        self._vocab_size = vocab_size
        most = max_length if params.max_tokens is None else self.num_prompt_tokens + params.max_tokens
        self._max_length = min(most, max_length)

    @property
    def finished(self) -> bool:
        """Whether the answer has ended."""
        return self.finish_reason is not None

    @property
    def num_pending(self) -> int:
        """How many tokens are still to be computed; 0 once the answer has ended."""
        return 0 if self.finish_reason is not None else len(self.token_ids) - self.num_computed_tokens

    @property
    def logits_start(self) -> int:
        """The last token, or the first one of the prompt after which a token is to be scored."""
        return self._num_scored if self._num_scored < self._num_to_score else len(self.token_ids) - 1

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """True while tokens of the prompt are to be scored."""
        return self._num_scored < self._num_to_score

    @property
    def wants_cache_match(self) -> bool:
        """Whether the request asks for it, and the sequence starts for the first time."""
        return self.params.return_cache_match and not (self.num_preemptions or self.is_resumed)

    @property
    def max_draft_tokens(self) -> int:
        """The remaining tokens of the answer, less the one that is sampled after the draft."""
        return self._max_length - len(self.token_ids) - 1

    @property
    def group(self) -> SequenceGroup:
        """Itself, or its search."""
        return self if self.search is None else self.search

    @property
    def ending_ids(self) -> frozenset[int]:
        """The tokens that end the answer."""
        return self._eos_token_ids | self._stop_token_ids

    @property
    def max_new_tokens(self) -> int:
        """How many tokens the answer can have."""
        return self._max_length - self.num_prompt_tokens

    @property
    def num_new_tokens(self) -> int:
        """How many tokens the answer has."""
        return len(self.token_ids) - self.num_prompt_tokens

    @coroutine
    def sample(self) -> Generator[Awaited, int, int]:
        """Wait for the next token, sampled by the request's parameters."""
        return (yield Awaited.TOKEN)

    @coroutine
    def logits(self) -> Generator[Awaited, LogitsArray, LogitsArray]:
        """Wait for the logits after the last token: [vocab_size] float32.

        It is a view of the step's buffer: it may be changed, and is overwritten after the next await. A numpy
        array; of a model on a GPU, a torch tensor there, for which `int(logits.argmax())` works as well.
        """
        return (yield Awaited.LOGITS)

    def append(self, token_id: int) -> None:
        """Add one token to the answer and apply the stop conditions.

        Raises:
            ModelFailed: the sequence has ended, or its grammar or the vocabulary does not allow the id.
            TypeError: the id is not an integer.
        """
        if self.finish_reason is not None:
            raise ModelFailed("the decoding loop appended to a finished sequence", remedy=_CHECK_FINISHED)
        token_id = operator.index(token_id)  # numpy's and torch's integers become Python's
        if not 0 <= token_id < self._vocab_size:
            raise ModelFailed(f"the decoding loop appended token id {token_id}, outside the vocabulary")
        grammar = self.sampling.grammar
        if grammar is not None and not grammar.accept(token_id):
            message = f"token id {token_id} is not allowed by the request's grammar: {grammar.failure}"
            raise ModelFailed(message, remedy=_KEEP_GRAMMAR)
        self.token_ids.append(token_id)
        if self.params.logprobs:
            self._delta.add_logprob(token_id)
        ends = token_id in self._eos_token_ids
        if ends or token_id in self._stop_token_ids:
            if self.params.include_stop_str_in_output:
                self._delta.text += self._text.push(token_id)
            self.finish(FinishReason.STOP, stop_reason=None if ends else token_id)
            return
        text = self._text.push(token_id)
        self._delta.text += text
        rule = self.plugins.stopped_by(self.token_ids, text) if self.plugins.stop_rules else None
        if self._text.stop is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP, self._text.stop
        elif rule is not None and self.num_new_tokens >= self.params.min_tokens:
            self.finish(FinishReason.STOP, stop_reason=rule)
        elif grammar is not None and grammar.complete:
            self.finish(FinishReason.LENGTH if grammar.cut else FinishReason.STOP)
        elif len(self.token_ids) >= self._max_length:
            self.finish(FinishReason.LENGTH)
        elif (
            (detection := self.params.repetition_detection) is not None
            and self.num_new_tokens >= self.params.min_tokens
            and detection.is_met(self.token_ids, start=self.num_prompt_tokens)
        ):
            self.finish(FinishReason.REPETITION, stop_reason="repetition_detected")

    def add_processor(self, name: str, processor: LogitsProcessor) -> None:
        """Have one more logits processor from the next token on."""
        self.plugins.add(name, processor)
        self.sampling.add_plugins(self.plugins)

    def finish(self, reason: FinishReason, *, stop_reason: StopReason | None = None) -> None:
        """End the answer; the caller gets both reasons."""
        self.finish_reason, self.stop_reason = FinishReason(reason), stop_reason
        self._delta.text += self._text.flush()
        if self._text.stop is not None:  # the text that was held back completed a stop string
            self.finish_reason, self.stop_reason = FinishReason.STOP, self._text.stop

    def expire(self) -> None:
        """End the answer because its deadline has passed."""
        self.group.conclude()
        if self.finish_reason is None:
            self.finish(FinishReason.LENGTH, stop_reason=DEADLINE)

    def is_expired(self, now_s: float) -> bool:
        """Whether its deadline has passed before it finished."""
        return self.deadline_s is not None and self.deadline_s <= now_s and self.finish_reason is None

    def score(self, logits: LogitsArray, row: int) -> None:
        """Add the log-probability of the prompt's next token to `prompt_logprobs`.

        After a preemption, tokens that were scored are computed again, but not scored again.
        """
        if self._num_scored < self.num_computed_tokens <= self._num_to_score:
            self._delta.add_prompt_logprob(logits[row], self.token_ids[self.num_computed_tokens])
            self._num_scored += 1

    def set_logprob(self, token_id: int, sampled: TokenLogprob | None) -> None:
        """Record the log-probability of the token that was sampled to be appended next; for the engine."""
        if sampled is not None:
            self._delta.sampled = token_id, sampled

    def pop_delta(self, now_s: float | None = None) -> Delta | None:
        """Return the delta since the last call; None if it has fewer tokens than `stream_interval`.

        `now_s` is the time by the engine's clock, for the timings of an answer that has ended; None: the
        usage has no timings.
        """
        return self._delta.pop(
            self.token_ids,
            num_cached_tokens=self.num_cached_tokens,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            usage=None if self.finish_reason is None else self._usage(now_s),
        )

    def _usage(self, now_s: float | None) -> Usage:
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=self.num_new_tokens,
            cached_tokens=self.num_cached_tokens,
            timings=None if now_s is None or self.is_resumed else self.timings(now_s),
            cache_match=self.cache_match,
            receipt=self._written_receipt(),
        )

    def _written_receipt(self) -> Mapping[str, Any] | None:
        if self.receipt is None or self.finish_reason is None:
            return None
        adapter: Mapping[str, str] | None = None
        if self.adapter is not None:
            adapter = {"name": self.request.adapter or "", "sha256": self.adapter.sha256}
        return self.receipt.written(
            self.token_ids[self.num_prompt_tokens :],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            is_whole=not self.is_resumed,
            adapter=adapter,
        )

    def timings(self, now_s: float) -> Timings:
        """Return how long the phases of the answer, which ends now, have taken."""
        started_s = now_s if self.started_s is None else self.started_s
        first_token_s = now_s if self.first_token_s is None else self.first_token_s
        return Timings(
            queue_s=started_s - self.submission.arrived_s,
            prefill_s=first_token_s - started_s,
            decode_s=now_s - first_token_s,
            drafted_tokens=self.num_drafted_tokens,
            accepted_tokens=self.num_accepted_tokens,
        )


# An error is the last output of its sequence, like a delta with a finish reason.
SequenceOutput: TypeAlias = tuple[TokenSequence, Delta | GenserveError]
