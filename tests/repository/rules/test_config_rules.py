"""Rules of configs: the diagnostics of a single config, with position and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format

from genserve.config.backends import BUILT_IN
from genserve.config.diagnostics import Diagnostic
from genserve.config.parse import read_config
from genserve.config.schema import new_model_config
from genserve.repository.index import ModelEntry, scan
from genserve.repository.model_validation import Validator

KNOWN = ", ".join(BUILT_IN)
ONNX = 'backend: "onnxruntime"\n'
PYTHON = 'backend: "python"\n'

CASES: dict[str, tuple[str, list[str]]] = {
    "buckets that do not ascend": (
        PYTHON + 'model_metrics { metric_control {\n  metric_identifier '
        '{ family: "nv_inference_first_response_histogram_ms" }\n'
        "  histogram_options { buckets: [ 5, 5 ] } } }",
        ["4:23: error: the buckets of 'nv_inference_first_response_histogram_ms' are not ascending numbers "
         "of milliseconds; write for example `buckets: [ 100, 500, 2000 ]`"],
    ),
    "buckets of another metric": (
        PYTHON + 'model_metrics { metric_control { metric_identifier { family: "nv_other" } } }',
        ["2:54: warning: Metric family 'nv_other' in 'metric_identifier' is not a customizable metric; "
         "the customizable one: nv_inference_first_response_histogram_ms"],
    ),
    "another name": (
        PYTHON + 'name: "other"',
        ["2:1: error: unexpected directory name 'm' for model 'other', directory name must equal "
         "model name; give both the same name, or leave `name` out"],
    ),
    "no backend": (
        "max_batch_size: 1",
        ["1:1: error: Invalid model name: Could not determine backend for model 'm' with no backend in "
         "model configuration. Expected model name of the form 'model.<backend_name>'.; add `backend: "
         '"python"`, "onnxruntime", "pytorch", "tensorflow" or "tokenizer", or `platform: "ensemble"`; '
         "or name the file of the model 1/model.py or 1/model.onnx"],
    ),
    "a misspelt backend": (
        'backend: "onnx_runtime"',
        ["1:1: error: unable to find backend library for backend 'onnx_runtime', try specifying "
         "runtime on the model configuration.; did you mean onnxruntime?"],
    ),
    "an unknown backend": (
        '\n  backend: "dali"',
        ["2:3: error: unable to find backend library for backend 'dali', try specifying runtime "
         f"on the model configuration.; known there: {KNOWN}"],
    ),
    "a backend with an engine of its own": (
        '\n  backend: "tensorrt_llm"',
        ["2:3: error: unable to find backend library for backend 'tensorrt_llm', try specifying "
         "runtime on the model configuration.; genserve has its own engine: `genserve export "
         "CHECKPOINT` makes a model for it"],
    ),
    "a platform where a backend belongs": (
        'backend: "pytorch_libtorch"',
        ["1:1: error: unable to find backend library for backend 'pytorch_libtorch', try specifying "
         'runtime on the model configuration.; write `backend: "pytorch"`, or `platform: '
         '"pytorch_libtorch"`, instead'],
    ),
    "an ensemble where a backend belongs": (
        'backend: "ensemble"',
        ["1:1: error: unable to find backend library for backend 'ensemble', try specifying "
         "runtime on the model configuration.; leave `backend` out, and write `platform: "
         '"ensemble"`'],
    ),
    "a backend that only Triton has": (
        'platform: "tensorrt_plan"',
        ["1:1: error: unexpected platform type 'tensorrt_plan' for m; only Triton runs a TensorRT "
         "plan; export the model to ONNX for `onnxruntime`"],
    ),
    "a backend where a platform belongs": (
        'platform: "python"',
        ["1:1: error: unexpected platform type 'python' for m; write `backend: \"python\"` instead"],
    ),
    "a misspelt platform": (
        'platform: "ensamble"',
        ["1:1: error: unexpected platform type 'ensamble' for m; did you mean ensemble?; or write "
         f"`backend` instead: {KNOWN}"],
    ),
    "a platform of another backend": (
        'backend: "pytorch" platform: "onnxruntime_onnx"',
        ["1:20: error: unexpected 'platform' and 'backend' pair, got:onnxruntime_onnx, pytorch; "
         "leave `platform` out"],
    ),
    "an ensemble without steps": (
        'platform: "ensemble"',
        ["1:1: error: ensemble scheduling must be set for ensemble m whose platform is ensemble; "
         "add `ensemble_scheduling { step [ { model_name: ... } ] }`"],
    ),
    "steps without an ensemble": (
        PYTHON + "ensemble_scheduling { }",
        ["2:1: error: ensemble scheduling cannot be set for model 'm' whose platform is not "
         'ensemble; write `platform: "ensemble"`, and leave `backend` out'],
    ),
    "a negative batch": (
        ONNX + "max_batch_size: -2",
        ["2:1: error: 'max_batch_size' must be non-negative value for m; write 0 for a model that does "
         "not batch, or the largest batch size"],
    ),
    "no data type": (
        ONNX + 'input [ { name: "a" dims: 1 },\n { name: "b" data_type: TYPE_INVALID dims: 1 } ]',
        ["2:9: error: model input 'a' must specify 'data_type' for m; write `data_type: TYPE_INT64`, "
         "or another type",
         "3:14: error: model input 'b' must specify 'data_type' for m; write `data_type: TYPE_INT64`, "
         "or another type"],
    ),
    "invalid dimensions": (
        ONNX + 'output { name: "y" data_type: TYPE_FP32 dims: [ -1, 0, -2 ] }',
        ["2:41: error: model output 'y' dimension must be integer >= 1, or -1 to indicate a "
         "variable-size dimension for m; write a size above 0, or -1 for any size"],
    ),
    "no dims": (
        ONNX + 'output { name: "y" data_type: TYPE_FP32 }',
        ["2:1: error: model output 'y' must specify 'dims' for m; write `dims: [ -1 ]` for any "
         "length"],
    ),
    "a tensor without a name": (
        ONNX + "input { data_type: TYPE_FP32 dims: 1 }",
        ["2:1: error: model input must specify 'name' for m; add `name: \"...\"`"],
    ),
    "a tensor twice": (
        ONNX + 'input { name: "a" data_type: TYPE_FP32 dims: 1 }\ninput { name: "a" data_type: '
        "TYPE_FP32 dims: 1 }\n",
        ["3:9: warning: there is more than one input 'a'; give each its own name"],
    ),
    "a reshape to other elements": (
        ONNX + 'max_batch_size: 1 input { name: "a" data_type: TYPE_FP32 dims: [ 2, -1 ]\n  reshape { '
        "shape: [ -1, 2 ] } }",
        ["3:3: error: model input 'a' has different size for dims and reshape for m; give dims and "
         "reshape the same number of elements, and -1 in the same order"],
    ),
    "a parameter that is no number": (
        ONNX + 'parameters { key: "max_sequence_length" value { string_value: "4k" } }',
        ["2:1: error: failed to convert max_sequence_length '4k' to number above 0; write an integer, "
         "in quotes"],
    ),
    "a parameter that is no amount of memory": (
        ONNX + 'parameters { key: "kv_cache_bytes" value { string_value: "2 apples" } }',
        ["2:1: error: failed to convert kv_cache_bytes '2 apples' to number of bytes above 0; write an "
         'amount such as "2GiB"'],
    ),
    "a parameter that is neither true nor false": (
        'backend: "pytorch" parameters [\n  { key: "INFERENCE_MODE" value: { string_value: "on" '
        "} }\n]",
        ["2:3: error: failed to convert INFERENCE_MODE 'on' to boolean value; write \"true\" or "
         '"false"'],
    ),
    "an ignored parameter of Triton's PyTorch backend": (
        'backend: "pytorch" parameters { key: "ENABLE_NVFUSER" value { string_value: "true" } }\n'
        'parameters { key: "ENABLE_WEIGHT_SHARING" value { string_value: "true" } }',
        ["1:20: warning: parameter 'ENABLE_NVFUSER' is ignored: torch no longer has NVFuser; leave it "
         "out"],
    ),
    "a misspelt parameter": (
        ONNX + 'parameters { key: "intra_op_thread_count" value { string_value: "1" } }\nparameters { '
        'key: "max_seq_length" value { string_value: "9" } }',
        ["3:1: warning: parameter 'max_seq_length' is unknown, and has no effect; did you mean "
         "max_sequence_length?"],
    ),
    "an environment that is not unpacked": (
        PYTHON + 'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "a.tar.gz" } }',
        ["2:1: warning: parameter 'EXECUTION_ENV_PATH' is ignored: the model runs in genserve's "
         "environment; install its packages there, with pip"],
    ),
    "an unknown way to run": (
        PYTHON + 'parameters { key: "EXECUTION" value { string_value: "thread" } }',
        ["2:1: error: parameter 'EXECUTION' is 'thread'; write 'process', or leave it out"],
    ),
    "a library that batches": (
        'backend: "mine2.so" parameters { key: "TRITON_BATCH_STRATEGY_PATH" value { '
        'string_value: "a.so" } }',
        ["1:1: error: unable to find backend library for backend 'mine2.so', try specifying "
         f"runtime on the model configuration.; known there: {KNOWN}",
         "1:21: warning: parameter 'TRITON_BATCH_STRATEGY_PATH' is ignored: `dynamic_batching` decides "
         "how requests are batched; leave it out"],
    ),
    "priorities without a default": (
        PYTHON + "dynamic_batching {\n  priority_levels: 2\n  default_priority_level: 3\n  "
        "priority_queue_policy { key: 3 value { } } }",
        ["4:3: error: default priority level must be in range [1, 2] for m; write "
         "`default_priority_level: 2`, the lowest, for requests without a priority",
         "5:3: error: priority queue policy must have priority level in range [1, 2] for m; "
         "`priority_levels` is the number of levels; 1 is the highest"],
    ),
    "warmup that does not fit": (
        PYTHON + 'input { name: "a" data_type: TYPE_FP32 dims: 1 }\nmodel_warmup [ { name: "w" inputs {\n '
        ' key: "a" value { data_type: TYPE_INT8 dims: 2 zero_data: true } } } ]',
        ["3:16: warning: warmup sample 'w' has no batch_size, and is skipped; add `batch_size: 1`",
         "3:28: error: inference input 'a' data-type is 'INT8', but model 'm' expects 'FP32'; "
         "write `data_type: TYPE_FP32`",
         "3:28: error: unexpected shape for input 'a' for model 'm'. Expected [1], got [2].; "
         "write the dims of the input, without the batch dimension"],
    ),
    "accelerators that may be missing": (
        ONNX + "optimization { execution_accelerators {\n  gpu_execution_accelerator [ { name: "
        '"tensorrt" } ] } }',
        ["3:31: warning: execution accelerator 'tensorrt' is used only if it is installed; if it is "
         "missing, the load logs that and the model runs without it"],
    ),
    "a field that the schema lacks": (
        PYTHON + "dynamic_batchin { }",
        ['2:1: error: Message type "inference.ModelConfig" has no field named "dynamic_batchin"; '
         "did you mean dynamic_batching?"],
    ),
    "several errors": (
        'name: "x" backend: "python"\nmax_batch_size: -1\nruntime: "a"',
        ["1:1: error: unexpected directory name 'm' for model 'x', directory name must equal "
         "model name; give both the same name, or leave `name` out",
         "2:1: error: 'max_batch_size' must be non-negative value for m; write 0 for a model that does "
         "not batch, or the largest batch size",
         "3:1: warning: runtime is ignored: the backend's own runtime is used; leave it out"],
    ),
}


def diagnostics_of(folder: Path) -> tuple[Diagnostic, ...]:
    entry = ModelEntry(name="m", path=folder, parsed=read_config(folder))
    return Validator({"m": entry}).config_diagnostics(entry)


def faults_of(text: str, *, folder: Path) -> list[str]:
    """`line:column: severity: message; remedy` of each diagnostic of a real file."""
    file = folder / "m" / "config.pbtxt"
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    diagnostics = diagnostics_of(file.parent)
    assert all(diagnostic.path == file for diagnostic in diagnostics)
    return [f"{f.line}:{f.column}: {f.severity.value}: {f.message}; {f.remedy}" for f in diagnostics]


@pytest.mark.parametrize(("text", "golden"), CASES.values(), ids=CASES)
def test_a_broken_config_has_a_diagnostic_for_each_error(
    text: str, golden: list[str], tmp_path: Path
) -> None:
    assert faults_of(text, folder=tmp_path) == golden


@pytest.mark.parametrize(
    "text",
    [
        'backend: "python"',
        'backend: "python" default_model_filename: "loop.py"',
        'backend: "onnxruntime" platform: "onnxruntime_onnx" default_model_filename: "graph.onnx"',
        'platform: "pytorch_libtorch" parameters { key: "INFERENCE_MODE" value { string_value: "true" } }',
        'backend: "tensorflow" platform: "tensorflow_graphdef"',
        ONNX + 'parameters { key: "intra_op_thread_count" value { string_value: "0" } }',
        PYTHON + 'parameters { key: "of_my_own" value { string_value: "9" } }',
        PYTHON + 'parameters { key: "EXECUTION" value { string_value: "process" } }',
        PYTHON + "max_batch_size: 8 sequence_batching { oldest { max_candidate_sequences: 4 } }",
    ],
)
def test_a_valid_config_has_no_diagnostics(text: str, tmp_path: Path) -> None:
    assert faults_of(text, folder=tmp_path) == []


def test_a_python_model_may_complete_its_config(tmp_path: Path) -> None:
    text = PYTHON + 'input { name: "a" }'
    assert len(faults_of(text, folder=tmp_path)) == 2
    (tmp_path / "m" / "1").mkdir()
    (tmp_path / "m" / "1" / "model.py").write_text("def auto_complete_config(config): ...")
    assert faults_of(text, folder=tmp_path) == []


def test_the_config_of_an_ensemble_is_not_completed(tmp_path: Path) -> None:
    text = 'platform: "ensemble" ensemble_scheduling { step { } } input { name: "a" }'
    missing = [line for line in faults_of(text, folder=tmp_path) if "error: model input 'a'" in line]
    assert len(missing) == 2


def test_a_completed_config_must_have_every_field(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text("def auto_complete_config(config): ...")
    message = text_format.Parse(PYTHON + 'input { name: "a" dims: 1 }', new_model_config())
    entry = scan([tmp_path])["m"]
    found = Validator({"m": entry}).completed_diagnostics(entry, message)
    assert [diagnostic.message for diagnostic in found] == [
        "model input 'a' must specify 'data_type' for m"
    ]


def test_a_model_may_need_no_config(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.py").touch()
    parsed = read_config(tmp_path / "m")
    assert diagnostics_of(tmp_path / "m") == ()
    assert parsed.config is not None
    assert parsed.config.backend == "python"
    assert parsed.message == new_model_config()


def test_a_named_config_replaces_the_default_one_where_it_exists(tmp_path: Path) -> None:
    (tmp_path / "m" / "configs").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text(PYTHON + "max_batch_size: 1")
    (tmp_path / "m" / "configs" / "big.pbtxt").write_text(PYTHON + "max_batch_size: 64")
    for name, size in {"": 1, "big": 64, "other": 1}.items():
        config = read_config(tmp_path / "m", config_name=name).config
        assert config is not None
        assert (config.name, config.max_batch_size) == ("m", size)
