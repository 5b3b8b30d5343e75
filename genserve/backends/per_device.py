"""Per device: what the instances of a version on one device share, such as its weights."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from genserve.backends.backend import Placement

__all__ = ["PerDevice"]

T = TypeVar("T")


class PerDevice(Generic[T]):
    """Opens a thing once on each device, when the first instance there starts. Safe from any thread."""

    def __init__(self, open_on: Callable[[Placement], T]) -> None:
        self._open_on = open_on
        self._opening = threading.Lock()
        self._things: dict[tuple[str, int], T] = {}

    def of(self, placement: Placement) -> T:
        """Return the thing of the device of an instance; raises what opening it raises."""
        device = (placement.kind, placement.device_id if placement.kind == "GPU" else 0)
        with self._opening:
            if device not in self._things:
                self._things[device] = self._open_on(placement)
            return self._things[device]
