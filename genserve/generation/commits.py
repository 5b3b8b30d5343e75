"""Commits: what a step makes of the logits, a token or a row for each sequence that is fully computed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from genserve.errors import SEE_LOG, GenserveError, InvalidRequest, ModelFailed
from genserve.generation.beam import Beam
from genserve.generation.decoding_loops import DecodingLoops
from genserve.generation.likelihood import likelihood
from genserve.generation.logits_model import LogitsArray, on_host
from genserve.generation.logits_request import LogitsRequest
from genserve.generation.pick import RowPicker, pick
from genserve.generation.planner import StepPlan, Verify
from genserve.generation.residents import Occupant
from genserve.generation.sampler import select_rows
from genserve.generation.slots import Slots
from genserve.generation.speculation import Speculation
from genserve.generation.token_sequence import TokenSequence, Want

__all__ = ["Commits", "Outcome"]

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a step has done so far."""

    generating: dict[TokenSequence, None] = field(default_factory=dict)
    answered: list[tuple[LogitsRequest, LogitsArray]] = field(default_factory=list)
    failed: dict[Occupant, GenserveError] = field(default_factory=dict)
    num_drafted: int = 0
    num_accepted: int = 0


class Commits:
    """The commits of one engine's steps. Belongs to the engine's thread."""

    def __init__(
        self,
        slots: Slots,
        loops: DecodingLoops,
        *,
        picker: RowPicker,
        prefix_cache: bool,
        speculation: Speculation | None,
        clock: Callable[[], float],
    ) -> None:
        """Take what the engine is made of; see `Engine`."""
        self._slots = slots
        self._loops = loops
        self._picker = picker
        self._prefix_cache = prefix_cache
        self._speculation = speculation
        self._clock = clock

    def run(self, plan: StepPlan, logits: LogitsArray, rows: Sequence[int]) -> Outcome:
        """Commit what a forward gave, and after a verification the next tokens too.

        Args:
            plan: that was run.
            logits: [R, V] float32; overwritten.
            rows: of `logits`, one for each sequence of the plan.
        """
        outcome = Outcome()
        self._commit_rows(logits, list(zip(rows, plan.sequences, strict=True)), outcome)
        if isinstance(plan, Verify):
            self._follow(plan, logits, rows, outcome)
        return outcome

    def _follow(self, plan: Verify, logits: LogitsArray, rows: Sequence[int], outcome: Outcome) -> None:
        """Go on with each sequence as long as its tokens are those that were run."""
        assert self._speculation is not None
        following = list(zip(rows, plan.sequences, plan.tokens, strict=True))
        num_right = dict.fromkeys(plan.sequences, 1)
        for position in range(1, plan.width):
            following = [
                (row, s, tokens)
                for row, s, tokens in following
                if s not in outcome.failed and _has_next(s, tokens[position:])
            ]
            for _, sequence, _ in following:
                sequence.num_computed += 1
                num_right[sequence] += 1
            self._commit_rows(logits, [(row + position, s) for row, s, _ in following], outcome)
        for sequence, num_known, tokens in zip(plan.sequences, plan.num_known, plan.tokens, strict=True):
            if isinstance(sequence, TokenSequence) and num_known < len(tokens):
                accepted = max(0, num_right[sequence] - num_known)
                outcome.num_drafted += len(tokens) - num_known
                outcome.num_accepted += accepted
                self._speculation.note_outcome(sequence, accepted=accepted)

    def _commit_rows(
        self, logits: LogitsArray, rows: Sequence[tuple[int, Occupant]], outcome: Outcome
    ) -> None:
        """Give each of those that is fully computed its token or its row."""
        ready = [(row, s) for row, s in rows if s.num_pending == 0]
        asking = [(row, s) for row, s in ready if isinstance(s, LogitsRequest)]
        # To index with a list is to copy, for numpy and for torch: the buffer is the next step's.
        rows_asked = logits[[row for row, _ in asking]] if asking else ()
        outcome.answered += [(s, row) for (_, s), row in zip(asking, rows_asked, strict=True)]
        _score(logits, rows)
        generating = [(row, s) for row, s in ready if isinstance(s, TokenSequence)]
        outcome.generating |= dict.fromkeys(s for _, s in generating)
        failed = outcome.failed
        sampling: list[tuple[int, TokenSequence]] = []
        for row, sequence in generating:
            try:
                want = self._loops.want(sequence)
                if sequence.num_pending:
                    continue  # it began with tokens of its own: these logits are not what it waits for
                if want is Want.LOGITS:
                    self._loops.resume(sequence, logits[row])
                elif want is Want.SAMPLE:
                    sampling.append((row, sequence))
            except GenserveError as error:
                failed[sequence] = error
        self._sample(logits, sampling, failed)
        searched = self._search(logits, {s: row for row, s in ready if isinstance(s, Beam)}, failed)
        outcome.generating |= dict.fromkeys(searched)

    def _search(
        self, logits: LogitsArray, row_of: Mapping[Beam, int], failed: dict[Occupant, GenserveError]
    ) -> list[TokenSequence]:
        """Move each beam search by one token; returns the answers."""
        advanced: list[TokenSequence] = []
        for search in dict.fromkeys(beam.search for beam in row_of):
            rows = logits[[row_of[beam] for beam in search.beams if beam in row_of]]
            try:
                reorder = search.step(on_host(rows))
            except Exception:
                logger.exception("beam search failed")
                failure = ModelFailed("beam search failed", remedy=SEE_LOG)
                failed.update(dict.fromkeys(search.answers, failure))
                continue
            if reorder is None:
                failed.update(dict.fromkeys(search.answers, _not_finite(search.answers[0])))
                continue
            if search.done and self._prefix_cache:
                self._slots.park(search.lead, now_s=self._clock())
            else:
                self._slots.release(reorder.leaving)
            for copy in reorder.copies if search.together else ():
                self._slots.copy(source=copy.source, target=copy.target)
            advanced += search.answers
        return advanced

    def _sample(
        self,
        logits: LogitsArray,
        sampling: Sequence[tuple[int, TokenSequence]],
        failed: dict[Occupant, GenserveError],
    ) -> None:
        if not sampling:
            return
        sequences = [s for _, s in sampling]
        rows = select_rows(logits, [row for row, _ in sampling])
        try:
            picks = pick(rows, sequences, picker=self._picker)
        except Exception:
            logger.exception("sampling failed")
            failure = ModelFailed("sampling failed", remedy=SEE_LOG)
            failed.update(dict.fromkeys(sequences, failure))
            return
        for sequence, picked in zip(sequences, picks, strict=True):
            if not picked.finite:
                failed[sequence] = _not_finite(sequence)
                continue
            sequence.take_logprob(picked.logprob)
            sequence.take_surprise(picked.surprise_bits)
            try:
                self._loops.resume(sequence, picked.token_id)
            except GenserveError as error:
                failed[sequence] = error


def _score(logits: LogitsArray, rows: Iterable[tuple[int, Occupant]]) -> None:
    """Tell those that ask how likely the next token of their prompt is."""
    for row, sequence in rows:
        if isinstance(sequence, TokenSequence) and (token_id := sequence.unscored) is not None:
            num_top = sequence.params.prompt_logprobs or 0
            sequence.add_score(likelihood(logits[row], token_id, num_top=num_top))


def _has_next(sequence: Occupant, tokens: Sequence[int]) -> bool:
    """Whether the first of its tokens that are not computed is the first of these."""
    if isinstance(sequence, TokenSequence) and sequence.finished:
        return False
    return sequence.num_pending > 0 and sequence.token_ids[sequence.num_computed] == next(iter(tokens), None)


def _not_finite(sequence: TokenSequence) -> GenserveError:
    if sequence.plugins.failure is not None:
        return sequence.plugins.failure
    if sequence.grammar is not None and (failure := sequence.grammar.failure):
        message = f"structured_outputs became too much to follow: {failure}"
        return InvalidRequest(message, field="structured_outputs", remedy="ask for a simpler form")
    if sequence.logit_rules is None and sequence.grammar is None:
        return ModelFailed("the model's logits are not finite")
    return ModelFailed(
        "the model's logits are not finite, or what the request forbids leaves no token",
        remedy="forbid less: allowed_token_ids, suppress_tokens, bad_words, min_tokens, no_repeat_ngram_size",
    )
