"""Rate limiter: the resources that the instances of all models share, and who gets them next."""

from __future__ import annotations

import bisect
import itertools
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from genserve.config.model_config import ResourceClaim
from genserve.errors import RepositoryError
from genserve.inference import Executor

__all__ = ["Capacity", "RateLimiter", "ResourcePermit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """How much there is of a resource; `--rate-limit-resource`."""

    name: str
    count: int
    device_id: int | None = None    # None: on each device

    @classmethod
    def parse(cls, text: str) -> Capacity:
        """Read what a person writes: `name:count` or `name:count:device`.

        Raises:
            ValueError: it is neither; in Triton's words.
        """
        name, *numbers = text.split(":")
        if not name or len(numbers) not in (1, 2):
            raise ValueError(
                "--rate-limit-resource option format is '<resource_name>:<count>:<device>' or "
                f"'<resource_name>:<count>'. Got {text}"
            )
        for number in numbers:
            if not number.isdecimal():
                raise ValueError(f"Invalid option value. Got {number}")
        count, *device = map(int, numbers)
        return cls(name=name, count=count, device_id=device[0] if device else None)


class _Place(NamedTuple):
    """A resource, and the device that it is on; None: it is global."""

    name: str
    device_id: int | None


class RateLimiter:
    """Lets an instance execute only while it holds all resources that its group asks for; from any thread.

    Who waits takes turns by its priority, as stride scheduling has it: an instance of priority 2 gets half as
    many turns as one of 1, and one that was away has no turns saved up. Nobody is passed over by another that
    needs the same resource.
    """

    def __init__(self, capacities: Iterable[Capacity] = ()) -> None:
        """Make a limiter.

        Args:
            capacities: what there is; empty: of each resource as much as one instance needs at most.
        """
        self._lock = threading.Lock()
        self._capacities = tuple(capacities)
        self._permits: set[ResourcePermit] = set()
        self._available: dict[_Place, int] = {}
        self._held: Counter[_Place] = Counter()
        self._line: list[tuple[int, int, ResourcePermit]] = []  # sorted by turn, and then by arrival
        self._count = itertools.count()
        self._turn = 0  # of whoever had the last

    def register(self, claim: ResourceClaim, *, device_id: int) -> ResourcePermit:
        """Return the permit of an instance that is to be loaded; `withdraw` it once the instance has gone.

        Raises:
            RepositoryError: there is less of a resource than it needs, or the resource is global for one
                instance and of a device for another.
        """
        needs = {
            _Place(item.name, None if item.is_global else device_id): item.count for item in claim.resources
        }
        permit = ResourcePermit(self, needs, stride=max(1, claim.priority))
        with self._lock:
            permits = self._permits | {permit}
            self._available = _available(permits, self._capacities)  # raises before anything has changed
            self._permits = permits
        return permit

    def withdraw(self, permit: ResourcePermit) -> None:
        """Forget an instance, which neither holds nor waits for anything."""
        with self._lock:
            self._permits.discard(permit)
            self._available = _available(self._permits, self._capacities)

    def _ask(self, permit: ResourcePermit) -> None:
        with self._lock:
            self._take_back(permit)
            permit.turn = max(permit.turn, self._turn)
            bisect.insort(self._line, (permit.turn, next(self._count), permit))
            self._grant()

    def _give_back(self, permit: ResourcePermit) -> None:
        with self._lock:
            self._take_back(permit)
            self._grant()

    def _blockers(self, permit: ResourcePermit) -> list[ResourcePermit]:
        with self._lock:
            if permit.is_held:
                return []
            lacking = {place for place, count in permit.needs.items() if not self._is_free({place: count})}
            ahead = itertools.takewhile(lambda other: other is not permit, (item[2] for item in self._line))
            return [
                *(other for other in self._permits if other.is_held and not lacking.isdisjoint(other.needs)),
                *(other for other in ahead if not permit.needs.keys().isdisjoint(other.needs)),
            ]

    def _take_back(self, permit: ResourcePermit) -> None:
        if permit.is_held:
            permit.is_held = False
            self._held.subtract(permit.needs)

    def _grant(self) -> None:
        wanted: set[_Place] = set()  # by somebody further ahead
        for place_in_line in list(self._line):
            turn, _, permit = place_in_line
            if self._is_free(permit.needs) and wanted.isdisjoint(permit.needs):
                self._line.remove(place_in_line)
                self._turn = max(self._turn, turn)
                self._held.update(permit.needs)
                permit.is_held = True
                permit.granted.release()
            else:
                wanted.update(permit.needs)

    def _is_free(self, needs: Mapping[_Place, int]) -> bool:
        return all(self._held[place] + count <= self._available[place] for place, count in needs.items())


class ResourcePermit:
    """What one instance holds while it executes; a `Permit`, used by the thread of the instance."""

    def __init__(self, limiter: RateLimiter, needs: Mapping[_Place, int], *, stride: int) -> None:
        self.needs = needs
        self.turn = 0
        self.is_held = False                        # written by the limiter, under its lock
        self.granted = threading.Semaphore(0)
        self.executor: Executor | None = None       # the instance, once it is made
        self._limiter = limiter
        self._stride = stride

    def withdraw(self) -> None:
        """Forget it: its instance has gone."""
        self._limiter.withdraw(self)

    def acquire(self) -> None:
        """Wait for it; what is held is given back only as one stands in line, so that others take turns."""
        self.ask()
        self.granted.acquire()

    def ask(self) -> None:
        """Stand in line; `granted` is released when it can be had."""
        self._limiter._ask(self)

    def release(self) -> None:
        """Give it back, if it is held."""
        self._limiter._give_back(self)

    def blocked_by(self) -> list[Executor]:
        """Return the instances that keep this one from having it, now or if it asked."""
        blockers = self._limiter._blockers(self)
        return [permit.executor for permit in blockers if permit.executor is not None]

    def executed(self) -> None:
        """Count a turn; one in which there was nothing to execute any more is none."""
        self.turn += self._stride


def _available(permits: Iterable[ResourcePermit], capacities: tuple[Capacity, ...]) -> dict[_Place, int]:
    """Return how much there is of each resource that is needed.

    Raises:
        RepositoryError: less than one instance needs, or a resource is both global and of a device.
    """
    most: dict[_Place, int] = {}
    for permit in permits:
        for place, count in permit.needs.items():
            most[place] = max(count, most.get(place, 0))
    for place in most:
        if place.device_id is not None and _Place(place.name, None) in most:
            raise RepositoryError(
                f'Resource "{place.name}" is present as both global and device-specific resource in the '
                "model configuration.",
                remedy="set `global` alike in every rate_limiter of every model that names it",
            )
    if not capacities:
        return most
    return {place: _capacity(place, needed=needed, capacities=capacities) for place, needed in most.items()}


def _capacity(place: _Place, *, needed: int, capacities: tuple[Capacity, ...]) -> int:
    there = max((c.count for c in capacities if c.name == place.name and _is_at(c, place)), default=0)
    if there < needed:
        raise RepositoryError(
            f'Resource count for "{place.name}" is limited to {there} which will prevent scheduling of one '
            f"or more model instances, the minimum required count is {needed}",
            remedy=f"start with `--rate-limit-resource {place.name}:{needed}`, or let the model need less",
        )
    return there


def _is_at(capacity: Capacity, place: _Place) -> bool:
    return place.device_id is None or capacity.device_id in (None, place.device_id)
