"""Sampling rows: parameters of many rows, neutral where nothing is said."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np

from genserve.sampling.sampler import SamplingMetadata
from genserve.sampling.staged_sampler import Truncation


def sampling_rows(num: int, **columns: Any) -> SamplingMetadata:
    """A number for all rows, or an array of one for each, by name."""
    truncations = [
        Truncation(**{rule.name: _at(columns, rule.name, row, rule.default) for rule in fields(Truncation)})
        for row in range(num)
    ]
    return SamplingMetadata(
        temperature=np.array([_at(columns, "temperature", row, 1.0) for row in range(num)], dtype=np.float32),
        truncations=tuple(truncations),
        stages=(None,) * num,
        seed=np.array([_at(columns, "seed", row, 7) for row in range(num)], dtype=np.uint64),
        step=np.array([_at(columns, "step", row, row) for row in range(num)], dtype=np.uint64),
    )


def _at(columns: dict[str, Any], name: str, row: int, default: Any) -> Any:
    value = columns.get(name, default)
    return value[row].item() if isinstance(value, np.ndarray) else value
