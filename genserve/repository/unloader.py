"""Unloader: closes the versions of models that others have replaced, and returns their memory."""

from __future__ import annotations

import ctypes
import gc
import logging
import sys
import threading
import time
from collections.abc import Iterable

from genserve.repository.model_versions import UNLOADED, ModelState, ModelTable, ModelVersion

logger = logging.getLogger(__name__)

_C_LIBRARY = ctypes.CDLL(None) if sys.platform == "linux" else None


class Unloader:
    """Closes replaced versions on threads, once their requests have ended.

    Attributes:
        is_closing: the process is about to exit.
    """

    def __init__(self, table: ModelTable) -> None:
        self.is_closing = False
        self._table = table
        self._threads: dict[threading.Thread, None] = {}  # in the order of their start

    def unload(self, old: list[ModelVersion], *, timeout_s: float) -> None:
        """Close versions that are no longer in the table; does not block."""
        keys = [(served.name, served.version) for served in old]
        self._set_state(keys, ModelState.UNLOADING)
        started_s = time.monotonic()

        def close() -> None:
            while old:
                remaining_s = started_s + timeout_s - time.monotonic()
                old.pop().close(timeout_s=max(0.0, remaining_s))
            if not self.is_closing:
                gc.collect()  # a model's weights are often in a reference cycle with it
                return_free_memory()
            self._set_state(keys, ModelState.UNAVAILABLE, reason=UNLOADED)
            text = ", ".join(f"{name} version {version}" for name, version in keys)
            logger.info("unloaded in %.1f s: %s", time.monotonic() - started_s, text)
            self._threads.pop(thread, None)

        if old:
            thread = threading.Thread(target=close, name=f"unload-{old[0].name}", daemon=True)
            self._threads[thread] = None
            thread.start()

    def join(self) -> None:
        """Wait until all versions are closed."""
        for thread in list(self._threads):
            thread.join()

    def _set_state(self, keys: Iterable[tuple[str, int]], state: ModelState, *, reason: str = "") -> None:
        """Set the state of versions, except versions that another one has replaced."""
        for name, version in keys:
            if self._table.get(name, version) is None:
                self._table.set_state(name, version, state, reason=reason)


def return_free_memory() -> None:
    """Return the C library's free memory to the system: 30 of 195 MB after a load of the default model."""
    trim = getattr(_C_LIBRARY, "malloc_trim", None)  # only glibc has it
    if trim is not None:
        trim(0)
