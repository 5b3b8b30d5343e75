"""Chat defaults: the sampling parameters with which a chat begins, in the terminal and on the chat page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from genserve.sampling.sampling_options import SamplingOptions

# For a model that recommends nothing; `benchmarks/first_minute.py` compares them. Truncated, since the
# unlikely tokens of a small model are absurd. Without the penalty it falls into loops; without the window the
# penalty suppresses the end of the turn too, which the prompt contains, and the answer rambles on.
_OWN = SamplingOptions(temperature=0.5, min_p=0.1, repetition_penalty=1.1, penalty_window=256)
_SAMPLERS = frozenset({"temperature", "top_k", "top_p", "min_p", "typical_p", "top_h"})
# Less is no loop yet: the zeros of a matrix, the columns of a table, the rows of an empty board.
_LOOPS = SamplingOptions(
    repetition_detection={"min_pattern_size": 8, "max_pattern_size": 64, "min_count": 8}
)
# The limit of an answer in the terminal, lowered to what the context has left.
MAX_TOKENS = 1024


def chat_sampling_params(recommended: Mapping[str, Any]) -> SamplingOptions:
    """Return the sampling options of a chat that gives none.

    Args:
        recommended: the model's default sampling params, which apply where a request leaves a value out.
    """
    own = _OWN if _SAMPLERS.isdisjoint(recommended) else SamplingOptions()
    return {**own, **_LOOPS}
