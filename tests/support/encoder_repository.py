"""A hand-written repository with an embedding model and a reranker, whose small graphs numpy can compute."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = (
    "[PAD]", "[CLS]", "[SEP]", "[UNK]",
    "the", "sea", "is", "calm", "and", "a", "mountain", "high", "salt", "water", "what", "deep",
)
SIZE = 8
MAX_LENGTH = 12
_RNG = np.random.default_rng(0)
TABLE = _RNG.standard_normal((len(WORDS), SIZE), dtype=np.float32)
SEGMENTS = _RNG.standard_normal((2, SIZE), dtype=np.float32)
HEAD = _RNG.standard_normal((SIZE, 1), dtype=np.float32)

_IDS = '{ name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] }'
_MASK = '{ name: "attention_mask" data_type: TYPE_INT64 dims: [ -1 ] }'
_TYPES = '{ name: "token_type_ids" data_type: TYPE_INT64 dims: [ -1 ] }'
_TOKENIZER = f"""
backend: "tokenizer"
max_batch_size: 4
input [ {{ name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }} PAIR ]
output [ {_IDS}, {_MASK}, {_TYPES} ]
parameters {{ key: "max_length" value {{ string_value: "{MAX_LENGTH}" }} }}
PROMPTS"""
_ENCODER = f"""
backend: "onnxruntime"
max_batch_size: 8
input [ {_IDS}, {_MASK}, {_TYPES} ]
output [ {{ name: "OUTPUT" data_type: TYPE_FP32 dims: [ SIZE ] }} ]
dynamic_batching {{}}
parameters [ PARAMETERS ]
"""
_ENSEMBLE = """
platform: "ensemble"
max_batch_size: 4
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } PAIR ]
output [ { name: "MADE" data_type: TYPE_FP32 dims: [ SIZE ] } ]
ensemble_scheduling { step [
  {
    model_name: "NAME_tokenizer" model_version: -1
    input_map { key: "text_input" value: "text_input" } PAIRMAP
    output_map { key: "input_ids" value: "input_ids" }
    output_map { key: "attention_mask" value: "attention_mask" }
    output_map { key: "token_type_ids" value: "token_type_ids" }
  },
  {
    model_name: "NAME_encoder" model_version: -1
    input_map { key: "input_ids" value: "input_ids" }
    input_map { key: "attention_mask" value: "attention_mask" }
    input_map { key: "token_type_ids" value: "token_type_ids" }
    output_map { key: "OUTPUT" value: "MADE" }
  }
] }
"""


def encoder_repository(root: Path, *, prompts: dict[str, str] | None = None) -> Path:
    """Write `vectors` (pooling: mean, normalised), and `ranker`, which scores pairs from 0 to 1.

    `prompts`: the parameters of the tokenizer of `vectors` about prompts.
    """
    _write_model(root, "vectors", output="last_hidden_state", made="embedding", size=SIZE, pair=False,
                 tokenizer=prompts, parameters={"pooling": "mean", "normalize": "true"})
    _write_model(root, "ranker", output="logits", made="scores", size=1, pair=True,
                 parameters={"pooling": "none", "sigmoid": "true"})
    return root


def hidden_states(ids: list[int], types: list[int] | None = None) -> NDArray[np.float32]:
    """What the graph computes for a text: each token, and the mean of all; [tokens, SIZE]."""
    embedded = TABLE[ids] + SEGMENTS[types or [0] * len(ids)]
    states: NDArray[np.float32] = embedded + embedded.mean(axis=0)
    return states


def ids_of(text: str) -> list[int]:
    """The token ids of a text, with special tokens."""
    known = [WORDS.index(word) if word in WORDS else 3 for word in text.split()]
    return [1, *known, 2]


def vector_of(text: str) -> NDArray[np.float32]:
    """The vector of a text."""
    mean = hidden_states(ids_of(text)).mean(axis=0)
    vector: NDArray[np.float32] = mean / np.linalg.norm(mean)
    return vector


def score_of(query: str, document: str) -> float:
    """The score of a pair of texts."""
    first, second = ids_of(query), ids_of(document)[1:]
    states = hidden_states([*first, *second], [0] * len(first) + [1] * len(second))
    return float(1 / (1 + np.exp(-(states[0] @ HEAD)[0])))


def _write_model(
    root: Path, name: str, *, output: str, made: str, size: int, pair: bool, parameters: dict[str, str],
    tokenizer: dict[str, str] | None = None,
) -> None:
    changes = {
        "PAIRMAP": 'input_map { key: "text_pair" value: "text_pair" }' if pair else "",
        "PAIR": ', { name: "text_pair" data_type: TYPE_STRING dims: [ 1 ] }' if pair else "",
        "NAME": name, "OUTPUT": output, "MADE": made, "SIZE": str(size),
        "PROMPTS": "".join(
            f'parameters {{ key: "{key}" value {{ string_value: {json.dumps(value)} }} }}\n'
            for key, value in (tokenizer or {}).items()
        ),
        "PARAMETERS": ", ".join(
            f'{{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in parameters.items()
        ),
    }
    configs = {f"{name}_tokenizer": _TOKENIZER, f"{name}_encoder": _ENCODER, name: _ENSEMBLE}
    for model, config in configs.items():
        (root / model / "1").mkdir(parents=True)
        for key, value in changes.items():
            config = config.replace(key, value)
        (root / model / "config.pbtxt").write_text(f'name: "{model}"{config}')
    _write_tokenizer(root / f"{name}_tokenizer" / "1")
    _write_graph(root / f"{name}_encoder" / "1" / "model.onnx", output=output)


def _write_tokenizer(folder: Path) -> None:
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "[PAD]"}))


def _write_graph(path: Path, *, output: str) -> None:
    node = helper.make_node
    nodes = [
        node("Gather", ["table", "input_ids"], ["word"]),
        node("Gather", ["segments", "token_type_ids"], ["segment"]),
        node("Add", ["word", "segment"], ["embedded"]),
        node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        node("Unsqueeze", ["mask", "last"], ["weights"]),
        node("Mul", ["embedded", "weights"], ["weighted"]),
        node("ReduceSum", ["weighted", "middle"], ["sum"]),
        node("ReduceSum", ["weights", "middle"], ["count"]),
        node("Div", ["sum", "count"], ["mean"]),
        node("Add", ["embedded", "mean"], ["last_hidden_state"]),
        node("Gather", ["last_hidden_state", "zero"], ["first"], axis=1),
        node("MatMul", ["first", "head"], ["logits"]),
    ]
    arrays = {
        "table": TABLE, "segments": SEGMENTS, "head": HEAD,
        "last": np.array([-1]), "middle": np.array([1]), "zero": np.array(0),
    }
    shape = ["batch", 1] if output == "logits" else ["batch", "tokens", SIZE]
    graph = helper.make_graph(
        nodes,
        "encoder",
        [
            helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "tokens"])
            for name in ("input_ids", "attention_mask", "token_type_ids")
        ],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, path)
