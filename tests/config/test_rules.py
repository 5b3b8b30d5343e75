"""The rules of one config.pbtxt: each broken one with its golden messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from genserve.config.parse import inspect_model_config

ONNX = 'backend: "onnxruntime"\n'
LEAVE_OUT = "leave it out"

CASES = {
    "another name": (
        'name: "other"\nbackend: "python"',
        ["1:1: error: the model is named 'other' and its folder 'm'; give both the same name, or leave "
         "`name` out"],
    ),
    "no backend": (
        "max_batch_size: 1",
        ["1:1: error: neither `backend` nor `platform` says how to run the model; add `backend: "
         '"onnxruntime"`, "python" or "tokenizer", or `platform: "ensemble"`'],
    ),
    "a misspelt backend": (
        'backend: "onnx_runtime"',
        ["1:1: error: there is no backend 'onnx_runtime'; did you mean onnxruntime?"],
    ),
    "a backend of somebody else's": (
        '\n  backend: "vllm"',
        ["2:3: error: there is no backend 'vllm'; known there: onnxruntime, python, tokenizer"],
    ),
    "Triton's older word": (
        'platform: "onnxruntime_onnx"',
        ["1:1: error: there is no platform 'onnxruntime_onnx'; write `backend: \"onnxruntime\"` in its "
         "place"],
    ),
    "a misspelt platform": (
        'platform: "ensamble"',
        ["1:1: error: there is no platform 'ensamble'; did you mean ensemble?; a model that is no ensemble "
         "has a `backend`"],
    ),
    "an ensemble without steps": (
        'platform: "ensemble"',
        ["1:1: error: the ensemble has no steps; add `ensemble_scheduling { step [ { model_name: ... } ] }`"],
    ),
    "a negative batch": (
        ONNX + "max_batch_size: -2",
        ["2:1: error: max_batch_size is -2; write 0 for a model that does not batch, or how many requests "
         "share a batch"],
    ),
    "no data type": (
        ONNX + 'input [ { name: "a" dims: 1 },\n { name: "b" data_type: TYPE_INVALID dims: 1 } ]',
        ["2:9: error: input 'a' has no data type; write `data_type: TYPE_INT64`, or another but TYPE_INVALID",
         "3:14: error: input 'b' has no data type; write `data_type: TYPE_INT64`, or another but "
         "TYPE_INVALID"],
    ),
    "dimensions that no tensor has": (
        ONNX + 'output { name: "y" data_type: TYPE_FP32 dims: [ -1, 0, -2 ] }',
        ["2:41: error: output 'y' has a dimension 0; write a size above 0, or -1 for any size",
         "2:41: error: output 'y' has a dimension -2; write a size above 0, or -1 for any size"],
    ),
    "no dims": (
        ONNX + 'output { name: "y" data_type: TYPE_FP32 }',
        ["2:1: error: output 'y' has no dims; write `dims: [ -1 ]` for any length"],
    ),
    "a tensor without a name": (
        ONNX + "input { data_type: TYPE_FP32 dims: 1 }",
        ['2:1: error: an input has no name; add `name: "..."`'],
    ),
    "a tensor twice": (
        ONNX + 2 * 'input { name: "a" data_type: TYPE_FP32 dims: 1 }\n',
        ["3:9: error: there is more than one input 'a'; give each its own name"],
    ),
    "a parameter that is no number": (
        ONNX + 'parameters { key: "max_sequence_length" value { string_value: "4k" } }',
        ["2:1: error: parameter 'max_sequence_length' is '4k'; write a whole number above 0"],
    ),
    "no threads": (
        ONNX + 'parameters [\n  { key: "intra_op_thread_count" value: { string_value: "0" } }\n]',
        ["3:3: error: parameter 'intra_op_thread_count' is '0'; write a whole number above 0"],
    ),
    "a misspelt parameter": (
        ONNX + 'parameters { key: "intra_op_thread_count" value { string_value: "1" } }\n'
        'parameters { key: "max_seq_length" value { string_value: "9" } }',
        ["3:1: warning: parameter 'max_seq_length' is not known, and has no effect; did you mean "
         "max_sequence_length?"],
    ),
    "a parameter where none is read": (
        'backend: "python" parameters { key: "x" value { string_value: "9" } }',
        ["1:19: warning: parameter 'x' is not known, and has no effect; leave it out"],
    ),
    "sequences of another stage": (
        'backend: "python" sequence_batching { iterative_sequence: true }',
        ["1:19: warning: sequence_batching is not honoured here: sequences are those of the logits stage; "
         "leave it out"],
    ),
    "two numbers of slots": (
        ONNX + "max_batch_size: 8 sequence_batching { oldest { max_candidate_sequences: 4 } }",
        ["2:48: warning: max_candidate_sequences 4 is not honoured: max_batch_size is how many there are; "
         "write the same number in both"],
    ),
    "a model.py of another name": (
        'backend: "python" default_model_filename: "loop.py"',
        ["1:19: error: default_model_filename 'loop.py' is not honoured: model.py is read; name the file "
         "model.py, and leave the field out"],
    ),
    "a file of no stage": (
        'platform: "ensemble" ensemble_scheduling { step { model_name: "a" } } default_model_filename: "a"',
        ["1:71: error: default_model_filename 'a' is not honoured: nothing is read; leave it out"],
    ),
    "what is not of the schema": (
        "backend: \"python\"\ndynamic_batchin { }",
        ['2:1: error: Message type "inference.ModelConfig" has no field named "dynamic_batchin"; did you '
         "mean dynamic_batching?"],
    ),
    "several at once": (
        'name: "x" backend: "python"\nmax_batch_size: -1\ndynamic_batching { }',
        ["1:1: error: the model is named 'x' and its folder 'm'; give both the same name, or leave `name` "
         "out",
         "2:1: error: max_batch_size is -1; write 0 for a model that does not batch, or how many requests "
         "share a batch",
         "3:1: warning: dynamic_batching is not honoured: the logits stage batches by itself, at each step; "
         "leave it out"],
    ),
}


def faults_of(text: str, *, folder: Path) -> list[str]:
    """`line:column: severity: message; remedy` of each fault of a real file."""
    file = folder / "m" / "config.pbtxt"
    file.parent.mkdir()
    file.write_text(text)
    faults = inspect_model_config(file).faults
    assert all(fault.path == file for fault in faults)
    return [f"{f.line}:{f.column}: {f.severity.value}: {f.message}; {f.remedy}" for f in faults]


@pytest.mark.parametrize(("text", "golden"), CASES.values(), ids=CASES)
def test_a_broken_config_is_told_fault_by_fault(text: str, golden: list[str], tmp_path: Path) -> None:
    assert faults_of(text, folder=tmp_path) == golden


@pytest.mark.parametrize(
    "text",
    [
        'backend: "python"',
        'backend: "python" default_model_filename: "model.py"',
        'backend: "onnxruntime" platform: "onnxruntime_onnx" default_model_filename: "graph.onnx"',
        ONNX + "max_batch_size: 8 sequence_batching { oldest { max_candidate_sequences: 8 } }",
    ],
)
def test_a_good_config_has_no_faults(text: str, tmp_path: Path) -> None:
    assert faults_of(text, folder=tmp_path) == []
