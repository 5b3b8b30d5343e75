"""Fair share: divides the tokens of an engine among API keys that compete, in proportion to their weights.

Each key has a counter of the tokens that were computed for it, divided by its weight, and the key with the
least goes first: a deficit round robin over tokens, as the virtual token counter of Sheng et al., "Fairness
in Serving Large Language Models" (OSDI 2024). A key that waited for nothing keeps a part of what it did not
use, so that a few requests of it do not wait for the many of another key.

Keys compete while requests of several of them wait or run. With one key, nothing is counted.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from genserve.engine.engine_request import Request, SequenceGroup

# The unused tokens that a key keeps: some prompts of a chat, or one of an agent.
_KEPT_TOKENS = 4096
# The part of its share of the slots for which a key preempts others. To preempt costs the tokens of a block.
_DUE_SHARE = 0.75


class FairShare:
    """The keys whose groups an engine has. Belongs to the engine's thread."""

    def __init__(self) -> None:
        self._num_groups: Counter[str] = Counter()      # by key, without zeros
        self._weights: dict[str, float] = {}            # of the same keys
        self._served: dict[str, float] = {}             # tokens divided by the weight, of all keys so far

    @property
    def have_competition(self) -> bool:
        """Whether groups of several keys wait or run."""
        return len(self._num_groups) > 1

    def add(self, group: SequenceGroup, waiting: Iterable[SequenceGroup]) -> None:
        """Count a group that waits.

        A key of which nothing waited had all that it asked for. Its count is at most `_KEPT_TOKENS` behind
        the least count of the keys that wait, or behind the greatest of all if none waits.

        Args:
            group: the group.
            waiting: the groups that wait already.
        """
        name, weight = group.share
        if self._num_groups.keys() <= {name}:
            self._served.setdefault(name, 0.0)
        elif name not in (served := {each.share.name: self.served(each) for each in waiting}):
            level = min(served.values()) if served else max(map(self._served.__getitem__, self._num_groups))
            self._served[name] = max(self._served.get(name, -math.inf), level - _KEPT_TOKENS / weight)
        self._weights[name] = weight    # the operator may have changed it
        self._num_groups[name] += 1

    def remove(self, group: SequenceGroup) -> None:
        """Stop counting a group, which has ended."""
        name = group.share.name
        self._num_groups[name] -= 1
        if not self._num_groups[name]:
            del self._num_groups[name], self._weights[name]

    def record(self, computed: Iterable[tuple[Request, int]]) -> None:
        """Count the tokens of a step: its requests, and how many tokens of each it computes."""
        for request, num_tokens in computed:
            name, weight = request.group.share
            self._served[name] += num_tokens / weight

    def served(self, group: SequenceGroup) -> float:
        """Return the tokens that were computed for the key of a group, divided by its weight."""
        return self._served[group.share.name]

    def in_turn(self, waiting: Iterable[SequenceGroup]) -> Iterator[SequenceGroup]:
        """Yield waiting groups: by priority, then the key that was served least, then by arrival.

        Args:
            waiting: groups in the order of priority and arrival.
        """
        for _, level in groupby(waiting, key=lambda group: group.priority):
            queues: defaultdict[str, deque[SequenceGroup]] = defaultdict(deque)
            for group in level:
                queues[group.share.name].append(group)
            served = {name: self._served[name] for name in queues}
            while queues:
                name = min(queues, key=served.__getitem__)
                group = queues[name].popleft()
                yield group
                num_tokens = sum(request.num_pending for request in group.requests)
                served[name] += num_tokens / group.share.weight
                if not queues[name]:
                    del queues[name]

    def next_victim(
        self, waiting: SequenceGroup, running: Sequence[SequenceGroup], *, num_slots: int
    ) -> SequenceGroup | None:
        """Return the running group whose slot is due to the key of a waiting one; None: no slot is.

        A key that holds no slot is due one, and any key most of its weight's share of the slots; the rest
        comes to it as requests end. The victim is the last group of the key that holds most beyond its share,
        unless its priority is higher than that of the waiting group. A wide one, without which its key would
        lack more than a slot of its share, is a victim only for a key that holds no slot.

        Args:
            waiting: a waiting group.
            running: the running groups, in the order of priority and arrival.
            num_slots: the slots of a forward.
        """
        held: Counter[str] = Counter()
        for group in running:
            held[group.share.name] += group.num_seqs
        per_weight = num_slots / sum(self._weights.values())
        name, weight = waiting.share
        if held[name] and held[name] + waiting.num_seqs > _DUE_SHARE * weight * per_weight:
            return None
        beyond = {other: held[other] - max(1.0, self._weights[other] * per_weight) for other in held}
        most = max(beyond, key=beyond.__getitem__, default=name)
        if most == name or beyond[most] <= 0:
            return None
        victims = [group for group in reversed(running) if group.share.name == most]
        last = None if held[name] else victims[0]
        victim = next((group for group in victims if group.num_seqs - 1 < beyond[most]), last)
        return victim if victim is not None and victim.priority >= waiting.priority else None

    def check_integrity(self, groups: Iterable[SequenceGroup]) -> None:
        """Raise AssertionError if these are not the groups that are counted; for tests."""
        counted = Counter(group.share.name for group in groups)
        assert counted == self._num_groups, "the groups of a key are miscounted"
