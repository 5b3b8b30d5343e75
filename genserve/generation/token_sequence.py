"""Token sequence: one growing list of ids, what it still wants, and how it ended."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Generator, Sequence
from enum import Enum, auto
from functools import partial
from types import coroutine
from typing import TYPE_CHECKING, Any, Protocol

from genserve.errors import ModelFailed
from genserve.generation.answer_grammar import AnswerGrammar
from genserve.generation.likelihood import likelihood
from genserve.generation.logit_rules import LogitRules, logit_rules
from genserve.generation.logits_model import LogitsArray
from genserve.generation.plugins import SequencePlugins
from genserve.generation.repetition import NO_BREAKERS, Breakers
from genserve.generation.request import LogitsTaker, Request
from genserve.generation.stages import stages_of
from genserve.generation.truncation import Truncation
from genserve.request import Delta, FinishReason, StopReason, TokenLogprob, TopTokens, Usage
from genserve.sampling.params import SamplingParams

if TYPE_CHECKING:
    from genserve.generation.beam_search import BeamSearch
    from genserve.generation.speculation import Speculation

__all__ = ["AnswerText", "TokenSequence", "Want"]


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
        seed: the request's own, or one drawn for it.
        grammar: the form that the answer must have, and where it stands in it; None: any will do.
        logit_rules: what the request changes of its logits before a token is picked; None: nothing.
        fresh_rules: makes the same, before any token is read.
        truncation: what a draw is made from in the usual way, if `stages` is None.
        stages: what a draw goes through that is not made in the usual way; survives a preemption.
        picks_plainly: no form, rule or stage has a say in its tokens, and no log-probability is told.
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
        "fresh_rules",
        "grammar",
        "logit_rules",
        "params",
        "picked_logprob",
        "picked_top",
        "picks_plainly",
        "plugins",
        "seed",
        "stages",
        "stop_reason",
        "truncation",
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
        dry_breakers: Breakers = NO_BREAKERS,
        plugins: SequencePlugins | None = None,
        deadline_s: float | None = None,
        xtc_spared_ids: Sequence[int] = (),
        grammar: AnswerGrammar | None = None,
        begins_thought: bool = False,
    ) -> None:
        super().__init__(prompt_token_ids)
        self.params = params
        self.grammar = grammar
        self.seed = seed
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
        self.fresh_rules: Callable[[], LogitRules | None] = partial(
            logit_rules,
            params,
            num_prompt_tokens=self.num_prompt_tokens,
            ending_ids=frozenset(i for i in self.ending_ids if i < vocab_size),
            bad_words=bad_words,
            dry_breakers=dry_breakers,
            plugins=self.plugins,
        )
        self.stages = stages_of(params, spared_ids=tuple(i for i in xtc_spared_ids if i < vocab_size))
        self.truncation = Truncation.of(params) if self.stages is None else Truncation()
        self.logit_rules = self.fresh_rules()
        self.picks_plainly = not (params.logprobs or grammar or self.logit_rules or self.stages)
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

    def take_logits(self, taker: LogitsTaker, row: int) -> None:
        """See `Request`: its decoding loop goes on."""
        taker.generate(self, row)

    def score(self, logits: LogitsArray, row: int) -> None:
        """See `Request`: keep how likely the token was that follows in the prompt.

        After a preemption, tokens that were scored already are computed again, and not scored again.
        """
        if self._num_scored < self.num_computed_tokens <= self._num_to_score:
            token_id = self.token_ids[self.num_computed_tokens]
            num_top = self.params.prompt_logprobs or 0
            self._prompt_logprobs.append(likelihood(logits[row], token_id, num_top=num_top))
            self._num_scored += 1

    def take_logprob(self, picked: TokenLogprob | None) -> None:
        """Keep how likely the token is that `sample()` returns next; for the engine."""
        if picked is not None:
            self.picked_logprob, self.picked_top = picked.logprob, picked.top

    def take_surprise(self, bits: float | None) -> None:
        """Learn from how surprising the token is that `sample()` returns next; for the engine."""
        if bits is not None and self.stages is not None:
            self.stages = self.stages.after(bits)

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
        if self.grammar is not None and not self.grammar.accept(token_id):
            raise ModelFailed(f"token id {token_id} came, which its grammar forbids: {self.grammar.failure}")
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
        elif self.grammar is not None and self.grammar.complete:
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
