"""Draft model: drafts that a smaller model makes, token by token, in a KV cache of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from genserve.generation.logits_model import ForwardBatch, LogitsModel
from genserve.generation.token_sequence import TokenSequence

__all__ = ["DraftModel"]

_CHUNK = 256    # tokens of a prompt that are computed in one step, which all others wait for


@dataclass(slots=True)
class _Cached:
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
        self._cached: dict[TokenSequence, _Cached] = {}     # least recently asked first

    def propose(self, sequence: TokenSequence, count: int) -> Sequence[int]:
        """See `Draft.propose`. None while a long prompt is computed, chunk by chunk."""
        token_ids = sequence.token_ids
        if len(token_ids) + count > self._model.max_length:
            return ()
        cached = self._cached[sequence] = self._cached.pop(sequence, _Cached())
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

    def _run(self, cached: _Cached, token_ids: Sequence[int]) -> int:
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
