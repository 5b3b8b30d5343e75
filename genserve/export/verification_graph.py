"""Verification graph: a decoder's graph that runs several tokens of a row as so many steps would.

A token's logits, keys and values are then those that a step of one token gives, to the bit wherever a row
does not depend on the others of its batch. Attention over several tokens at once is another product of
matrices, whose last bits differ, and 8-bit activations make some tenths of a logit of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import NodeProto, helper, numpy_helper

from genserve.backends.onnx_verifier import VERIFICATION_FILE
from genserve.export.graph import MODEL_FILE

__all__ = ["write_verification"]

# The token that is due, and five drafted ones: together they cost about 2.2 times what one costs.
_NUM_TOKENS = 6
_PACKED = range(3)      # of GroupQueryAttention's inputs: queries, keys, values
_PAST = slice(3, 5)
_SEQLENS = 5
_BIAS = 10


def write_verification(folder: Path) -> None:
    """Write it beside the graph of `write_decoder` in a folder, over the same weights.

    Each GroupQueryAttention becomes one for each token, which go on where the one before has written. Inputs
    and outputs are those of the graph, with `sequence` fixed, and beside `present.{i}.key` and `.value`
    those of the tokens before the last, `present.{i}.key.{token}`: to be bound to the same buffer.
    """
    model = onnx.load(folder / MODEL_FILE, load_external_data=False)
    graph = model.graph
    attentions = [node for node in graph.node if node.op_type == "GroupQueryAttention"]
    nodes = [_shorter(token) for token in range(_NUM_TOKENS - 1)]
    split: set[str] = set()
    for node in graph.node:
        nodes += _token_by_token(node, split) if node in attentions else [node]
    graph.initializer.append(numpy_helper.from_array(np.ones(_NUM_TOKENS, np.int64), "token.sizes"))
    for token in range(_NUM_TOKENS - 1):
        behind = np.array(_NUM_TOKENS - 1 - token, np.int32)
        graph.initializer.append(numpy_helper.from_array(behind, f"token.{token}.behind"))
    del graph.node[:]
    graph.node.extend(nodes)
    for present in [value for value in graph.output if value.name.startswith("present.")]:
        for token in range(_NUM_TOKENS - 1):
            graph.output.add().CopyFrom(present)
            graph.output[-1].name = f"{present.name}.{token}"
    [ids] = [value for value in graph.input if value.name == "input_ids"]
    ids.type.tensor_type.shape.dim[1].dim_value = _NUM_TOKENS
    (folder / VERIFICATION_FILE).write_bytes(model.SerializeToString())


def _shorter(token: int) -> NodeProto:
    """How much lies in the cache, less one, when a token is written."""
    name = _seqlens(token)
    return helper.make_node("Sub", ["seqlens_k", f"token.{token}.behind"], [name], name=name)


def _seqlens(token: int) -> str:
    return "seqlens_k" if token == _NUM_TOKENS - 1 else f"seqlens_k.{token}"


def _token_by_token(node: NodeProto, split: set[str]) -> list[NodeProto]:
    """The attention of each token, behind that of the one before; `split` has what is split already."""
    nodes: list[NodeProto] = []
    for index, axis in [*((packed, 1) for packed in _PACKED), (_BIAS, 2)]:
        name = node.input[index] if index < len(node.input) else ""
        if name and name not in split:
            split.add(name)
            inputs, label = [name, "token.sizes"], f"{name}.tokens"
            nodes.append(helper.make_node("Split", inputs, _parts(name), name=label, axis=axis))
    past: Sequence[str] = node.input[_PAST]
    for token, output in enumerate(_parts(node.output[0])):
        step = NodeProto()
        step.CopyFrom(node)
        step.name = step.output[0] = output
        for index in (*_PACKED, _BIAS):
            if index < len(node.input) and node.input[index]:
                step.input[index] = _parts(node.input[index])[token]
        step.input[3], step.input[4] = past
        step.input[_SEQLENS] = _seqlens(token)
        if token < _NUM_TOKENS - 1:
            step.output[1], step.output[2] = (f"{present}.{token}" for present in node.output[1:3])
        past = step.output[1:3]
        nodes.append(step)
    joined = helper.make_node("Concat", _parts(node.output[0]), node.output[:1], name=node.output[0], axis=1)
    return [*nodes, joined]


def _parts(name: str) -> list[str]:
    return [f"{name}.token.{token}" for token in range(_NUM_TOKENS)]
