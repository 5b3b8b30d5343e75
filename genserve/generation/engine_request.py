"""Engine requests: the token sequences and logits requests that an engine schedules and computes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from types import coroutine
from typing import Protocol

import numpy as np

from genserve.completion import Delta, FinishReason, StopReason, TokenLogprob
from genserve.errors import ContextLengthExceeded, GenserveError, InvalidRequest, ModelFailed
from genserve.generation.delta_builder import AnswerText, DeltaBuilder
from genserve.generation.sequence_plugins import SequencePlugins
from genserve.prompt import Prompt
from genserve.sampling.batch_sampler import SamplingState
from genserve.sampling.grammar_bitmask import StructuredOutputGrammar
from genserve.sampling.logits_array import LogitsArray, TokenArray
from genserve.sampling.logits_processors import TokenizedParams
from genserve.sampling.sampling_params import SamplingParams

_CHECK_FINISHED = "check `sequence.finished` before each append"
_KEEP_GRAMMAR = "append only tokens of sequence.sample(), and do not undo the grammar in a logits processor"


class LogitsConsumer(Protocol):
    """Receives the logits after the last token of a request, by the kind of the request."""

    def generate(self, sequence: TokenSequence, row: int) -> None:
        """Pass the row, or a token sampled from it, to the decoding loop of the sequence."""

    def answer(self, request: LogitsRequest, row: int) -> None:
        """Answer the request with the row."""

    def search(self, search: SequenceSearch, beam: Request, row: int) -> None:
        """Advance the search once the rows of all its beams have arrived."""


class Request:
    """Tokens to be computed into the KV cache: a token sequence, a beam, or a logits request.

    The defaults here hold unless a kind of request overrides them. Belongs to the engine's thread.

    Attributes:
        token_ids: all known tokens, the prompt first; the engine only reads them.
        num_prompt_tokens: how many of them are the prompt.
        num_computed_tokens: how many of them are in the KV cache; written by the engine.
        num_cached_tokens: how many of the prompt were cached when it was first scheduled; likewise.
        num_preemptions: how often it was preempted.
        cache_salt: only requests with the same salt share blocks.
        priority: of waiting requests, those with the lowest value are scheduled first.
    """

    __slots__ = (
        "cache_salt",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "priority",
        "token_ids",
    )

    def __init__(self, token_ids: Sequence[int], *, cache_salt: str | None = None, priority: int = 0) -> None:
        self.token_ids = list(token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.cache_salt = cache_salt
        self.priority = priority

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
        """Whether it must compute its whole prompt, because it needs logits after those tokens too."""
        return False

    @property
    def max_draft_tokens(self) -> int:
        """How many drafted tokens a step can use after the last one."""
        return 0

    @property
    def lead(self) -> Request:
        """The request that is scheduled for it: itself, or the first beam of its search."""
        return self

    @property
    def group(self) -> Sequence[Request]:
        """Of a lead: the requests that are computed in the same step, itself or all beams of the search."""
        return (self,)

    @property
    def num_seqs(self) -> int:
        """Of a lead: how many sequences its group adds to a forward, now or later."""
        return 1

    @property
    def answers(self) -> Sequence[Request]:
        """The requests that the caller knows: itself, or the answers of its search."""
        return (self,)

    def preempt(self) -> None:
        """Recompute all tokens, since the blocks were freed for other requests."""
        self.num_computed_tokens = 0
        self.num_preemptions += 1

    def give_logits(self, consumer: LogitsConsumer, row: int) -> None:
        """Call the method of `consumer` for this kind of request, with the row after its last token."""
        raise NotImplementedError

    def score(self, logits: LogitsArray, row: int) -> None:
        """Read the logits after the token before `num_computed_tokens`, if prompt_logprobs needs them.

        Args:
            logits: [R, V] float32 of the step.
            row: index of the row.
        """


class LogitsRequest(Request):
    """One row of logits after some tokens, for a caller that is independent of blocks and steps.

    A loop that calls again with one more token does not compute the others again: they stay cached, and the
    next request that starts with them continues there. Belongs to the engine's thread.

    Attributes:
        submitted_s: when it was submitted, by the engine's clock.
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
    ) -> None:
        """Validate the ids.

        Args:
            token_ids: [n] integers.
            on_logits: called once, on the engine's thread, with the logits after the last token or with the
                error; must not block. The logits are [vocab_size] float32 on the model's device, unchanged
                even if they are NaN, and belong to the receiver.
            vocab_size: of the model.
            max_length: of a sequence.

        Raises:
            InvalidRequest: there are none, they are not a list of integers, or one is not in the vocabulary.
            ContextLengthExceeded: there are more than `max_length`.
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
        self.submitted_s = math.inf
        self.pause_s = math.inf
        self._on_logits = on_logits

    @property
    def always_shares_blocks(self) -> bool:
        """True: otherwise a loop would compute all its tokens again for each new one."""
        return True

    def give_logits(self, consumer: LogitsConsumer, row: int) -> None:
        """Answer the request."""
        consumer.answer(self, row)

    def answer(self, content: LogitsArray | GenserveError) -> None:
        """Hand over the logits or the error; for the engine's thread."""
        self._on_logits(content)


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamReorder:
    """How one step of a search changes the blocks of its beams."""

    copies: tuple[tuple[Request, Request], ...]     # (source, target): target continues source, in this order
    leaving: tuple[Request, ...]                    # beams whose blocks are freed


class SequenceSearch(Protocol):
    """Several beams that compete to become the answers of one request; `BeamSearch` implements it."""

    @property
    def answers(self) -> Sequence[TokenSequence]:
        """The sequences that the caller reads."""

    @property
    def beams(self) -> Sequence[Request]:
        """The beams that are followed, the best first."""

    @property
    def lead(self) -> Request:
        """The beam that computes the prompt and is scheduled for all."""

    def step(self, logits: LogitsArray) -> BeamReorder | None:
        """Add a token to each beam; see `BeamSearch.step`."""

    def settle(self) -> None:
        """Complete the answers with the best tokens found so far."""


class Awaited(Enum):
    """The value that a decoding loop awaits; both kinds come from the same forward."""

    TOKEN = auto()      # a token, sampled together with those of the other sequences
    LOGITS = auto()     # the row of logits itself


class TokenSequence(Request):
    """One prompt and its growing answer; the argument of a repository's `decode(self, sequence)`.

    The decoding loop may read everything here, await `sample()` or `logits()`, and call `append`.
    Belongs to the engine's thread.

    Attributes:
        params: the sampling parameters of the request.
        sampling: the rules by which its tokens are sampled, and their state; survives a preemption.
        deadline_s: when the engine ends it, by the engine's clock; None: never.
        started_s: when its first step began, by the engine's clock; None: not yet.
        first_token_s, last_token_s: when its first and its last token so far were sampled; likewise.
        begins_reasoning: whether the prompt ends within reasoning, which the answer continues.
        prompt: as the request has it; None: only its token ids are known.
        finish_reason: None while it runs.
        stop_reason: the stop string, token id or rule that ended it, if any.
        plugins: of the decoder stage.
        search: the beam search that it is an answer of; None: it is decoded by itself. Set by `BeamSearch`.
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
        "begins_reasoning",
        "deadline_s",
        "finish_reason",
        "first_token_s",
        "last_token_s",
        "params",
        "plugins",
        "prompt",
        "sampling",
        "search",
        "started_s",
        "stop_reason",
    )

    is_resumed = False      # True: its caller has received a part of the answer; see resumption.py

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
        begins_reasoning: bool = False,
        prompt: Prompt | None = None,
    ) -> None:
        super().__init__(prompt_token_ids, cache_salt=params.cache_salt, priority=params.priority)
        self.params = params
        self.finish_reason: FinishReason | None = None
        self.stop_reason: StopReason | None = None
        self.deadline_s = deadline_s
        self.started_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.begins_reasoning = begins_reasoning
        self.prompt = prompt
        self.plugins = plugins or SequencePlugins()
        self.search: SequenceSearch | None = None
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
    def max_draft_tokens(self) -> int:
        """The remaining tokens of the answer, less the one that is sampled after the draft."""
        return self._max_length - len(self.token_ids) - 1

    @property
    def lead(self) -> Request:
        """Itself, or the lead of its search."""
        return self if self.search is None else self.search.lead

    @property
    def answers(self) -> Sequence[TokenSequence]:
        """Itself, or the answers of its search."""
        return (self,) if self.search is None else self.search.answers

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
            self._delta.add_logprob()
        ends = token_id in self._eos_token_ids
        if ends or token_id in self._stop_token_ids:
            if self.params.include_stop_str_in_output:
                self._delta.text += self._text.push(token_id)
            self.finish(FinishReason.END_OF_SEQUENCE, stop_reason=None if ends else token_id)
            return
        text = self._text.push(token_id)
        self._delta.text += text
        rule = self.plugins.stopped_by(self.token_ids, text) if self.plugins.stop_rules else None
        if self._text.stop is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP_STRING, self._text.stop
        elif rule is not None and self.num_new_tokens >= self.params.min_tokens:
            self.finish(FinishReason.STOP_STRING, stop_reason=rule)
        elif grammar is not None and grammar.complete:
            self.finish(FinishReason.LENGTH if grammar.cut else FinishReason.END_OF_SEQUENCE)
        elif len(self.token_ids) >= self._max_length:
            self.finish(FinishReason.LENGTH)
        elif (
            (detection := self.params.repetition_detection) is not None
            and self.num_new_tokens >= self.params.min_tokens
            and detection.is_met(self.token_ids, start=self.num_prompt_tokens)
        ):
            self.finish(FinishReason.REPETITION, stop_reason="repetition_detected")

    def finish(self, reason: FinishReason, *, stop_reason: StopReason | None = None) -> None:
        """End the answer; the caller gets both reasons."""
        self.finish_reason, self.stop_reason = FinishReason(reason), stop_reason
        self._delta.text += self._text.flush()
        if self._text.stop is not None:  # the text that was held back completed a stop string
            self.finish_reason, self.stop_reason = FinishReason.STOP_STRING, self._text.stop

    def expire(self) -> None:
        """End the answer because its deadline has passed."""
        if self.search is not None:
            self.search.settle()
        if self.finish_reason is None:
            self.finish(FinishReason.LENGTH, stop_reason="deadline")

    def skip_delivered(self) -> None:
        """Begin the next delta after the answer so far, which another engine has generated and delivered."""
        for token_id in self.token_ids[self.num_prompt_tokens :]:
            self._text.push(token_id)
        self._delta.skip_to(len(self.token_ids))

    def is_expired(self, now_s: float) -> bool:
        """Whether its deadline has passed before it finished."""
        return self.deadline_s is not None and self.deadline_s <= now_s and self.finish_reason is None

    def give_logits(self, consumer: LogitsConsumer, row: int) -> None:
        """Continue the decoding loop."""
        consumer.generate(self, row)

    def score(self, logits: LogitsArray, row: int) -> None:
        """Add the log-probability of the prompt's next token to `prompt_logprobs`.

        After a preemption, tokens that were scored are computed again, but not scored again.
        """
        if self._num_scored < self.num_computed_tokens <= self._num_to_score:
            self._delta.add_prompt_logprob(logits[row], self.token_ids[self.num_computed_tokens])
            self._num_scored += 1

    def take_logprob(self, sampled: TokenLogprob | None) -> None:
        """Keep the log-probability of the token to be appended next; for the engine."""
        if sampled is not None:
            self._delta.sampled = sampled

    def take_delta(self) -> Delta | None:
        """Return the delta since the last call; None if it has fewer tokens than `stream_interval`."""
        return self._delta.take(
            self.token_ids,
            num_cached_tokens=self.num_cached_tokens,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
