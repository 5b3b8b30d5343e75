"""Stop strings: where a growing text has to end."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

__all__ = ["StopStrings"]


class StopStrings:
    """Finds the first stop string that is completed in a text that arrives in pieces.

    Text that may still grow into a stop string is held back: always less than the longest of them. Where the
    text is cut into pieces changes nothing. Of two stop strings that end at the same character the longer one
    counts. Each character costs amortised constant time, whatever the stop strings are.

    Source: Aho and Corasick, "Efficient string matching" (CACM 18(6), 1975).

    Args:
        stops: none of them empty.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._starts = frozenset(stop[0] for stop in stops)
        self._root = self._node = _automaton(stops)
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text; None as long as there is none."""
        return self._matched

    def push(self, text: str) -> str:
        """Add `text`; returns what may be released: up to the match, and nothing after it."""
        if self._matched is not None:
            return ""
        if not self._held and self._starts.isdisjoint(text):
            return text
        pending = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            self._node = self._node.after(char)
            if self._node.match is not None:
                self._matched, self._held = self._node.match, ""
                return pending[: end - len(self._matched)]
        released = len(pending) - self._node.depth
        self._held = pending[released:]
        return pending[:released]

    def flush(self) -> str:
        """The text held back, for a text that ended before any stop string did."""
        held, self._held, self._node = self._held, "", self._root
        return held


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
