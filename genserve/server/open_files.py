"""Open files: how many files and connections the process may hold at a time."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger(__name__)

# More are of no use to one event loop, and some containers allow a billion, for which child processes loop.
_WANTED = 65536
# Of models, logs and child processes, beside those of connections.
_OTHERS = 256


def allow_open_files(*, num_connections: int) -> None:
    """Raise the soft limit of open files, which systems keep at 1,024 for old programs, to the hard one.

    If it still leaves too few for these connections, the log says so.
    """
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
    if soft != unlimited and soft < num_connections + _OTHERS:
        logger.warning(
            "%d files may be open at a time, too few for %d connections: raise the limit with `ulimit -n`, "
            "or set --max-connections",
            soft,
            num_connections,
        )
