"""Speculation: verify several drafted tokens of a sequence in one step.

Drafted tokens run in the same forward, after the last token of their sequence. The sequence's tokens are
then sampled one by one from the model's own logits, by the request's parameters and draws. As long as the
sampled token is the drafted one, the next row of logits is already there. So the text is the same as without
speculation, random draws included. This is the acceptance rule of Leviathan et al., "Fast Inference from
Transformers via Speculative Decoding" (ICML 2023), and Chen et al. (2023), for a draft that gives each token
probability 1, with the sampler's draw in place of the acceptance draw.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from genserve.engine.engine_request import Request
from genserve.engine.logits_model import ForwardBatch, LogitsModel
from genserve.engine.state_slots import NO_SLOT

logger = logging.getLogger(__name__)

# The acceptance rate while nothing is known, as moving averages of the numbers of right and wrong tokens.
_INITIAL_RIGHT = 2.0
_INITIAL_WRONG = 1.0
_NEWEST = 0.2  # weight of the last draft in the rate of its sequence
_NEWEST_OF_ALL = 0.05  # its weight in the rate of all sequences, with which new sequences start
# Each step without a draft moves the rate of a sequence by this share to the rate of all sequences, and that
# rate to the initial one. Otherwise drafting would never be tried again.
_RECOVERY = 0.005
_RECOVERY_OF_ALL = 0.0005

_NGRAM_SIZES = (4, 3, 2)  # prompt lookup searches for that many last tokens, in this order
_MAX_DRAFT_TOKENS = 5  # of one draft
_CHUNK = 256  # tokens of a prompt that a draft model computes in one step, while sequences wait


class Proposer(Protocol):
    """Proposes the tokens that may come next in a sequence."""

    def kind(self, request: Request) -> int | None:
        """Return which kind of guess it has, each with an acceptance rate of its own; None: no good one."""
        del request
        return 0

    def propose(self, request: Request, count: int) -> Sequence[int]:
        """Return up to `count` tokens that may follow the last one; empty if it has no good guess."""

    def drop(self, request: Request) -> None:
        """Forget a sequence that leaves; does nothing if it is unknown."""


@dataclass(slots=True)
class _AcceptanceRate:
    num_right: float = _INITIAL_RIGHT
    num_wrong: float = _INITIAL_WRONG

    @property
    def chance(self) -> float:
        """How likely the next drafted token is accepted, if all before it are."""
        return self.num_right / (self.num_right + self.num_wrong)

    def move(self, num_right: float, num_wrong: float, share: float) -> None:
        self.num_right += share * (num_right - self.num_right)
        self.num_wrong += share * (num_wrong - self.num_wrong)


@dataclass(slots=True)
class _Drafting:
    """What is known of one sequence."""

    rates: dict[int, _AcceptanceRate] = field(default_factory=dict)  # kind of guess -> rate
    kind: int = 0  # the kind of the last draft


class Speculation:
    """Decides for each sequence how many tokens to draft. Belongs to the engine's thread.

    Its decisions affect when a text comes, never the text, so they may depend on measured times and on other
    sequences.
    """

    def __init__(self, proposer: Proposer) -> None:
        """Start with the initial acceptance rates."""
        self._proposer = proposer
        self._has_failed = False
        self._rates: dict[int, _AcceptanceRate] = {}  # kind of guess -> rate over all sequences
        self._sequences: dict[Request, _Drafting] = {}

    def draft(self, request: Request, *, max_tokens: int, min_chance: float) -> Sequence[int]:
        """Return tokens that may follow the last one of a sequence; none if drafting does not pay.

        Args:
            request: a sequence of which all tokens but the last are computed.
            max_tokens: how many the step can take.
            min_chance: how likely a token must be accepted to be worth its time in the step.
        """
        if self._has_failed:
            return ()
        drafting = self._sequences.get(request)
        if drafting is None:
            drafting = self._sequences[request] = _Drafting()
        try:
            return self._draft(request, drafting, min(max_tokens, _MAX_DRAFT_TOKENS), min_chance)
        except Exception:
            logger.exception("drafting failed; speculation is off until the model is loaded again")
            self._has_failed = True
            return ()

    def record_outcome(self, request: Request, *, num_drafted: int, num_accepted: int) -> None:
        """Update the acceptance rates of a sequence and of all."""
        drafting = self._sequences.get(request)
        if drafting is None:
            return
        num_wrong = num_accepted < num_drafted
        self._rate_of_all(drafting.kind).move(num_accepted, num_wrong, _NEWEST_OF_ALL)
        self._rate(drafting, drafting.kind).move(num_accepted, num_wrong, _NEWEST)

    def drop(self, request: Request) -> None:
        """Forget a request that leaves; does nothing if it is unknown."""
        if self._sequences.pop(request, None) is not None:
            self._proposer.drop(request)

    def _draft(
        self, request: Request, drafting: _Drafting, max_tokens: int, min_chance: float
    ) -> Sequence[int]:
        kind = self._proposer.kind(request)
        if kind is None:
            return ()
        rate = self._rate(drafting, kind)
        chance = rate.chance
        count, cumulative = 0, chance
        while count < max_tokens and cumulative >= min_chance:
            count, cumulative = count + 1, cumulative * chance
        if count:
            drafting.kind = kind
            return self._proposer.propose(request, count)[:count]
        of_all = self._rate_of_all(kind)
        rate.move(of_all.num_right, of_all.num_wrong, _RECOVERY)
        of_all.move(_INITIAL_RIGHT, _INITIAL_WRONG, _RECOVERY_OF_ALL)
        return ()

    def _rate(self, drafting: _Drafting, kind: int) -> _AcceptanceRate:
        rate = drafting.rates.get(kind)
        if rate is None:
            rate = drafting.rates[kind] = replace(self._rate_of_all(kind))
        return rate

    def _rate_of_all(self, kind: int) -> _AcceptanceRate:
        return self._rates.setdefault(kind, _AcceptanceRate())


class PromptLookup(Proposer):
    """Proposes the tokens after the latest earlier occurrence of the last tokens.

    Takes a few microseconds per sequence. Belongs to the engine's thread.

    Source: Saxena, "Prompt Lookup Decoding" (2023), https://github.com/apoorvumang/prompt-lookup-decoding.
    """

    def __init__(self) -> None:
        self._indices: dict[Request, _NgramIndex] = {}

    def kind(self, request: Request) -> int | None:
        """Return the length of the n-gram that has occurred: the longer, the more likely it goes on alike."""
        found = self._find(request)
        return None if found is None else found.size

    def propose(self, request: Request, count: int) -> Sequence[int]:
        """See `Proposer.propose`."""
        found, token_ids = self._find(request), request.token_ids
        if found is None:
            return ()
        # If fewer than `count` tokens follow, the text is assumed to repeat with this period.
        period = len(token_ids) - found.start
        return [token_ids[found.start + i % period] for i in range(count)]

    def drop(self, request: Request) -> None:
        """See `Proposer.drop`."""
        self._indices.pop(request, None)

    def _find(self, request: Request) -> _Ngram | None:
        index = self._indices.get(request)
        if index is None:
            index = self._indices[request] = _NgramIndex()
        return index.find(request.token_ids)


class _Ngram(NamedTuple):
    """An n-gram at the end of a sequence that has occurred before."""

    size: int
    start: int  # the index of the token after its earlier occurrence


class _NgramIndex:
    """The last occurrence of each n-gram in a growing list; reads each token once."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token after it
        self._num_read = 0

    def find(self, token_ids: Sequence[int]) -> _Ngram | None:
        """Return the longest n-gram at the end that has occurred before."""
        self._read(token_ids)
        for size in _NGRAM_SIZES:
            start = self._ends.get(tuple(token_ids[-size:]))
            if start is not None:
                return _Ngram(size, start)
        return None

    def _read(self, token_ids: Sequence[int]) -> None:
        """Index all n-grams that a token follows."""
        for end in range(self._num_read + 1, len(token_ids)):
            for size in _NGRAM_SIZES:
                if size <= end:
                    self._ends[tuple(token_ids[end - size : end])] = end
        self._num_read = max(self._num_read, len(token_ids) - 1)


@dataclass(slots=True)
class _DraftSequence:
    """The computed tokens of one sequence, and their blocks in the draft model's cache.

    Of a model with recurrent states also two slots: that of the state after the first `num_kept` tokens, all
    of the sequence, and that of the state after the drafted tokens behind them.
    """

    token_ids: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    num_kept: int = 0


class DraftModel(Proposer):
    """Proposes the most likely tokens of a smaller model. Belongs to the engine's thread.

    Each sequence holds blocks of that model's KV cache, and two slots if it has recurrent states. If none is
    free, the least recently drafted sequence is evicted, and is computed again when it is drafted next.
    """

    def __init__(self, model: LogitsModel, *, vocab_size: int) -> None:
        """Start with an empty cache.

        `vocab_size` is that of the target model; the rows of logits of either model may be longer.
        """
        self._model = model
        self._vocab_size = vocab_size
        self._free_blocks = list(range(model.num_blocks))
        self._free_slots = list(range(model.num_state_slots))
        self._sequences: dict[Request, _DraftSequence] = {}  # the least recently drafted first

    def propose(self, request: Request, count: int) -> Sequence[int]:
        """See `Proposer.propose`; none while a long prompt is computed in chunks."""
        token_ids = request.token_ids
        if len(token_ids) + count > self._model.max_length:
            return ()
        drafted = self._sequences[request] = self._sequences.pop(request, _DraftSequence())
        # At least the last token is computed, because the draft needs the logits after it.
        num_computed = min(_common_prefix_length(drafted.token_ids, token_ids), len(token_ids) - 1)
        if self._model.num_state_slots:  # a state is of all its tokens or of no use
            num_computed = drafted.num_kept if drafted.num_kept <= num_computed else 0
        del drafted.token_ids[num_computed:]
        best = self._run(drafted, token_ids[num_computed : num_computed + _CHUNK], is_draft=False)
        if len(drafted.token_ids) < len(token_ids):
            return ()
        proposed = [best]
        while len(proposed) < count:
            proposed.append(self._run(drafted, proposed[-1:], is_draft=True))
        return proposed

    def drop(self, request: Request) -> None:
        """See `Proposer.drop`."""
        drafted = self._sequences.pop(request, None)
        if drafted is not None:
            self._free_blocks += drafted.blocks
            self._free_slots += drafted.slots

    def _run(self, drafted: _DraftSequence, token_ids: Sequence[int], *, is_draft: bool) -> int:
        """Compute the next tokens of the sequence; return the most likely one after them."""
        num_computed = len(drafted.token_ids)
        drafted.token_ids += token_ids
        while len(drafted.blocks) * self._model.block_size < len(drafted.token_ids):
            if not self._free_blocks:
                self.drop(next(iter(self._sequences)))
            drafted.blocks.append(self._free_blocks.pop())
        source = target = None
        if self._model.num_state_slots:
            source, target = self._states(drafted, num_computed, is_draft=is_draft)
        [row] = self._model.forward(
            ForwardBatch.of(
                [token_ids],
                num_computed_tokens=[num_computed],
                block_table=[drafted.blocks],
                state_source=source,
                state_target=target,
            )
        )
        return int(row[: self._vocab_size].argmax())

    def _states(
        self, drafted: _DraftSequence, num_computed: int, *, is_draft: bool
    ) -> tuple[list[int], list[int]]:
        """Return the slots of the next forward of a sequence, which get the states of drafts apart."""
        while len(drafted.slots) < 2:
            if not self._free_slots:
                self.drop(next(iter(self._sequences)))
            drafted.slots.append(self._free_slots.pop())
        kept, draft = drafted.slots
        if is_draft:
            return [kept if num_computed == drafted.num_kept else draft], [draft]
        drafted.num_kept = len(drafted.token_ids)
        return [kept if num_computed else NO_SLOT], [kept]


def _common_prefix_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many leading tokens are the same; bisects, so that slices compare in C."""
    same, limit = 0, min(len(first), len(second))
    probe = limit
    while same < limit:
        if first[same:probe] == second[same:probe]:
            same = probe
        else:
            limit = probe - 1
        probe = (same + limit + 1) // 2
    return same
