"""Expert tensors: the stacks of weights that transformers' modules have, and checkpoints have apart.

Most checkpoints have the tensors of each expert: `...mlp.experts.3.gate_proj.weight` [inner, hidden],
`up_proj`, and `down_proj` [hidden, inner], or `w1`, `w3` and `w2`. OLMo Hybrid's have three convolutions.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Literal

import numpy as np

from genserve.export.checkpoints.checkpoint import Checkpoint
from genserve.sampling.logits_array import FloatArray

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w3|w2)\.(weight|bias)")

# The stacks, each of the tensors of an expert that it has.
_STACKS = (
    ("gate_up_proj", ("gate_proj", "up_proj")),
    ("down_proj", ("down_proj",)),
    ("gate_up_proj", ("w1", "w3")),
    ("down_proj", ("w2",)),
    ("up_proj", ("up_proj",)),      # experts without a gate
)
# Modules whose parts some checkpoints have apart: those of OLMo Hybrid, and of others in GGUF files.
_JOINED = {
    "conv1d": ("q_conv1d", "k_conv1d", "v_conv1d"),
    "kv_b_proj": ("k_b_proj", "v_b_proj"),
    "shared_mlp.input_linear": ("shared_mlp.gate_proj", "shared_mlp.up_proj"),
}


# In a transposed stack, gates and values alternate, or all values follow all gates.
TransposedStacks = Literal["in turn", "halves"]


def with_stacks(checkpoint: Checkpoint, *, transposed: TransposedStacks | None = None) -> Checkpoint:
    """Return the checkpoint with the stacks of its experts' tensors besides them.

    `gate_up_proj` [experts, 2 * inner, hidden] has the gates and then the values that they scale, and
    `down_proj` is [experts, hidden, inner]. With `transposed` they are [experts, hidden, 2 * inner] and
    [experts, inner, hidden]. Biases are stacks with the same name and `_bias`.
    """
    counts: dict[tuple[str, str], int] = {}
    names: dict[tuple[str, str], set[str]] = {}
    for name in checkpoint.tensor_names:
        if (found := _EXPERT.fullmatch(name)) is not None:
            key = found[1], found[4]
            counts[key] = max(counts.get(key, 0), int(found[2]) + 1)
            names.setdefault(key, set()).add(found[3])
    stacks: dict[str, tuple[str, str, int, tuple[str, ...]]] = {}
    for (prefix, kind), count in counts.items():
        end = "_bias" if kind == "bias" else ""
        for stack, parts in _STACKS:
            if names[prefix, kind].issuperset(parts):
                stacks[f"{prefix}.{stack}{end}"] = (prefix, kind, count, parts)
    joined = {
        f"{found[1]}.{whole}.weight": [f"{found[1]}.{part}.weight" for part in parts]
        for whole, parts in _JOINED.items()
        for name in checkpoint.tensor_names
        if (found := re.fullmatch(rf"(.*)\.{re.escape(parts[0])}\.weight", name)) is not None
    }

    def load(name: str, rows: slice) -> FloatArray:
        if name in joined:
            return _joined([checkpoint.load(part, slice(None)) for part in joined[name]], name=name)[rows]
        if name not in stacks:
            return checkpoint.load(name, rows)
        prefix, kind, count, parts = stacks[name]
        experts = range(count)[rows]
        stack = np.empty((len(experts), *shape(name)[1:]), np.float32)  # filled in place: it may be large
        for place, expert in zip(stack, experts, strict=True):
            outputs = place.T if transposed else place
            for index, part in enumerate(parts):
                found = checkpoint.tensor(f"{prefix}.{expert}.{part}.{kind}")
                if transposed == "in turn":
                    outputs[index :: len(parts)] = found
                else:
                    outputs[index * len(found) : (index + 1) * len(found)] = found
        return stack

    def shape(name: str) -> tuple[int, ...]:
        if name in joined:
            empty = [np.broadcast_to(np.float32(0), checkpoint.shape(part)) for part in joined[name]]
            return _joined(empty, name=name).shape
        if name not in stacks:
            return checkpoint.shape(name)
        prefix, kind, count, parts = stacks[name]
        outputs, *inputs = checkpoint.shape(f"{prefix}.0.{parts[0]}.{kind}")
        sizes = [len(parts) * outputs, *inputs]
        return (count, *(sizes[::-1] if transposed else sizes))

    all_names = checkpoint.tensor_names | stacks.keys() | joined.keys()
    return replace(checkpoint, tensor_names=all_names, load=load, shape=shape)


def _joined(parts: list[FloatArray], *, name: str) -> FloatArray:
    """Return a module's weight from those of its parts; heads of DeepSeek's keys are transposed."""
    if not name.endswith(".kv_b_proj.weight"):
        return np.concatenate(parts)
    keys, values = parts    # [heads * rank, size of keys], [heads * size of values, rank]
    rank = values.shape[1]
    heads = keys.reshape(-1, rank, keys.shape[1]).swapaxes(1, 2)
    stacked = np.concatenate([heads, values.reshape(len(heads), -1, rank)], axis=1)
    return stacked.reshape(-1, rank)
