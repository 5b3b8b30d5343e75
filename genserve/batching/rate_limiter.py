"""Rate limiter: schedules the resources that the instances of all models share."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceCapacity:
    """The available count of a resource; `--rate-limit-resource`."""

    name: str
    count: int
    device_id: int | None = None    # None: on each device

    @classmethod
    def parse(cls, text: str) -> ResourceCapacity:
        """Parse `name:count` or `name:count:device`.

        Raises:
            ValueError: the text has another form; the message is Triton's.
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


class _Resource(NamedTuple):
    """A resource on a device; None: a global resource."""

    name: str
    device_id: int | None


class RateLimiter:
    """Lets an instance execute only while it holds all resources of its group; safe from any thread.

    Turns follow stride scheduling: an instance of priority 2 gets half as many turns as one of priority 1,
    and an idle instance does not accumulate turns. No instance overtakes another one that waits for the same
    resource.
    """

    def __init__(self, capacities: Iterable[ResourceCapacity] = ()) -> None:
        """Make a limiter.

        Args:
            capacities: available resources; empty: of each, the largest count that one instance needs.
        """
        self._lock = threading.Lock()
        self._capacities = tuple(capacities)
        self._permits: set[ResourcePermit] = set()
        self._available: dict[_Resource, int] = {}
        self._held: Counter[_Resource] = Counter()
        self._waiting: list[tuple[int, int, ResourcePermit]] = []  # sorted by turn, then by arrival
        self._count = itertools.count()
        self._turn = 0  # the turn of the permit that was granted last

    def register(self, claim: ResourceClaim, *, device_id: int) -> ResourcePermit:
        """Return a permit for a new instance; call `withdraw` when the instance has closed.

        Raises:
            RepositoryError: the claim exceeds a capacity, or a resource is global in one model and
                device-specific in another.
        """
        needs = {
            _Resource(item.name, None if item.is_global else device_id): item.count
            for item in claim.resources
        }
        permit = ResourcePermit(self, needs, stride=max(1, claim.priority))
        with self._lock:
            permits = self._permits | {permit}
            self._available = _available(permits, self._capacities)  # raises before any change
            self._permits = permits
        return permit

    def withdraw(self, permit: ResourcePermit) -> None:
        """Remove the permit of an instance that neither holds it nor waits for it."""
        with self._lock:
            self._permits.discard(permit)
            self._available = _available(self._permits, self._capacities)

    def enqueue(self, permit: ResourcePermit) -> None:
        """Return the resources of a permit if it is held, and queue the permit for its next turn."""
        with self._lock:
            self._return_resources(permit)
            permit.turn = max(permit.turn, self._turn)
            bisect.insort(self._waiting, (permit.turn, next(self._count), permit))
            self._grant()

    def release(self, permit: ResourcePermit) -> None:
        """Return the resources of a permit if it is held."""
        with self._lock:
            self._return_resources(permit)
            self._grant()

    def blockers(self, permit: ResourcePermit) -> list[ResourcePermit]:
        """Return the permits that block this one now, or would if it queued."""
        with self._lock:
            if permit.is_held:
                return []
            lacking = {
                resource for resource, count in permit.needs.items() if not self._is_free({resource: count})
            }
            ahead = itertools.takewhile(
                lambda other: other is not permit, (item[2] for item in self._waiting)
            )
            return [
                *(other for other in self._permits if other.is_held and not lacking.isdisjoint(other.needs)),
                *(other for other in ahead if not permit.needs.keys().isdisjoint(other.needs)),
            ]

    def _return_resources(self, permit: ResourcePermit) -> None:
        if permit.is_held:
            permit.is_held = False
            self._held.subtract(permit.needs)

    def _grant(self) -> None:
        claimed: set[_Resource] = set()  # by permits further ahead
        for entry in list(self._waiting):
            turn, _, permit = entry
            if self._is_free(permit.needs) and claimed.isdisjoint(permit.needs):
                self._waiting.remove(entry)
                self._turn = max(self._turn, turn)
                self._held.update(permit.needs)
                permit.is_held = True
                permit.granted.release()
            else:
                claimed.update(permit.needs)

    def _is_free(self, needs: Mapping[_Resource, int]) -> bool:
        return all(
            self._held[resource] + count <= self._available[resource] for resource, count in needs.items()
        )


class ResourcePermit:
    """The resources that one instance holds while it executes; used by the thread of the instance."""

    def __init__(self, limiter: RateLimiter, needs: Mapping[_Resource, int], *, stride: int) -> None:
        self.needs = needs
        self.turn = 0
        self.is_held = False                        # written by the limiter under its lock
        self.granted = threading.Semaphore(0)
        self.executor: Executor | None = None       # set once the instance exists
        self._limiter = limiter
        self._stride = stride

    def withdraw(self) -> None:
        """Remove the permit from the limiter."""
        self._limiter.withdraw(self)

    def acquire(self) -> None:
        """Release the permit if held and wait for the next turn."""
        self.ask()
        self.granted.acquire()

    def ask(self) -> None:
        """Release the permit if held and queue for the next turn, which releases `granted`."""
        self._limiter.enqueue(self)

    def release(self) -> None:
        """Release the permit if held."""
        self._limiter.release(self)

    def blocked_by(self) -> list[Executor]:
        """Return the instances that block this one now, or would if it queued."""
        blockers = self._limiter.blockers(self)
        return [permit.executor for permit in blockers if permit.executor is not None]

    def executed(self) -> None:
        """Count a turn; not called for turns without a batch."""
        self.turn += self._stride


def _available(
    permits: Iterable[ResourcePermit], capacities: tuple[ResourceCapacity, ...]
) -> dict[_Resource, int]:
    """Return the available count of each claimed resource.

    Raises:
        RepositoryError: an instance needs more, or a resource is both global and device-specific.
    """
    most: dict[_Resource, int] = {}
    for permit in permits:
        for resource, count in permit.needs.items():
            most[resource] = max(count, most.get(resource, 0))
    for resource in most:
        if resource.device_id is not None and _Resource(resource.name, None) in most:
            raise RepositoryError(
                f'Resource "{resource.name}" is present as both global and device-specific resource in the '
                "model configuration.",
                remedy="set `global` to the same value for this resource in all models",
            )
    if not capacities:
        return most
    return {
        resource: _capacity(resource, needed=needed, capacities=capacities)
        for resource, needed in most.items()
    }


def _capacity(resource: _Resource, *, needed: int, capacities: tuple[ResourceCapacity, ...]) -> int:
    available = max(
        (c.count for c in capacities if c.name == resource.name and _is_at(c, resource)), default=0
    )
    if available < needed:
        raise RepositoryError(
            f'Resource count for "{resource.name}" is limited to {available} which will prevent scheduling '
            f"of one or more model instances, the minimum required count is {needed}",
            remedy=f"start with `--rate-limit-resource {resource.name}:{needed}`, or lower the count in "
            "config.pbtxt",
        )
    return available


def _is_at(capacity: ResourceCapacity, resource: _Resource) -> bool:
    return resource.device_id is None or capacity.device_id in (None, resource.device_id)
