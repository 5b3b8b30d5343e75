"""Libraries: imports of large optional packages, one thread at a time.

Python locks each module separately. If one thread imports a package from its top and another thread a part
of it (`import torch`, `from torch.utils.dlpack import ...`), each waits for a lock of the other, and Python
gives one of them a partially initialized module. Models in separate processes never see that.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["importing"]


_LOCK = threading.RLock()
# Code that is imported may wait for a thread that imports in its turn: then both have to go on.
_PATIENCE_S = 10.0


@contextmanager
def importing(name: str) -> Iterator[None]:
    """Hold off the imports of other threads while this one imports a module that is not there yet."""
    if _is_there(name):
        yield
        return
    held = _LOCK.acquire(timeout=_PATIENCE_S)
    try:
        yield
    finally:
        if held:
            _LOCK.release()


def _is_there(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return spec is not None and not getattr(spec, "_initializing", False)
