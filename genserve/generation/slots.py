"""Slots: which token sequence sits where in the KV cache."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from genserve.generation.logits_model import LogitsModel
from genserve.generation.token_sequence import TokenSequence

__all__ = ["Move", "Slots", "compaction"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Slot `target` takes over what slot `source` holds."""

    source: int
    target: int


class Slots:
    """The running token sequences: `running[i]` is in slot i, and no slot in front of another is free.

    Those that decode are in front, so that a decode step is one forward over the slots 0 to B-1;
    at most one sequence, the last, is in the middle of its prompt. Belongs to the engine's thread.
    """

    def __init__(self, model: LogitsModel) -> None:
        self._model = model
        self._running: list[TokenSequence] = []

    @property
    def running(self) -> Sequence[TokenSequence]:
        """The token sequences that hold a slot, by slot."""
        return self._running

    def take(self, sequences: Iterable[TokenSequence]) -> None:
        """Give each sequence the next free slot."""
        self._running.extend(sequences)

    def release(self, leaving: Collection[TokenSequence]) -> None:
        """Free the slots of `leaving`, and close the gaps by moving as little as can be."""
        gone = {slot for slot, sequence in enumerate(self._running) if sequence in leaving}
        for move in compaction(self._running, gone):
            sequence = self._running[move.source]
            self._model.move(source=move.source, target=move.target, length=sequence.num_computed)
            self._running[move.target] = sequence
        del self._running[len(self._running) - len(gone) :]

    def check_integrity(self) -> None:
        """Raise AssertionError where the order of the slots is broken; for tests."""
        assert len(self._running) <= self._model.num_slots, "more sequences than slots"
        assert len(set(self._running)) == len(self._running), "a sequence sits in two slots"
        assert not any(s.in_prompt for s in self._running[:-1]), "a partial prompt is not the last"


def compaction(running: Sequence[TokenSequence], gone: Collection[int]) -> list[Move]:
    """Return the moves, in order, that leave no gap and keep a partial prompt last.

    Args:
        running: by slot, the leaving ones included.
        gone: the slots that become free.
    """
    last = len(running) - 1
    partial_stays = bool(running) and running[last].in_prompt and last not in gone
    staying = [slot for slot in range(len(running)) if slot not in gone]
    decoding = staying[:-1] if partial_stays else staying
    holes = [slot for slot in range(len(decoding)) if slot in gone]
    beyond = [slot for slot in decoding if slot >= len(decoding)]
    moves = [Move(source=source, target=target) for source, target in zip(beyond, holes, strict=True)]
    if partial_stays and last != len(decoding):
        moves.append(Move(source=last, target=len(decoding)))
    return moves
