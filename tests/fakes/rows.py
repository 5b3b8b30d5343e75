"""Sampling metadata of many rows, with neutral defaults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from genserve.sampling.sampler import GREEDY_RULE, LogprobsRequest, SamplingMetadata, sampling_rule
from genserve.sampling.sampler_chain import chain_of
from genserve.sampling.sampling_params import SamplingParams


def metadata_of(
    num: int,
    *,
    drawing: Sequence[int] | None = None,
    logprobs: Sequence[LogprobsRequest] = (),
    **columns: Any,
) -> SamplingMetadata:
    """Return metadata of `num` rows that draw; each parameter is one value for all rows, or an array."""
    seed, step = columns.pop("seed", 7), columns.pop("step", np.arange(num))
    params = [
        SamplingParams(**{"temperature": 1.0} | {name: _at(value, row) for name, value in columns.items()})
        for row in range(num)
    ]
    chains = [chain_of(one, spared_ids=()) for one in params]
    return SamplingMetadata.of(
        range(num) if drawing is None else drawing,
        [GREEDY_RULE if s else sampling_rule(one) for one, s in zip(params, chains, strict=True)],
        chains=chains,
        seeds=[_at(seed, row) for row in range(num)],
        steps=[_at(step, row) for row in range(num)],
        logprobs=logprobs,
    )


def only(metadata: SamplingMetadata, index: int) -> SamplingMetadata:
    """Return the metadata of one row."""
    return replace(
        metadata,
        drawing=[0],
        rules=metadata.rules[index : index + 1],
        chains=metadata.chains[index : index + 1],
        chances=metadata.chances[index : index + 1],
    )


def _at(value: Any, row: int) -> Any:
    return value[row].item() if isinstance(value, np.ndarray) else value
