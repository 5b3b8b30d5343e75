"""Chat options: the sampling parameters with which a chat begins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from genserve.sampling.sampling_options import SamplingOptions

# For a model that recommends nothing. Without truncation a small model picks an absurd token now and then.
_TRUNCATED = SamplingOptions(temperature=0.7, min_p=0.1)
_SAMPLERS = frozenset({"temperature", "top_k", "top_p", "min_p", "typical_p", "top_h"})
# So that an answer ends, whatever the model does.
_ENDS = SamplingOptions(max_tokens=1024, repetition_detection={"max_pattern_size": 64, "min_count": 6})


def chat_options(given: SamplingOptions, *, recommended: Mapping[str, Any]) -> SamplingOptions:
    """Return the options of a chat: those given, and the chat's own where the model recommends nothing.

    Args:
        given: the options of the command line; they win.
        recommended: the model's default sampling params, which apply where a request leaves a value out.
    """
    own = _TRUNCATED if _SAMPLERS.isdisjoint(recommended) else SamplingOptions()
    return cast(SamplingOptions, {**own, **_ENDS, **given})
