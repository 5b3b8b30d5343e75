"""State: what both faces of the protocol share while a server runs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from genserve.inference import Parameter
from genserve.kserve.log_settings import LogSettings
from genserve.kserve.models import Models
from genserve.kserve.shared_memory import SharedMemory
from genserve.kserve.trace_settings import TraceSettings
from genserve.version import __version__

__all__ = ["KServeState", "forwarded"]


@dataclass(slots=True, kw_only=True)
class KServeState:
    """The models and settings behind the KServe v2 protocol; one for HTTP and gRPC together.

    Attributes:
        models: the repository.
        server_id: the name in the server's metadata.
        strict_readiness: the server is ready only while every model is; else once it has started.
        max_json_bytes: of one HTTP request.
        header_pattern: HTTP headers that become parameters of the request; None: no header does.
        draining: set once, when the server is told to stop.
    """

    models: Models
    shared_memory: SharedMemory = field(default_factory=lambda: SharedMemory(allowed=False))
    log_settings: LogSettings = field(default_factory=LogSettings)
    trace_settings: TraceSettings = field(default_factory=TraceSettings)
    server_id: str = "genserve"
    server_version: str = __version__
    strict_readiness: bool = True
    max_json_bytes: int = 64 * 2**20
    header_pattern: re.Pattern[str] | None = None
    draining: bool = False

    @property
    def ready(self) -> bool:
        """Whether the server answers requests."""
        state = self.models.state
        return not self.draining and (state == "READY" if self.strict_readiness else state != "LOADING")


def forwarded(headers: Iterable[tuple[str, str]], pattern: re.Pattern[str]) -> dict[str, Parameter]:
    """Return the headers that become parameters: those in which the pattern is found."""
    return {name: value for name, value in headers if pattern.search(name)}
