"""Draft model: drafts that a smaller model makes, token by token, in a KV cache of its own."""

from __future__ import annotations

from collections.abc import Sequence

from genserve.generation.logits_model import LogitsModel
from genserve.generation.prefixes import common_prefix
from genserve.generation.token_sequence import TokenSequence

__all__ = ["DraftModel"]

_CHUNK = 256    # tokens of a prompt that are computed in one step, which all others wait for


class DraftModel:
    """Proposes the tokens that another model thinks best; a `Draft`. Belongs to the engine's thread.

    Each sequence has a slot in that model's cache. Where there are more sequences than slots, the one that
    was asked for least recently loses its own, and is computed anew when it is asked for again.
    """

    def __init__(self, model: LogitsModel, *, num_slots: int, vocab_size: int) -> None:
        """Begin with empty slots.

        Args:
            model: drafts, on the CPU; nobody else uses it.
            num_slots: how many of its slots are used.
            vocab_size: of the model that is drafted for; either may have rows behind the last token.
        """
        self._model = model
        self._vocab_size = vocab_size
        self._free = list(range(num_slots))
        self._slots: dict[TokenSequence, int] = {}      # least recently asked first
        self._computed: dict[TokenSequence, list[int]] = {}

    def propose(self, sequence: TokenSequence, count: int) -> Sequence[int]:
        """See `Draft.propose`. None while a long prompt is computed, chunk by chunk."""
        token_ids = sequence.token_ids
        if len(token_ids) + count > self._model.max_length:
            return ()
        slot = self._slot(sequence)
        computed = self._computed[sequence]
        # The last token is computed again, if need be: the logits behind it are what is asked for.
        past = min(common_prefix(computed, token_ids), len(token_ids) - 1)
        chunk = token_ids[past : past + _CHUNK]
        computed[past:] = chunk
        best = self._run(chunk, slot=slot, past=past)
        if len(computed) < len(token_ids):
            return ()
        drafted = [best]
        while len(drafted) < count:
            computed.append(best)
            best = self._run([best], slot=slot, past=len(computed) - 1)
            drafted.append(best)
        return drafted

    def drop(self, sequence: TokenSequence) -> None:
        """See `Draft.drop`."""
        if sequence in self._slots:
            self._free.append(self._slots.pop(sequence))
            del self._computed[sequence]

    def _slot(self, sequence: TokenSequence) -> int:
        """The slot of a sequence, which is now the one that was asked for last."""
        if sequence not in self._slots:
            if not self._free:
                self.drop(next(iter(self._slots)))
            self._slots[sequence] = self._free.pop()
            self._computed[sequence] = []
        slot = self._slots[sequence] = self._slots.pop(sequence)
        return slot

    def _run(self, token_ids: Sequence[int], *, slot: int, past: int) -> int:
        """Compute some tokens; returns the best one behind them."""
        [row] = self._model.prefill([token_ids], first_slot=slot, past=past)
        return int(row[: self._vocab_size].argmax())
