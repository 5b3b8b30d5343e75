"""Row picker: tokens from rows of logits, where these lie."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from genserve.generation.logits_model import LogitsArray
from genserve.sampling import sampler
from genserve.sampling.logits_edits import LogitsEdits
from genserve.sampling.sampler import Asked, SamplerOutput, SamplingMetadata

__all__ = ["sample_rows"]


def sample_rows(
    logits: LogitsArray,
    *,
    drawing: Sequence[int],
    rules: SamplingMetadata,
    asking: Sequence[Asked],
    edits: LogitsEdits | None = None,
) -> SamplerOutput:
    """See `generation.sampler.sample_rows`; the logits of a torch tensor do not leave their device."""
    if isinstance(logits, np.ndarray):
        return sampler.sample_rows(logits, drawing=drawing, rules=rules, asking=asking, edits=edits)
    from genserve.sampling import torch_sampler

    return torch_sampler.sample_rows(logits, drawing=drawing, rules=rules, asking=asking, edits=edits)
