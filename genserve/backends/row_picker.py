"""Row picker: tokens from rows of logits, where these lie."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from genserve.generation import sampler
from genserve.generation.draw import SamplingRows
from genserve.generation.likelihood import Asked
from genserve.generation.logit_edits import LogitEdits
from genserve.generation.logits_model import LogitsArray
from genserve.generation.sampler import PickedRows

__all__ = ["pick_rows"]


def pick_rows(
    logits: LogitsArray,
    *,
    drawing: Sequence[int],
    rules: SamplingRows,
    asking: Sequence[Asked],
    edits: LogitEdits | None = None,
) -> PickedRows:
    """See `generation.sampler.pick_rows`; the logits of a torch tensor do not leave their device."""
    if isinstance(logits, np.ndarray):
        return sampler.pick_rows(logits, drawing=drawing, rules=rules, asking=asking, edits=edits)
    from genserve.backends import torch_sampler  # torch is loaded, or there would be no such logits

    return torch_sampler.pick_rows(logits, drawing=drawing, rules=rules, asking=asking, edits=edits)
