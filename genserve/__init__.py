"""genserve: text generation from a model repository in Triton's format, in one Python process.

Each public name is imported when it is first used, so importing the package is fast.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from genserve.version import __version__

if TYPE_CHECKING:
    from genserve.client import AsyncClient, Client
    from genserve.completion import Completion, Delta, FinishReason, Usage
    from genserve.errors import GenserveError
    from genserve.llm import LLM
    from genserve.prompt import Chat, Message
    from genserve.sampling.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "AsyncClient",
    "Chat",
    "Client",
    "Completion",
    "Delta",
    "FinishReason",
    "GenserveError",
    "Message",
    "SamplingParams",
    "Usage",
    "__version__",
]

# ONNX Runtime, Hugging Face's libraries and Ray send usage reports to their makers, unless these variables
# are set before their import. Each of our processes imports this package first, and passes the variables on.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

_HOME = {
    "LLM": "genserve.llm",
    "AsyncClient": "genserve.client",
    "Client": "genserve.client",
    "GenserveError": "genserve.errors",
    "SamplingParams": "genserve.sampling.sampling_params",
    "Chat": "genserve.prompt",
    "Message": "genserve.prompt",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'genserve' has no attribute {name!r}")
    return getattr(import_module(_HOME.get(name, "genserve.completion")), name)


def __dir__() -> list[str]:
    return __all__
