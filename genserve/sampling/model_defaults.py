"""Model defaults: the sampling parameters that a model's generation_config.json recommends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

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
    """Return the parameters with the model's defaults for what the request does not state.

    A default that contradicts what the request gives is left out.
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
    skipped = bool(params.samplers) and row.stage is not None and row.stage not in params.samplers
    match name:
        case "temperature":
            return excluded or skipped or (value == 0 and params.best_of > 1)
        case "max_tokens":
            return bool(value < params.min_tokens)
        case _:
            return excluded or skipped
