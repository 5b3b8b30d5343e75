"""Sampling rows: parameters of many rows, neutral where nothing is said."""

from __future__ import annotations

from typing import Any

import numpy as np

from genserve.generation.sampler import SamplingRows


def sampling_rows(num: int, **columns: Any) -> SamplingRows:
    """A number for all rows, or an array of one for each, by name."""
    neutral = {
        "temperature": 1.0,
        "top_p": 1.0,
        "min_p": 0.0,
        "typical_p": 1.0,
        "epsilon_cutoff": 0.0,
        "eta_cutoff": 0.0,
        "top_n_sigma": 0.0,
    }
    kinds = {"top_k": np.int64, "seed": np.uint64, "step": np.uint64, "stages": np.object_}
    values = {**neutral, "top_k": 0, "seed": 7, "step": np.arange(num), "stages": None, **columns}
    return SamplingRows(
        **{
            name: np.broadcast_to(np.asarray(value), (num,)).astype(kinds.get(name, np.float32))
            for name, value in values.items()
        }
    )
