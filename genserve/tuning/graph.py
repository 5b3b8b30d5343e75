"""Graph: what is known of a graph in a logits stage's version folder without running it."""

from __future__ import annotations

from pathlib import Path

from genserve.errors import RepositoryError
from genserve.repository.parity_file import read_parity

__all__ = ["state_types", "top1_agreement"]

_DATA_TYPES = {"FLOAT": "TYPE_FP32", "FLOAT16": "TYPE_FP16", "INT8": "TYPE_INT8"}


def state_types(path: Path) -> dict[str, str]:
    """Return the type of each buffer of an ONNX graph's KV cache, by the name of its input: TYPE_FP32.

    Raises:
        RepositoryError: the file cannot be read.
    """
    import onnx  # takes a while, and serving has no need of it

    try:
        inputs = onnx.load(path, load_external_data=False).graph.input
    except Exception as error:  # those of protobuf and of the system share no base class
        raise RepositoryError(f"{path} cannot be read: {error}", remedy="is it an ONNX model?") from error
    names = {value.name: onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type) for value in inputs}
    return {name: _DATA_TYPES[kind] for name, kind in names.items() if name.startswith("past_key_values.")}


def top1_agreement(path: Path) -> float | None:
    """Return how often a graph ranks the same token first as its source: the share; None: nobody knows."""
    found = read_parity(path.parent).get("top1_agreement")
    return found if isinstance(found, float) else None
