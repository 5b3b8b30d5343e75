"""Stop strings: the texts at which a growing text has to end."""

from __future__ import annotations

from collections import deque
from copy import copy
from dataclasses import dataclass, field

from genserve.text.stoppable_text import Stop

__all__ = ["StopStrings"]


class StopStrings:
    """Finds the first stop string that is completed in a text that arrives in pieces; a `StopFinder`.

    Where the text is cut into pieces changes nothing. Of two stop strings that end at the same character the
    longer one counts. Each character costs amortised constant time, whatever the stop strings are.

    Source: Aho and Corasick, "Efficient string matching" (CACM 18(6), 1975).

    Args:
        stops: none of them empty.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._starts = frozenset(stop[0] for stop in stops)
        self._root = self._node = _automaton(stops)

    def fork(self) -> StopStrings:
        """Return one that has read the same, with the same automaton."""
        return copy(self)

    @property
    def num_pending(self) -> int:
        """How many of the last characters may still grow into a stop string: less than the longest has."""
        return self._node.depth

    def find(self, text: str) -> Stop | None:
        """Read on; return the first stop string that `text` completes, behind which nothing is read."""
        if self._node is self._root and self._starts.isdisjoint(text):
            return None
        for end, char in enumerate(text, start=1):
            self._node = self._node.after(char)
            if self._node.match is not None:
                return Stop(end=end, length=len(self._node.match), reason=self._node.match)
        return None

    def skip(self, text: str) -> None:
        """Read on; what `text` completes does not count."""
        for char in text:
            self._node = self._node.after(char)


@dataclass(slots=True, eq=False)
class _Node:
    """A prefix of some stop string: the longest one that the text read so far ends with."""

    depth: int                                              # its length
    match: str | None = None                                # the longest stop string that it ends with
    fail: _Node | None = None                               # its longest proper suffix that is a prefix too
    children: dict[str, _Node] = field(default_factory=dict)

    def after(self, char: str) -> _Node:
        node = self
        while char not in node.children and node.fail is not None:
            node = node.fail
        return node.children.get(char, node)


def _automaton(stops: tuple[str, ...]) -> _Node:
    root = _Node(depth=0)
    for stop in stops:
        node = root
        for depth, char in enumerate(stop, start=1):
            node = node.children.setdefault(char, _Node(depth=depth))
        node.match = stop
    shallow_first = deque([root])
    while shallow_first:
        node = shallow_first.popleft()
        for char, child in node.children.items():
            child.fail = root if node.fail is None else node.fail.after(char)
            child.match = child.match or child.fail.match
            shallow_first.append(child)
    return root
