"""Speculation: verify several drafted tokens of a sequence in one step.

Drafted tokens run in the same forward, behind the last token of their sequence. The sequence's tokens are
then sampled one by one from the model's own logits, by the request's parameters and draws. As long as the
sampled token is the drafted one, the next row of logits is already there. So the text is the same as without
speculation, random draws included. This is the acceptance rule of Leviathan et al., "Fast Inference from
Transformers via Speculative Decoding" (ICML 2023), and Chen et al. (2023), for a draft that gives each token
probability 1, with the sampler's draw in place of the acceptance draw.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from genserve.generation.engine_request import Request, TokenSequence
from genserve.generation.logits_model import ForwardBatch, LogitsModel

__all__ = ["Draft", "DraftModel", "PromptLookup", "Speculation"]


logger = logging.getLogger(__name__)

# Before anything is known, drafted tokens count as if so many had been right and so many wrong.
_RIGHT_AT_FIRST = 2.0
_WRONG_AT_FIRST = 1.0
_NEWEST = 0.2           # the weight of the last draft
_FORGIVEN = 0.005       # so much of the way back to the first guess with each step without a draft


class Draft(Protocol):
    """Says what may come next."""

    def propose(self, sequence: TokenSequence, count: int) -> Sequence[int]:
        """Return up to `count` tokens that may follow the last token of a sequence; none: no idea."""

    def drop(self, sequence: TokenSequence) -> None:
        """Forget a sequence, which leaves; fine if it is not known."""


@dataclass(slots=True)
class _Record:
    """How often the drafts of one sequence were right, the last ones more than others."""

    sequence: TokenSequence
    num_right: float = _RIGHT_AT_FIRST
    num_wrong: float = _WRONG_AT_FIRST

    def move(self, num_right: float, num_wrong: float, share: float) -> None:
        self.num_right += share * (num_right - self.num_right)
        self.num_wrong += share * (num_wrong - self.num_wrong)


class Speculation:
    """Decides for each sequence how many tokens are worth being drafted. Belongs to the engine's thread.

    What it decides changes when a text comes, and never the text: times may decide.
    """

    def __init__(self, draft: Draft, *, num_tokens: int = 5) -> None:
        """Begin without experience.

        Args:
            draft: says what may come next.
            num_tokens: of a sequence in a step, at the most.
        """
        self._draft = draft
        self._num_tokens = num_tokens
        self._has_failed = False
        self._records: dict[Request, _Record] = {}

    def draft(self, sequence: TokenSequence, *, max_tokens: int, least_chance: float) -> Sequence[int]:
        """Return tokens that may follow the last one of a sequence; none, if that does not pay.

        Args:
            sequence: of which all tokens but the last are computed.
            max_tokens: at the most.
            least_chance: how likely the last of them must be right to be worth its part of a step.
        """
        record = self._records.get(sequence)
        if record is None:
            record = self._records[sequence] = _Record(sequence)
        chance = record.num_right / (record.num_right + record.num_wrong)
        count, likely = 0, chance
        while count < min(max_tokens, self._num_tokens) and likely >= least_chance:
            count, likely = count + 1, likely * chance
        if count:
            return self._proposed(sequence, count)
        record.move(_RIGHT_AT_FIRST, _WRONG_AT_FIRST, _FORGIVEN)
        return ()

    def note_outcome(self, sequence: Request, *, num_drafted: int, num_accepted: int) -> None:
        """Learn how many tokens of a draft were right."""
        if sequence in self._records:
            self._records[sequence].move(num_accepted, num_accepted < num_drafted, _NEWEST)

    def drop(self, request: Request) -> None:
        """Forget a request, which leaves."""
        record = self._records.pop(request, None)
        if record is not None:
            self._draft.drop(record.sequence)

    def _proposed(self, sequence: TokenSequence, count: int) -> Sequence[int]:
        """Ask the draft. One that fails is asked no more: answers do without it."""
        if self._has_failed:
            return ()
        try:
            return self._draft.propose(sequence, count)[:count]
        except Exception:
            logger.exception("drafting failed; there will be no drafts until the model is loaded again")
            self._has_failed = True
            return ()


_SIZES = (4, 3, 2)      # of the last tokens that are looked for, in this order


class PromptLookup:
    """Proposes what came after the latest occurrence of the last tokens; a `Draft`. Costs some microseconds.

    Belongs to the engine's thread.

    Source: Saxena, "Prompt Lookup Decoding" (2023), https://github.com/apoorvumang/prompt-lookup-decoding.
    """

    def __init__(self) -> None:
        self._indices: dict[TokenSequence, _Index] = {}

    def propose(self, sequence: TokenSequence, count: int) -> Sequence[int]:
        """See `Draft.propose`."""
        index = self._indices.get(sequence)
        if index is None:
            index = self._indices[sequence] = _Index()
        return index.following(sequence.token_ids, count)

    def drop(self, sequence: TokenSequence) -> None:
        """See `Draft.drop`."""
        self._indices.pop(sequence, None)


class _Index:
    """Where each run of some tokens ended last in one growing list; reads each of its tokens once."""

    def __init__(self) -> None:
        self._followed_at: dict[tuple[int, ...], int] = {}      # by run, the place of what follows it
        self._num_read = 0

    def following(self, token_ids: Sequence[int], count: int) -> Sequence[int]:
        """Return `count` tokens that may follow, or none."""
        self._read(token_ids)
        for size in _SIZES:
            start = self._followed_at.get(tuple(token_ids[-size:]))
            if start is not None:
                # Where it ends before so many: what has come twice in a row may come again.
                period = len(token_ids) - start
                return [token_ids[start + i % period] for i in range(count)]
        return ()

    def _read(self, token_ids: Sequence[int]) -> None:
        """Note all runs but those that nothing follows yet."""
        for end in range(self._num_read + 1, len(token_ids)):
            for size in _SIZES:
                if size <= end:
                    self._followed_at[tuple(token_ids[end - size : end])] = end
        self._num_read = max(self._num_read, len(token_ids) - 1)


_CHUNK = 256    # tokens of a prompt that are computed in one step, which all others wait for


@dataclass(slots=True)
class _DraftCache:
    """What is in the cache of one sequence."""

    token_ids: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)


class DraftModel:
    """Proposes the tokens that another model thinks best; a `Draft`. Belongs to the engine's thread.

    Each sequence has blocks of that model's cache. Where no block is free, the sequence that was asked for
    least recently loses its own, and is computed anew when it is asked for again.
    """

    def __init__(self, model: LogitsModel, *, vocab_size: int) -> None:
        """Begin with an empty cache.

        Args:
            model: drafts; nobody else uses it.
            vocab_size: of the model that is drafted for; either may have rows behind the last token.
        """
        self._model = model
        self._vocab_size = vocab_size
        self._free_blocks = list(range(model.num_blocks))
        self._cached: dict[TokenSequence, _DraftCache] = {}     # least recently asked first

    def propose(self, sequence: TokenSequence, count: int) -> Sequence[int]:
        """See `Draft.propose`. None while a long prompt is computed, chunk by chunk."""
        token_ids = sequence.token_ids
        if len(token_ids) + count > self._model.max_length:
            return ()
        cached = self._cached[sequence] = self._cached.pop(sequence, _DraftCache())
        # The last token is computed again, if need be: the logits behind it are what is asked for.
        num_computed = min(_common_prefix(cached.token_ids, token_ids), len(token_ids) - 1)
        del cached.token_ids[num_computed:]
        best = self._run(cached, token_ids[num_computed : num_computed + _CHUNK])
        if len(cached.token_ids) < len(token_ids):
            return ()
        drafted = [best]
        while len(drafted) < count:
            drafted.append(self._run(cached, drafted[-1:]))
        return drafted

    def drop(self, sequence: TokenSequence) -> None:
        """See `Draft.drop`."""
        cached = self._cached.pop(sequence, None)
        if cached is not None:
            self._free_blocks += cached.blocks

    def _run(self, cached: _DraftCache, token_ids: Sequence[int]) -> int:
        """Compute some tokens behind what is cached of the sequence asked for; returns the best next one."""
        num_computed = len(cached.token_ids)
        cached.token_ids += token_ids
        while len(cached.blocks) * self._model.block_size < len(cached.token_ids):
            if not self._free_blocks:
                self.drop(next(iter(self._cached)))
            cached.blocks.append(self._free_blocks.pop())
        [row] = self._model.forward(
            ForwardBatch.of([token_ids], num_computed_tokens=[num_computed], block_table=[cached.blocks])
        )
        return int(row[: self._vocab_size].argmax())


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many leading tokens are the same; by halving, so that lists compare at C's speed."""
    same, limit = 0, min(len(first), len(second))
    probe = limit
    while same < limit:
        if first[same:probe] == second[same:probe]:
            same = probe
        else:
            limit = probe - 1
        probe = (same + limit + 1) // 2
    return same
