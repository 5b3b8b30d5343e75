"""Response store: answers of the Responses API, kept in memory for later requests.

A response is kept as the JSON text that was sent, so that its size is known exactly, together with all items
that were the model's input: a later response does not depend on whether an earlier one is still there. It
belongs to the API key of its request: for another key neither the response nor its items exist.
"""

from __future__ import annotations

import json
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from genserve.errors import InvalidRequest, ResponseNotFound

# What the bookkeeping of one response takes, and the id of one item.
_OVERHEAD_BYTES = 1024
_ID_BYTES = 128


class PreviousResponseNotFound(InvalidRequest):
    """The response that a request continues is not stored."""

    code = "previous_response_not_found"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """One response.

    Attributes:
        body: the JSON of the response object.
        inputs: the JSON of the list of input items, which begins with the items of earlier responses.
        item_ids: the ids of its output items, and of the input items that came with its request.
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
    """Stored responses by API key and id.

    Above the limit, the key whose responses take most loses the one that it used least recently. So a key
    keeps what fits into its part of the limit, divided among the keys that have responses.

    Safe from any thread. `key` is the name of the key of a request, empty for requests without a key.

    Args:
        max_bytes: the limit of all responses together; 0: nothing is stored.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        # By key, then by id, the least recently used first.
        self._responses: dict[str, OrderedDict[str, StoredResponse]] = {}
        self._num_bytes: Counter[str] = Counter()           # by key, without zeros
        self._owners: dict[tuple[str, str], str] = {}       # the response of each item of a key
        self._lock = threading.RLock()          # guards these three

    def __len__(self) -> int:
        return sum(map(len, self._responses.values()))

    @property
    def num_bytes(self) -> int:
        """The size of all responses, bytes."""
        return self._num_bytes.total()

    def add(
        self,
        response: Mapping[str, Any],
        *,
        inputs: Sequence[Mapping[str, Any]],
        num_earlier: int,
        key: str = "",
    ) -> None:
        """Store a response, unless it is larger than the limit.

        Args:
            response: the response object.
            inputs: all items of the model's input.
            num_earlier: how many of these are of earlier responses.
            key: see the class.
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
            self._remove(key, response_id)      # its id may be one that the client chose
            self._responses.setdefault(key, OrderedDict())[response_id] = stored
            self._owners |= {(key, item_id): response_id for item_id in stored.item_ids}
            self._num_bytes[key] += stored.num_bytes
            while self.num_bytes > self.max_bytes:
                largest = max(self._num_bytes, key=self._num_bytes.__getitem__)
                self._remove(largest, next(iter(self._responses[largest])))

    def get(self, response_id: str, *, key: str = "") -> StoredResponse:
        """Return a response, which is then the most recently used; raises ResponseNotFound."""
        with self._lock:
            of_key = self._responses.get(key, OrderedDict())
            if (stored := of_key.get(response_id)) is not None:
                of_key.move_to_end(response_id)
                return stored
        message = f"no response with the id {response_id[:64]!r} is stored"
        raise ResponseNotFound(message, remedy="send the whole conversation as input")

    def item(self, item_id: str, *, key: str = "") -> dict[str, Any]:
        """Return an item of a stored response; raises ResponseNotFound."""
        with self._lock:
            owner = self._owners.get((key, item_id))
        if owner is None:
            message = f"no item with the id {item_id[:64]!r} is stored"
            raise ResponseNotFound(message, remedy="send the item itself")
        items = self.get(owner, key=key).items()
        return next(item for item in items if item["id"] == item_id)

    def delete(self, response_id: str, *, key: str = "") -> None:
        """Delete a response; raises ResponseNotFound."""
        with self._lock:
            self.get(response_id, key=key)
            self._remove(key, response_id)

    def _remove(self, key: str, response_id: str) -> None:
        """Remove a response, if it is there."""
        of_key = self._responses.get(key, OrderedDict())
        stored = of_key.pop(response_id, None)
        if stored is None:
            return
        self._num_bytes[key] -= stored.num_bytes
        if not of_key:
            del self._responses[key], self._num_bytes[key]
        for item_id in stored.item_ids:
            if self._owners.get((key, item_id)) == response_id:
                del self._owners[key, item_id]
