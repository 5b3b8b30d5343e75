"""Engine requests: the token sequences and logits requests that an engine schedules and computes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from types import coroutine
from typing import Any, TypeAlias

import numpy as np

from genserve.completion import (
    DEADLINE,
    CacheMatch,
    Delta,
    FinishReason,
    StopReason,
    Timings,
    TokenLogprob,
    Usage,
)
from genserve.engine.delta_builder import AnswerText, DeltaBuilder
from genserve.engine.generation_request import GenerationRequest, OutputSink
from genserve.engine.logits_model import LogitsAdapter
from genserve.engine.prefix_cache import root_key
from genserve.engine.receipt import Receipt
from genserve.engine.sequence_plugins import LogitsProcessor, SequencePlugins
from genserve.engine.state_slots import SequenceState
from genserve.errors import ContextLengthExceeded, GenserveError, InvalidRequest, ModelFailed
from genserve.request_context import NO_KEY, KeyShare
from genserve.sampling.batch_sampler import SamplingState
from genserve.sampling.grammar_bitmask import StructuredOutputGrammar
from genserve.sampling.logits_array import LogitsArray, TokenArray
from genserve.sampling.logits_processors import TokenizedParams
from genserve.sampling.sampling_params import SamplingParams

_CHECK_FINISHED = "check `sequence.finished` before each append"
_KEEP_GRAMMAR = "append only tokens of sequence.sample(), and do not undo the grammar in a logits processor"

# An error is the last output of its sequence, like a delta with a finish reason.
SequenceOutput: TypeAlias = tuple["TokenSequence", Delta | GenserveError]


@dataclass(slots=True, kw_only=True)
class Submission:
    """Sequences that were submitted together."""

    arrived_s: float  # the time before their prompts were prepared
    num_open: int  # how many have not ended
    max_new_tokens: int = 0  # the length of the longest answer that has ended
    has_started: bool = False  # one of them has had its first step


class RequestStatus(Enum):
    """Where a request is, in the words of vLLM."""

    NEW = auto()  # the scheduler does not have it yet
    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()  # it waits again, without its blocks
    FINISHED = auto()  # it has left, and its blocks are free


class BlockTable:
    """The blocks of one request; `KVCacheManager` writes them.

    Attributes:
        block_ids: the blocks, in the order of the tokens.
        keys: keys of the first full blocks, computed or not; added when they are needed.
        num_cached: how many blocks were put into the prefix cache because they are full and computed.
        num_rewrites: counts the changes of `block_ids` other than appending.
        state: its recurrent state; None: it holds no blocks, or the model has no states.
    """

    __slots__ = ("block_ids", "keys", "num_cached", "num_rewrites", "state")

    def __init__(self) -> None:
        self.block_ids: list[int] = []
        self.keys: list[bytes] = []
        self.num_cached = 0
        self.num_rewrites = 0
        self.state: SequenceState | None = None


class SequenceGroup:
    """What the scheduler starts, preempts and removes as one: the beams of a search, or a request by itself.

    Attributes:
        status: whether the group waits, runs, was preempted or has finished.
        priority: the waiting groups with the lowest value are scheduled first.
        share: the share of its API key, which decides between groups of one priority if keys compete.
        arrival: its number in the order of arrival, which decides between the others.
    """

    __slots__ = ("arrival", "priority", "share", "status")

    def __init__(self, *, priority: int, share: KeyShare = NO_KEY) -> None:
        self.status = RequestStatus.NEW
        self.priority = priority
        self.share = share
        self.arrival = 0

    @property
    def requests(self) -> Sequence[Request]:
        """The requests that are computed in the same step."""
        raise NotImplementedError

    @property
    def num_seqs(self) -> int:
        """How many sequences it adds to a forward, now or later."""
        raise NotImplementedError

    @property
    def choices(self) -> Sequence[Request]:
        """The requests that the caller reads: the best answers of a search, or the request itself."""
        raise NotImplementedError

    def conclude(self) -> None:
        """Append the best tokens found so far to the choices, which are about to end."""
        raise NotImplementedError


class Request(SequenceGroup):
    """Tokens to be computed into the KV cache: a token sequence, a beam, or a logits request.

    All but the requests of a beam search are groups of one, whose attributes as a group count.
    The defaults here hold unless a kind of request overrides them. Belongs to the engine's thread.

    Attributes:
        token_ids: all known tokens, the prompt first; the engine only reads them.
        num_prompt_tokens: how many of them are the prompt.
        num_computed_tokens: how many of them are in the KV cache; written by the engine.
        num_cached_tokens: how many tokens of the prompt were cached when the request first ran; written by
            the engine.
        num_preemptions: how often the request was preempted.
        num_drafted_tokens, num_accepted_tokens: how many tokens were drafted for it, and how many of them
            were accepted; written by the engine.
        num_replayed_tokens: how many of its pending tokens are computed again together with the last one,
            since their state was lost with a rejected draft; written by `KVCacheManager`.
        block_table: its blocks of the KV cache.
        cache_salt: only requests with the same salt share blocks.
        adapter: the adapter of the model that computes it, which no block is shared across; None: none.
        cache_match: how far its prompt was cached when it first ran, if it asks; written by `KVCacheManager`.
    """

    __slots__ = (
        "adapter",
        "block_table",
        "cache_match",
        "cache_salt",
        "num_accepted_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_drafted_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_replayed_tokens",
        "token_ids",
    )

    def __init__(self, token_ids: Sequence[int], *, cache_salt: str | None = None, priority: int = 0) -> None:
        super().__init__(priority=priority)
        self.token_ids = list(token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.num_drafted_tokens = 0
        self.num_accepted_tokens = 0
        self.num_replayed_tokens = 0
        self.block_table = BlockTable()
        self.cache_salt = cache_salt
        self.adapter: LogitsAdapter | None = None
        self.cache_match: CacheMatch | None = None

    @property
    def cache_root(self) -> bytes:
        """What is before its first token in the prefix cache."""
        return root_key(self.cache_salt, adapter=None if self.adapter is None else self.adapter.sha256)

    @property
    def num_pending(self) -> int:
        """How many tokens are still to be computed."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def logits_start(self) -> int:
        """Index of the first token after which it needs logits; it needs them after all later ones too."""
        return len(self.token_ids) - 1

    @property
    def always_shares_blocks(self) -> bool:
        """Whether it shares blocks even if the prefix cache is off."""
        return False

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """Whether it must compute its whole prompt, because it needs the logits after prompt tokens too."""
        return False

    @property
    def wants_cache_match(self) -> bool:
        """Whether its `cache_match` is to be written when it starts."""
        return False

    @property
    def max_draft_tokens(self) -> int:
        """How many drafted tokens a step can use after the last one."""
        return 0

    @property
    def group(self) -> SequenceGroup:
        """The group that is scheduled for it: itself, or its beam search."""
        return self

    @property
    def requests(self) -> Sequence[Request]:
        """See `SequenceGroup`."""
        return (self,)

    @property
    def num_seqs(self) -> int:
        """See `SequenceGroup`."""
        return 1

    @property
    def choices(self) -> Sequence[Request]:
        """See `SequenceGroup`."""
        return (self,)

    def conclude(self) -> None:
        """See `SequenceGroup`; a request by itself has nothing to append."""

    def preempt(self) -> None:
        """Recompute all tokens, since the blocks were freed for other requests."""
        self.num_computed_tokens = 0
        self.num_preemptions += 1

    def score(self, logits: LogitsArray, row: int) -> None:
        """Read the logits after the token before `num_computed_tokens`, if prompt_logprobs needs them.

        Args:
            logits: [R, V] float32 of the step.
            row: index of the row.
        """


class SubmittedSequence(Request):
    """A sequence that waits for its first step as long as admission control allows, in an `InputQueue`.

    Attributes:
        submission: the sequences that were submitted with it; set by `InputQueue` like the next two.
        num_accepted_seqs: the number of sequences that admission control counts for it until it ends.
        num_waiting_tokens: the number of prompt tokens that admission control counts until its first step.
        started_s: when its first step began, by the engine's clock; None: not yet.
    """

    __slots__ = ("num_accepted_seqs", "num_waiting_tokens", "started_s", "submission")

    is_resumed = False  # True: its caller has received a part of the answer; see resumption.py
    submission: Submission
    num_accepted_seqs: int
    num_waiting_tokens: int

    def __init__(self, token_ids: Sequence[int], *, cache_salt: str | None = None, priority: int = 0) -> None:
        super().__init__(token_ids, cache_salt=cache_salt, priority=priority)
        self.started_s: float | None = None


class LogitsRequest(Request):
    """One row of logits after some tokens, for a caller that is independent of blocks and steps.

    A loop that calls again with one more token computes only the new token: its tokens stay cached, and the
    next request that starts with them continues there. Belongs to the engine's thread.

    Attributes:
        submitted_s: when the request was submitted, by the engine's clock.
        pause_s: how long its loop took to resume with one more token; infinite for its first request.
    """

    __slots__ = ("_on_logits", "pause_s", "submitted_s")

    def __init__(
        self,
        token_ids: Sequence[int] | TokenArray,
        *,
        on_logits: Callable[[LogitsArray | GenserveError], None],
        vocab_size: int,
        max_length: int,
        share: KeyShare = NO_KEY,
    ) -> None:
        """Validate the ids.

        Args:
            token_ids: [n] integers.
            on_logits: called once, on the engine's thread, with the logits after the last token or with the
                error; must not block. The logits are [vocab_size] float32 on the model's device, unchanged
                even if they are NaN, and belong to the receiver.
            vocab_size: the size of the vocabulary, above all ids.
            max_length: the model's context, in tokens.
            share: the share of the API key for which they are computed.

        Raises:
            InvalidRequest: there are no ids, they are not a list of integers, or an id is not in the
                vocabulary.
            ContextLengthExceeded: there are more ids than `max_length`.
        """
        ids = np.asarray(token_ids)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise InvalidRequest(f"token ids must be a list of integers, not {ids.dtype} {list(ids.shape)}")
        if ids.size == 0:
            raise InvalidRequest("there are no token ids", remedy="give at least one")
        if ids.size > max_length:
            raise ContextLengthExceeded(
                f"{ids.size} token ids are given; the model's context is {max_length}",
                remedy="give fewer, or raise max_sequence_length in the logits stage's config.pbtxt",
            )
        if ids.min() < 0 or ids.max() >= vocab_size:
            wrong = next(i for i in ids.tolist() if not 0 <= i < vocab_size)
            raise InvalidRequest(f"token id {wrong} is outside the vocabulary of {vocab_size}")
        super().__init__(ids.tolist())
        self.share = share
        self.submitted_s = math.inf
        self.pause_s = math.inf
        self._on_logits = on_logits

    @property
    def always_shares_blocks(self) -> bool:
        """True: otherwise a loop would compute all its tokens again for each new one."""
        return True

    def deliver(self, content: LogitsArray | GenserveError) -> None:
        """Pass the logits or the error to `on_logits`; for the engine's thread."""
        self._on_logits(content)


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
