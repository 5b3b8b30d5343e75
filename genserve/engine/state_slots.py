"""State slots: where the recurrent states of sequences are, and which of them are kept for later requests.

A slot holds the state of all recurrent layers after the tokens of one sequence. A forward reads the slot of
each sequence and writes the state after its tokens to a target, which is the same slot if nothing else needs
the state before them. Otherwise the target is another slot, so a state is never copied.

A snapshot is a state at the end of a cached block. It is dropped with its block, or if slots run out, the
least recently used first. A running sequence holds two slots at most, and a model has so many, so that there
is always a slot or a snapshot to drop.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

NO_SLOT = -1


@dataclass(slots=True)
class SequenceState:
    """The recurrent state of one request; `StateSlots` and `KVCacheManager` write it.

    Attributes:
        slot: the slot of its state; NO_SLOT: the state before the first token, which is zero.
        num_tokens: after how many tokens that state is.
        target: the slot that the scheduled forward writes; NO_SLOT: no forward is scheduled.
        num_kept: the longest beginning of its tokens after which there is a snapshot, as far as it knows.
        junction: how many tokens of its prompt had cached blocks when it started, with a state or without.
        next_snapshot: the length at which its next snapshot is taken; 0: none is planned.
    """

    slot: int = NO_SLOT
    num_tokens: int = 0
    target: int = NO_SLOT
    num_kept: int = 0
    junction: int = 0
    next_snapshot: int = 0


class StateSlots:
    """The slots that requests hold, the snapshots by their blocks, and the free slots.

    Belongs to the engine's thread.
    """

    def __init__(self, num_slots: int) -> None:
        """Start with all slots free."""
        self._ref_counts = [0] * num_slots  # how many requests hold each slot
        self._free = list(range(num_slots))
        self._snapshots: OrderedDict[int, int] = OrderedDict()  # block -> slot; least recently used first
        self._blocks: dict[int, int] = {}  # slot of a snapshot -> block

    def __contains__(self, block: int) -> bool:
        return block in self._snapshots

    @property
    def has_free(self) -> bool:
        """Whether there is a slot without a state."""
        return bool(self._free)

    @property
    def usage(self) -> float:
        """The share of the slots that requests hold, 0 to 1; 0 without slots."""
        return sum(map(bool, self._ref_counts)) / max(1, len(self._ref_counts))

    def schedule(self, state: SequenceState, *, keep: bool) -> int | None:
        """Choose the target of the next forward of a request, after which it may go back if `keep`.

        Returns:
            The block whose snapshot was dropped for it; None: there was a slot.
        """
        slot, dropped = state.slot, None
        if slot == NO_SLOT or keep or self._ref_counts[slot] > 1 or slot in self._blocks:
            slot, dropped = self._allocate()
            assert slot != NO_SLOT, "sequences hold more than two slots each"
            self._ref_counts[slot] = 1
        state.target = slot
        return dropped

    def advance(self, state: SequenceState, num_tokens: int) -> None:
        """Continue after the scheduled forward, at the length `num_tokens`."""
        if state.target != state.slot:
            self._release(state.slot)
        state.slot, state.target, state.num_tokens = state.target, NO_SLOT, num_tokens

    def go_back(self, state: SequenceState) -> None:
        """Discard what the scheduled forward has written; a state that it has overwritten is lost."""
        if state.target == state.slot:
            state.slot = NO_SLOT
        self._release(state.target)
        state.target = NO_SLOT

    def fork(self, source: SequenceState, replaced: SequenceState | None) -> SequenceState:
        """Return the same state for another request, in place of the one that it had."""
        if source.slot != NO_SLOT:
            self._ref_counts[source.slot] += 1
        if replaced is not None:
            self.free(replaced)
        return SequenceState(slot=source.slot, num_tokens=source.num_tokens, num_kept=source.num_kept)

    def free(self, state: SequenceState) -> None:
        """Release the slot of a request that leaves."""
        self._release(state.slot)

    def keep(self, block: int, state: SequenceState) -> None:
        """Make the state of a request the snapshot at the end of a cached block, unless there is one."""
        state.num_kept = state.num_tokens
        if block in self._snapshots:
            self._snapshots.move_to_end(block)
        else:
            self._snapshots[block] = state.slot
            self._blocks[state.slot] = block

    def restore(self, block: int) -> tuple[int, int | None]:
        """Choose the slot of a snapshot at the end of a cached block, which has none.

        Returns:
            The slot, which is to be overwritten, or NO_SLOT: requests hold all; and the block whose snapshot
            was dropped for it, if there was one.
        """
        slot, dropped = self._allocate()
        if slot != NO_SLOT:
            self._snapshots[block] = slot
            self._blocks[slot] = block
        return slot, dropped

    def share(self, block: int) -> int:
        """Return the slot of a snapshot for a request that starts there."""
        slot = self._snapshots[block]
        self._snapshots.move_to_end(block)
        self._ref_counts[slot] += 1
        return slot

    def drop(self, block: int) -> None:
        """Forget the snapshot of a block, if it has one."""
        slot = self._snapshots.pop(block, NO_SLOT)
        if slot != NO_SLOT:
            del self._blocks[slot]
            if not self._ref_counts[slot]:
                self._free.append(slot)

    def check_integrity(self, states: Iterable[SequenceState]) -> None:
        """Raise AssertionError if the slots are in a state that must not occur; for tests.

        Only `states` may hold slots, and no forward is scheduled.
        """
        held = [0] * len(self._ref_counts)
        for state in states:
            assert state.target == NO_SLOT, "a forward has ended, but the state after it was not taken over"
            if state.slot != NO_SLOT:
                held[state.slot] += 1
        assert held == self._ref_counts, "a slot is counted for requests that do not hold it"
        assert {slot: block for block, slot in self._snapshots.items()} == self._blocks, "snapshots disagree"
        assert len(self._blocks) == len(self._snapshots), "two blocks have the same snapshot"
        free = [slot for slot, count in enumerate(held) if not count and slot not in self._blocks]
        assert sorted(self._free) == free, "the free slots differ from those without a state"

    def _allocate(self) -> tuple[int, int | None]:
        """Return a free slot, and the block whose snapshot was dropped for it; see `restore`.

        It is the least recently used snapshot that no request holds.
        """
        dropped = None
        if not self._free:
            unused = (block for block, slot in self._snapshots.items() if not self._ref_counts[slot])
            dropped = next(unused, None)
            if dropped is None:
                return NO_SLOT, None
            self.drop(dropped)
        return self._free.pop(), dropped

    def _release(self, slot: int) -> None:
        if slot != NO_SLOT:
            self._ref_counts[slot] -= 1
            if not self._ref_counts[slot] and slot not in self._blocks:
                self._free.append(slot)
