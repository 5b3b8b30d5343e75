"""Response store: answers of the Responses API, kept in memory for later requests.

A response is kept as the JSON text that was sent, so that its size is known exactly, together with all items
that were the model's input: a later response does not depend on whether an earlier one is still there.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from genserve.errors import GenserveError, InvalidRequest

# Of the bookkeeping of one response, and of the id of one item.
_OVERHEAD_BYTES = 1024
_ID_BYTES = 128


class ResponseNotFound(GenserveError):
    """No stored response, or item of one, has this id."""

    code = "response_not_found"


class PreviousResponseNotFound(InvalidRequest):
    """The response that a request continues is not stored."""

    code = "previous_response_not_found"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """One response.

    Attributes:
        body: the JSON of the response object.
        inputs: the JSON of the list of input items, which begins with the items of earlier responses.
        item_ids: of its output items, and of the input items that came with its request.
    """

    body: bytes
    inputs: bytes
    item_ids: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        """The size that counts towards the limit, bytes."""
        overhead = _OVERHEAD_BYTES + _ID_BYTES * len(self.item_ids)
        return len(self.body) + len(self.inputs) + overhead

    def items(self) -> list[dict[str, Any]]:
        """Return the conversation up to here: all input items, and the output items."""
        return [*json.loads(self.inputs), *json.loads(self.body)["output"]]


class ResponseStore:
    """Stored responses by id; above the limit, the least recently used ones are evicted.

    Safe from any thread.

    Args:
        max_bytes: of all responses together; 0: nothing is stored.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()   # the least recently used first
        self._owners: dict[str, str] = {}       # the response of each item
        self._lock = threading.RLock()          # of these three

    def __len__(self) -> int:
        return len(self._responses)

    def add(
        self, response: Mapping[str, Any], *, inputs: Sequence[Mapping[str, Any]], num_earlier: int
    ) -> None:
        """Store a response, unless it is larger than the limit.

        Args:
            response: the response object.
            inputs: all items of the model's input.
            num_earlier: how many of these are of earlier responses.
        """
        items = [*inputs[num_earlier:], *response["output"]]
        stored = StoredResponse(
            body=json.dumps(response).encode(),
            inputs=json.dumps(inputs).encode(),
            item_ids=tuple(item["id"] for item in items),
        )
        if stored.num_bytes > self.max_bytes:
            return
        response_id = response["id"]
        with self._lock:
            self._responses[response_id] = stored
            self._owners |= dict.fromkeys(stored.item_ids, response_id)
            self.num_bytes += stored.num_bytes
            while self.num_bytes > self.max_bytes:
                self._remove(next(iter(self._responses)))

    def get(self, response_id: str) -> StoredResponse:
        """Return a response, which is then the most recently used; raises ResponseNotFound."""
        with self._lock:
            if response_id in self._responses:
                self._responses.move_to_end(response_id)
                return self._responses[response_id]
        message = f"no response with the id {response_id[:64]!r} is stored"
        raise ResponseNotFound(message, remedy="send the whole conversation as input")

    def item(self, item_id: str) -> dict[str, Any]:
        """Return an item of a stored response; raises ResponseNotFound."""
        with self._lock:
            owner = self._owners.get(item_id)
        if owner is None:
            message = f"no item with the id {item_id[:64]!r} is stored"
            raise ResponseNotFound(message, remedy="send the item itself")
        items = self.get(owner).items()
        return next(item for item in items if item["id"] == item_id)

    def delete(self, response_id: str) -> None:
        """Delete a response; raises ResponseNotFound."""
        with self._lock:
            self.get(response_id)
            self._remove(response_id)

    def _remove(self, response_id: str) -> None:
        stored = self._responses.pop(response_id)
        self.num_bytes -= stored.num_bytes
        for item_id in stored.item_ids:
            if self._owners.get(item_id) == response_id:
                del self._owners[item_id]
