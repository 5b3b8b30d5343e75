"""Sampling defaults: of a model's generation_config.json, and of chats in terminal and browser.

The default of each parameter is in its row in `sampling_params.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from genserve.sampling.sampling_options import SamplingOptions
from genserve.sampling.sampling_params import GENERATION_CONFIG, PARAMETERS, SamplingParams, sampling_params


def default_sampling_params(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters of a generation_config.json, by our names.

    As for transformers 5 and vLLM, every value counts that is not null. `do_sample: false` is temperature 0.

    Raises:
        InvalidRequest: a value is out of range; `field` is the name of our parameter.
    """
    values = {name: config[key] for key, name in GENERATION_CONFIG.items() if config.get(key) is not None}
    if config.get("do_sample") is False:
        values["temperature"] = 0.0
    read = sampling_params(values)
    return {name: getattr(read, name) for name in values}


def with_model_defaults(params: SamplingParams, defaults: Mapping[str, Any]) -> SamplingParams:
    """Return the parameters with the model's defaults for parameters that the request does not state.

    A default that contradicts a stated parameter is left out.
    """
    missing = {
        name: value
        for name, value in defaults.items()
        if name not in params.stated and not _contradicts(name, value, params)
    }
    return replace(params, **missing) if missing else params


def _contradicts(name: str, value: Any, params: SamplingParams) -> bool:
    row = PARAMETERS[name]
    excluded = any(getattr(params, other) != PARAMETERS[other].default for other in row.excludes)
    skipped = bool(params.samplers) and row.sampler is not None and row.sampler not in params.samplers
    match name:
        case "temperature":
            return excluded or skipped or (value == 0 and params.best_of > 1)
        case "max_tokens":
            return bool(value < params.min_tokens)
        case _:
            return excluded or skipped


# The defaults for a model that recommends nothing; `benchmarks/first_minute.py` compares them. They truncate,
# since the unlikely tokens of a small model are absurd. Without the penalty it falls into loops; without the
# window the penalty suppresses the end of the turn too, which the prompt contains, and the answer rambles on.
_OWN = SamplingOptions(temperature=0.5, min_p=0.1, repetition_penalty=1.1, penalty_window=256)
_SAMPLERS = frozenset({"temperature", "top_k", "top_p", "min_p", "typical_p", "top_h"})
# Less is no loop yet: the zeros of a matrix, the columns of a table, the rows of an empty board.
_LOOPS = SamplingOptions(
    repetition_detection={"min_pattern_size": 8, "max_pattern_size": 64, "min_count": 8}
)
# The limit of an answer in the terminal.
CHAT_MAX_TOKENS = 1024


def chat_sampling_params(recommended: Mapping[str, Any]) -> SamplingOptions:
    """Return the sampling options of a chat that gives none, in the terminal and on the chat page.

    Args:
        recommended: the model's default sampling params, which apply where a request leaves a value out.
    """
    own = _OWN if _SAMPLERS.isdisjoint(recommended) else SamplingOptions()
    return {**own, **_LOOPS}
