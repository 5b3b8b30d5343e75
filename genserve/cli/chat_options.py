"""Chat options: the sampling parameters with which a chat begins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from genserve.sampling.sampling_options import SamplingOptions

# For a model that recommends nothing; `benchmarks/first_minute.py` compares them. Truncated, since the
# unlikely tokens of a small model are absurd. Without the penalty it falls into loops; without the window the
# penalty suppresses the end of the turn too, which the prompt contains, and the answer rambles on.
_OWN = SamplingOptions(temperature=0.5, min_p=0.1, repetition_penalty=1.1, penalty_window=256)
_SAMPLERS = frozenset({"temperature", "top_k", "top_p", "min_p", "typical_p", "top_h"})
# So that an answer ends, whatever the model does.
_ENDS = SamplingOptions(
    max_tokens=1024,
    # Less is no loop yet: the zeros of a matrix, the columns of a table, the rows of an empty board.
    repetition_detection={"min_pattern_size": 8, "max_pattern_size": 64, "min_count": 8},
)


def chat_options(given: SamplingOptions, *, recommended: Mapping[str, Any]) -> SamplingOptions:
    """Return the options of a chat: those given, and the chat's own where the model recommends nothing.

    Args:
        given: the options of the command line; they win.
        recommended: the model's default sampling params, which apply where a request leaves a value out.
    """
    own = _OWN if _SAMPLERS.isdisjoint(recommended) else SamplingOptions()
    return cast(SamplingOptions, {**own, **_ENDS, **given})
