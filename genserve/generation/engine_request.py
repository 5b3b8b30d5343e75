"""Engine requests: token sequences and logits requests, what an engine schedules and computes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Generator, Sequence
from enum import Enum, auto
from types import coroutine
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from genserve.completion import Delta, FinishReason, StopReason, TokenLogprob, TopTokens, Usage
from genserve.errors import ContextLengthExceeded, GenserveError, InvalidRequest, ModelFailed
from genserve.generation.logits_model import LogitsArray, TokenArray
from genserve.generation.sequence_plugins import SequencePlugins
from genserve.sampling.batch_sampler import SamplingState
from genserve.sampling.logits_edits import StructuredOutputGrammar
from genserve.sampling.logits_processors import NO_BREAKERS, DryBreakers
from genserve.sampling.sampler import token_logprob
from genserve.sampling.sampling_params import SamplingParams

if TYPE_CHECKING:
    from genserve.generation.beam_search import Beam, BeamSearch
    from genserve.generation.speculation import Speculation

__all__ = ["AnswerText", "LogitsConsumer", "LogitsRequest", "Request", "TokenSequence", "Want"]


class LogitsConsumer(Protocol):
    """What becomes of the logits behind the last token of a request, by what the request is."""

    def generate(self, sequence: TokenSequence, row: int) -> None:
        """Give the row, or a token picked from it, to the sequence's decoding loop."""

    def answer(self, request: LogitsRequest, row: int) -> None:
        """Answer the request with the row."""

    def search(self, beam: Beam, row: int) -> None:
        """Go on with the beam's search, once it has the rows of all beams."""


class Request:
    """A list of tokens that is computed into the KV cache: a token sequence, a beam, or a logits request.

    What it says here holds where a request does not say otherwise. Belongs to the engine's thread.

    Attributes:
        token_ids: all tokens that are known, the prompt first; read only for the engine.
        num_prompt_tokens: how many of them are the prompt.
        num_computed_tokens: how many of them are in the KV cache; written by the engine.
        num_cached_tokens: how many of the prompt's were there when it was first scheduled; written likewise.
        num_preemptions: how often it had to give its blocks back, and wait again.
    """

    __slots__ = (
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "token_ids",
    )

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = list(token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0

    @property
    def num_pending(self) -> int:
        """How many tokens are still to be computed."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def first_logits(self) -> int:
        """The index of the first token behind which it wants logits; it wants them behind all that follow."""
        return len(self.token_ids) - 1

    @property
    def cache_salt(self) -> str | None:
        """Only requests with the same salt share blocks; None: those without one."""
        return None

    @property
    def always_shares(self) -> bool:
        """Whether it shares blocks though the prefix cache is off."""
        return False

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether it may begin with what is cached; not, if it wants logits behind those tokens too."""
        return True

    @property
    def priority(self) -> int:
        """Of those that wait, the lowest goes first."""
        return 0

    @property
    def lead(self) -> Request:
        """The request that is scheduled for it: itself, or the first beam of its search."""
        return self

    @property
    def group(self) -> Sequence[Request]:
        """Of a lead, those that get their logits in the same step: itself, or all beams of the search."""
        return (self,)

    @property
    def num_seqs(self) -> int:
        """Of a lead, how many sequences its group adds to a forward, sooner or later."""
        return 1

    @property
    def answers(self) -> Sequence[Request]:
        """What the caller knows of it: itself, or the answers of its search."""
        return (self,)

    def preempt(self) -> None:
        """Begin anew, since its blocks are somebody else's."""
        self.num_computed_tokens = 0
        self.num_preemptions += 1

    def draft(self, speculation: Speculation, *, max_tokens: int, least_chance: float) -> Sequence[int]:
        """Return tokens that may follow the last one; see `Speculation.draft`."""
        return ()

    def take_logits(self, taker: LogitsConsumer, row: int) -> None:
        """Say what becomes of the logits behind its last token, row `row` of the step's."""
        raise NotImplementedError

    def score(self, logits: Any, row: int) -> None:
        """Take the logits behind the token before `num_computed_tokens`, if it wants them for their own sake.

        Args:
            logits: [R, V] float32 of the step.
            row: of them.
        """


class LogitsRequest(Request):
    """One row of a plain call of the logits model, which knows nothing of blocks and steps; a `Request`.

    A loop that asks again with one token more is not slower for it: what was computed stays cached, and the
    next request that begins with it goes on there. Belongs to the engine's thread.

    Attributes:
        submitted_s: when it was handed to the engine, by its clock.
        pause_s: how long its caller took to come back with one token more; infinite: it is the first.
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
        """Check the ids.

        Args:
            token_ids: [n] integers.
            on_logits: called once, on the engine's thread, with the logits after the last token or with
                what went wrong; must not block. The logits are [vocab_size] float32, where the model
                runs, whatever it gave, NaN included, and the receiver's own.
            vocab_size: of the model.
            max_length: of a sequence.

        Raises:
            InvalidRequest: there are none, they are no list of integers, or one is outside the vocabulary.
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
    def always_shares(self) -> bool:
        """See `Request`: a loop would compute all its tokens anew for each."""
        return True

    def take_logits(self, taker: LogitsConsumer, row: int) -> None:
        """See `Request`: it is answered."""
        taker.answer(self, row)

    def answer(self, content: LogitsArray | GenserveError) -> None:
        """Hand over the logits or the error; for the engine's thread."""
        self._on_logits(content)


class Want(Enum):
    """What a decoding loop waits for; both come from the same forward."""

    SAMPLE = auto()     # a token, picked by the vectorised sampler for everyone who waits
    LOGITS = auto()     # the row of logits itself


class AnswerText(Protocol):
    """The text of an answer as it grows: whole characters, never past what ends it."""

    @property
    def stop(self) -> str | None:
        """The stop string that has ended the text; None as long as it goes on."""

    def push(self, token_id: int) -> str:
        """Take one more token; return the text that is now safe to show."""

    def flush(self) -> str:
        """Return what was held back; called once, when the tokens ended."""


class TokenSequence(Request):
    """One prompt and its growing answer; what a repository's `decode(self, sequence)` is given.

    The decoding loop may read everything here, await `sample()` or `logits()`, and call `append`.
    Belongs to the engine's thread.

    Attributes:
        token_ids: prompt and answer together; read only. For the rest see `Request`.
        params: the sampling parameters of the request.
        sampling: how its tokens are sampled.
        picked_logprob: of the token that `sample()` has just returned, if the request asks for it.
        picked_top: the most likely ones beside it, or those that are named, if the request asks for them.
        deadline_s: when the engine ends it, by the engine's clock; None: never.
        first_token_s: when its first token was there, by the engine's clock; None: it has none.
        begins_thought: whether the answer begins within a thought, since the prompt leaves one open.
        finish_reason: None while it runs.
        stop_reason: which stop ended it, where the request has a name for it.
        plugins: what the repository adds to its decoding.
        beams: the search that it is an answer of; None: it runs by itself. Written by `BeamSearch`.
    """

    __slots__ = (
        "_delta_logprobs",
        "_delta_top",
        "_eos_token_ids",
        "_max_length",
        "_num_delivered",
        "_num_scored",
        "_num_to_score",
        "_prompt_logprobs",
        "_stop_token_ids",
        "_text",
        "_text_delta",
        "_vocab_size",
        "_wants_top",
        "beams",
        "begins_thought",
        "deadline_s",
        "finish_reason",
        "first_token_s",
        "params",
        "picked_logprob",
        "picked_top",
        "plugins",
        "sampling",
        "stop_reason",
    )

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
        bad_words: Sequence[Sequence[int]] = (),
        dry_breakers: DryBreakers = NO_BREAKERS,
        plugins: SequencePlugins | None = None,
        deadline_s: float | None = None,
        xtc_spared_ids: Sequence[int] = (),
        grammar: StructuredOutputGrammar | None = None,
        begins_thought: bool = False,
    ) -> None:
        super().__init__(prompt_token_ids)
        self.params = params
        self.picked_logprob: float | None = None
        self.picked_top: TopTokens = ()
        self.finish_reason: FinishReason | None = None
        self.stop_reason: StopReason | None = None
        self.deadline_s = deadline_s
        self.first_token_s: float | None = None
        self.begins_thought = begins_thought
        self._eos_token_ids: frozenset[int] = frozenset() if params.ignore_eos else eos_token_ids
        self._stop_token_ids = frozenset(params.stop_token_ids)
        self.plugins = plugins or SequencePlugins()
        self.beams: BeamSearch | None = None
        self.sampling = SamplingState(
            params,
            seed=seed,
            num_prompt_tokens=self.num_prompt_tokens,
            ending_ids=frozenset(i for i in self.ending_ids if i < vocab_size),
            bad_words=bad_words,
            dry_breakers=dry_breakers,
            spared_ids=[i for i in xtc_spared_ids if i < vocab_size],
            plugins=self.plugins,
            grammar=grammar,
        )
        self._text = text
        self._text_delta = ""
        self._delta_logprobs: list[float] = []
        self._delta_top: list[TopTokens] = []
        self._prompt_logprobs: list[TokenLogprob] = []
        self._num_scored = 0
        self._wants_top = bool(params.top_logprobs or params.logprob_token_ids)
        self._num_to_score = 0 if params.prompt_logprobs is None else self.num_prompt_tokens - 1
        self._num_delivered = self.num_prompt_tokens
        self._vocab_size = vocab_size
        room = max_length - self.num_prompt_tokens
        new_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        self._max_length = self.num_prompt_tokens + new_tokens

    @property
    def finished(self) -> bool:
        """Whether the answer has ended."""
        return self.finish_reason is not None

    @property
    def num_pending(self) -> int:
        """How many tokens are still to be computed; none, if the answer has ended."""
        return 0 if self.finish_reason is not None else len(self.token_ids) - self.num_computed_tokens

    @property
    def cache_salt(self) -> str | None:
        """What keeps its tokens in the cache from others; None: shared with all that have no salt."""
        return self.params.cache_salt

    @property
    def priority(self) -> int:
        """Of those that wait, the lowest goes first."""
        return self.params.priority

    @property
    def first_logits(self) -> int:
        """See `Request`: the last token, or the first of the prompt behind which one is to be scored."""
        return self._num_scored if self._num_scored < self._num_to_score else len(self.token_ids) - 1

    @property
    def reads_prefix_cache(self) -> bool:
        """See `Request`: not, if there is something to be scored."""
        return self._num_scored == self._num_to_score

    @property
    def lead(self) -> Request:
        """See `Request`."""
        return self if self.beams is None else self.beams.lead

    @property
    def answers(self) -> Sequence[TokenSequence]:
        """See `Request`."""
        return (self,) if self.beams is None else self.beams.answers

    def draft(self, speculation: Speculation, *, max_tokens: int, least_chance: float) -> Sequence[int]:
        """See `Request`: as many as may still come, but the last, which is picked behind them."""
        max_tokens = min(max_tokens, self._max_length - len(self.token_ids) - 1)
        return speculation.draft(self, max_tokens=max_tokens, least_chance=least_chance)

    def take_logits(self, taker: LogitsConsumer, row: int) -> None:
        """See `Request`: its decoding loop goes on."""
        taker.generate(self, row)

    def score(self, logits: LogitsArray, row: int) -> None:
        """See `Request`: keep how likely the token was that follows in the prompt.

        After a preemption, tokens that were scored already are computed again, and not scored again.
        """
        if self._num_scored < self.num_computed_tokens <= self._num_to_score:
            token_id = self.token_ids[self.num_computed_tokens]
            num_top = self.params.prompt_logprobs or 0
            self._prompt_logprobs.append(token_logprob(logits[row], token_id, num_top=num_top))
            self._num_scored += 1

    def take_logprob(self, picked: TokenLogprob | None) -> None:
        """Keep how likely the token is that `sample()` returns next; for the engine."""
        if picked is not None:
            self.picked_logprob, self.picked_top = picked.logprob, picked.top

    @property
    def seed(self) -> int:
        """The request's seed, or one drawn for it."""
        return self.sampling.seed

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
    def sample(self) -> Generator[Want, Any, int]:
        """Wait for the next token, picked by the request's sampling parameters."""
        token_id: int = yield Want.SAMPLE
        return token_id

    @coroutine
    def logits(self) -> Generator[Want, Any, LogitsArray]:
        """Wait for the logits after the last token: [vocab_size] float32.

        It is a view of the step's buffer: it may be changed, and is gone at the next await. A numpy array;
        of a model that runs on a GPU, a torch tensor there, for which `int(logits.argmax())` works alike.
        """
        row: LogitsArray = yield Want.LOGITS
        return row

    def append(self, token_id: int) -> None:
        """Add one token to the answer and apply the stopping rules.

        Raises:
            ModelFailed: the sequence has ended already, its grammar or the vocabulary has no such id.
            TypeError: the id is no integer.
        """
        if self.finish_reason is not None:
            raise ModelFailed("the decoding loop appended to a sequence that has ended")
        token_id = operator.index(token_id)  # numpy's and torch's integers become Python's
        if not 0 <= token_id < self._vocab_size:
            raise ModelFailed(f"the decoding loop appended token id {token_id}, outside the vocabulary")
        grammar = self.sampling.grammar
        if grammar is not None and not grammar.accept(token_id):
            raise ModelFailed(f"token id {token_id} came, which its grammar forbids: {grammar.failure}")
        self.token_ids.append(token_id)
        if self.params.logprobs:
            self._delta_logprobs.append(math.nan if self.picked_logprob is None else self.picked_logprob)
            self._delta_top += [self.picked_top] if self._wants_top else []
            self.picked_logprob, self.picked_top = None, ()
        ends = token_id in self._eos_token_ids
        if ends or token_id in self._stop_token_ids:
            if self.params.include_stop_str_in_output:
                self._text_delta += self._text.push(token_id)
            self.finish(FinishReason.END_OF_SEQUENCE, stop_reason=None if ends else token_id)
            return
        text = self._text.push(token_id)
        self._text_delta += text
        rule = self.plugins.stopped_by(self.token_ids, text) if self.plugins.stop_rules else None
        if self._text.stop is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP_STRING, self._text.stop
        elif rule is not None and self.num_new_tokens >= self.params.min_tokens:
            self.finish(FinishReason.STOP_STRING, stop_reason=rule)
        elif grammar is not None and grammar.complete:
            self.finish(FinishReason.END_OF_SEQUENCE)
        elif len(self.token_ids) >= self._max_length:
            self.finish(FinishReason.LENGTH)
        elif self.params.repetition_detection is not None and self._goes_in_circles():
            self.finish(FinishReason.REPETITION, stop_reason="repetition_detected")

    def finish(self, reason: FinishReason, *, stop_reason: StopReason | None = None) -> None:
        """End the answer here; `stop_reason` is what the caller is told beside the reason."""
        self.finish_reason, self.stop_reason = FinishReason(reason), stop_reason
        self._text_delta += self._text.flush()
        if self._text.stop is not None:  # the held-back rest completed a stop string
            self.finish_reason, self.stop_reason = FinishReason.STOP_STRING, self._text.stop

    def take_delta(self) -> Delta | None:
        """Return what came since the last call; None if it is less than `stream_interval` asks for."""
        num_new = len(self.token_ids) - self._num_delivered
        is_first = self._num_delivered == self.num_prompt_tokens
        if not self.finished and num_new < (1 if is_first else self.params.stream_interval):
            return None
        token_ids = tuple(self.token_ids[self._num_delivered :])
        delta = Delta(
            text=self._text_delta,
            token_ids=token_ids,
            logprobs=tuple(self._delta_logprobs),
            top_logprobs=tuple(self._delta_top),
            prompt_logprobs=tuple(self._prompt_logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            usage=self._usage() if self.finished else None,
        )
        self._num_delivered = len(self.token_ids)
        self._text_delta = ""
        self._delta_logprobs.clear()
        self._delta_top.clear()
        self._prompt_logprobs.clear()
        return delta

    def is_late(self, now_s: float) -> bool:
        """Whether it still runs, and should not any more."""
        return self.deadline_s is not None and self.deadline_s <= now_s and not self.finished

    def _goes_in_circles(self) -> bool:
        detection = self.params.repetition_detection
        return (
            detection is not None
            and self.num_new_tokens >= self.params.min_tokens
            and detection.is_met(self.token_ids, start=self.num_prompt_tokens)
        )

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=self.num_new_tokens,
            cached_tokens=self.num_cached_tokens,
        )
