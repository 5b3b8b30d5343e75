"""Open files: how many files and connections the process may hold at a time."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger(__name__)

# More are of no use to one event loop, and some containers allow a billion, for which child processes loop.
_WANTED = 65536
# Below this a burst of connections finds none.
_FEW = 2048


def allow_many_open_files() -> None:
    """Raise the soft limit of open files, which systems keep at 1,024 for old programs, to the hard one."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    limit = _WANTED if hard == unlimited else min(hard, _WANTED)
    if soft != unlimited and soft < limit:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            soft = limit
        except (OSError, ValueError):   # macOS has a lower limit of its own
            logger.debug("the limit of open files cannot be raised to %d", limit)
    if soft != unlimited and soft < _FEW:
        logger.warning(
            "only %d files and connections may be open at a time; raise the limit with `ulimit -n`", soft
        )
