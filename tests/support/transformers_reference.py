"""The model of transformers for a checkpoint, the reference for ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PreTrainedModel

__all__ = ["greedy_ids", "reference_logits", "reference_model"]


def reference_model(checkpoint: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager", dtype=torch.float32)
    return model.eval()


def reference_logits(model: PreTrainedModel, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """[tokens, vocab]"""
    with torch.inference_mode():
        return model(torch.from_numpy(ids)[None]).logits[0].numpy()


def greedy_ids(
    model: PreTrainedModel, prompt: Sequence[int], *, num_tokens: int, end: int | None = None, **rules: Any
) -> list[int]:
    """The answer of `generate`, its end included; without an `end` it has all of the tokens."""
    ids = torch.tensor([prompt])
    if end is None:
        rules["min_new_tokens"] = num_tokens
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=num_tokens,
        eos_token_id=end,
        pad_token_id=end or 0,
        **rules,
    )
    return output[0, len(prompt) :].tolist()
