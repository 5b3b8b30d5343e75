"""Request ledger: how the requests of a text model have ended, as its server counts them."""

from __future__ import annotations

from collections import Counter

from genserve.completion import ABORT, ERROR, FinishReason
from tests.support.live_server import LiveServer, wait_until

_ENDINGS = (*(reason.value for reason in FinishReason), ABORT, ERROR)


class RequestLedger:
    """The sequences of one model that ended since the ledger was opened.

    A sequence that ended twice counts twice, and a lost sequence never counts, so the sum shows both defects.
    """

    def __init__(self, server: LiveServer) -> None:
        self._registry = server.server.services.metrics.registry
        self._engine = server.model.engine
        self._name = server.model.name
        self._before = self._counts()

    def ends(self) -> dict[str, int]:
        """Wait until no request runs, waits or is prepared; return how many ended in each way."""
        wait_until(lambda: not self._engine.num_accepted and not self._engine.num_preparing)
        return dict(self._counts() - self._before)

    def _counts(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for ending in _ENDINGS:
            labels = {"model": self._name, "finished_reason": ending}
            counts[ending] = int(self._registry.get_sample_value("genserve_requests_total", labels) or 0)
        return counts
