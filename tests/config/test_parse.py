"""Reading config.pbtxt: values, and messages that lead to the place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from genserve.config.model_config import (
    AllVersions,
    EnsembleStep,
    LatestVersions,
    SpecificVersions,
    StateSpec,
    TensorSpec,
)
from genserve.config.parse import parse_config, read_config_file
from genserve.errors import ConfigError
from genserve.repository.model_validation import valid_config

SOURCE = Path("models/m/config.pbtxt")

LOGITS = """
name: "m"
backend: "onnxruntime"
default_model_filename: "graph.onnx"
max_batch_size: 32
version_policy: { specific { versions: [ 1, 3 ] } }
input [
  { name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] },
  { name: "attention_mask" data_type: TYPE_INT64 dims: [ -1 ] optional: true }
]
output { name: "logits" data_type: TYPE_FP32 dims: [ -1, 49152 ] }
sequence_batching {
  iterative_sequence: true
  state {
    input_name: "past_key_values.0.key" output_name: "present.0.key"
    data_type: TYPE_FP32 dims: [ 3, -1, 64 ] use_same_buffer_for_input_output: true
  }
}
parameters { key: "max_sequence_length" value { string_value: "4096" } }
"""

ENSEMBLE = """
platform: "ensemble"
model_transaction_policy { decoupled: true }
ensemble_scheduling {
  step [
    {
      model_name: "m_tokenizer"
      model_version: -1
      input_map { key: "text_input" value: "prompt" }
      output_map { key: "input_ids" value: "ids" }
    }
  ]
}
"""


def test_every_value_of_a_logits_stage_is_read() -> None:
    config = valid_config(parse_config(LOGITS, path=SOURCE))
    assert (config.name, config.backend, config.platform) == ("m", "onnxruntime", "onnxruntime_onnx")
    assert (config.max_batch_size, config.default_model_filename) == (32, "graph.onnx")
    assert config.inputs == (
        TensorSpec(name="input_ids", data_type="TYPE_INT64", dims=(-1,)),
        TensorSpec(name="attention_mask", data_type="TYPE_INT64", dims=(-1,), optional=True),
    )
    assert config.outputs == (TensorSpec(name="logits", data_type="TYPE_FP32", dims=(-1, 49152)),)
    assert config.version_policy == SpecificVersions(versions=(1, 3))
    assert config.sequence_batching is not None
    assert config.sequence_batching.iterative
    assert not config.decoupled
    assert config.sequence_batching.states == (
        StateSpec(
            input_name="past_key_values.0.key",
            output_name="present.0.key",
            data_type="TYPE_FP32",
            dims=(3, -1, 64),
            same_buffer=True,
        ),
    )
    assert config.parameters == {"max_sequence_length": "4096"}


def test_every_value_of_an_ensemble_is_read_and_its_folder_names_it() -> None:
    config = parse_config(ENSEMBLE, path=SOURCE).config
    assert config is not None
    assert (config.name, config.platform, config.decoupled) == ("m", "ensemble", True)
    assert config.ensemble_steps == (
        EnsembleStep(
            model_name="m_tokenizer",
            model_version=-1,
            input_map={"text_input": "prompt"},
            output_map={"input_ids": "ids"},
        ),
    )


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("", LatestVersions(count=1)),
        ("version_policy { latest { num_versions: 2 } }", LatestVersions(count=2)),
        ("version_policy { latest { } }", LatestVersions(count=0)),
        ("version_policy { }", AllVersions()),
        ("version_policy { all { } }", AllVersions()),
        ("version_policy { specific { versions: 7 } }", SpecificVersions(versions=(7,))),
    ],
)
def test_a_version_policy_is_read_and_the_latest_version_is_the_default(text: str, policy: object) -> None:
    assert valid_config(parse_config(f'backend: "python" {text}', path=SOURCE)).version_policy == policy


@pytest.mark.parametrize(
    ("text", "message", "remedy"),
    [
        (
            'name: "m"\nbackend: "python"\n  max_batch_siz: 8\n',
            '3:3: Message type "inference.ModelConfig" has no field named "max_batch_siz"',
            "did you mean max_batch_size?",
        ),
        (
            'input [ { name: "x" data_type: TYPE_FLOAT32 } ]',
            '1:32: Enum type "inference.DataType" has no value named TYPE_FLOAT32',
            "did you mean TYPE_FP32?",
        ),
        (
            "ensemble_scheduling {\n  step { inputs { } }\n}",
            '2:10: Message type "inference.ModelEnsembling.Step" has no field named "inputs"',
            "did you mean input_map?",
        ),
        (
            "sequence_batching { zzz: 1 }",
            '1:21: Message type "inference.ModelSequenceBatching" has no field named "zzz"',
            "known there: direct, oldest, max_sequence_idle_microseconds, control_input, state, "
            "iterative_sequence",
        ),
        ('max_batch_size: "a"', '1:17: Couldn\'t parse integer: "a"', ""),
        (
            'name: "a" name: "b"',
            '1:17: Message type "inference.ModelConfig" should not have multiple "name" fields',
            "",
        ),
        ("input { dims: [ 1, 2 }", '1:22: Expected ","', "close the [ at 1:15"),
        ("input {", '1:7: Expected "}"', "close the { at 1:7"),
        (
            'input [ { name: "}" # ]\n  dims: 1 ]',
            "2:11: Expected identifier or number, got ]",
            "close the { at 1:9",
        ),
        (
            'input { name: "a" }\n}',
            "2:1: Expected identifier or number, got }",
            "remove the } at 2:1, which closes nothing",
        ),
        (
            'input [ { name: "x" data_type: "TYPE_FP32" } ]',
            '1:32: Enum type "inference.DataType" has no value named "TYPE_FP32"',
            "write TYPE_FP32 without quotes",
        ),
        ('name: "abc', "1:7: String missing ending quote: '\"abc'", ""),
        (
            '# a comment with a name: x\ninput { name: "m" data_type: TYPE_BOOL dims: 1 }\n'
            'backend: "python"\nname: "other"',
            "4:1: unexpected directory name 'm' for model 'other', directory name must equal model name",
            "give both the same name, or leave `name` out",
        ),
        (
            'name: "m"\nplatform: "ensemble"',
            "2:1: ensemble scheduling must be set for ensemble m whose platform is ensemble",
            "add `ensemble_scheduling { step [ { model_name: ... } ] }`",
        ),
    ],
)
def test_an_error_has_a_position_and_a_remedy(text: str, message: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as raised:
        valid_config(parse_config(text, path=SOURCE))
    assert raised.value.message == f"{SOURCE}:{message}"
    assert raised.value.remedy == remedy


def test_the_old_name_of_iterative_sequences_is_read_without_moving_positions() -> None:
    text = 'backend: "python" sequence_batching { generative_sequence: true } nope: 1'
    with pytest.raises(ConfigError) as raised:
        valid_config(parse_config(text, path=SOURCE))
    assert raised.value.message.startswith(f"{SOURCE}:1:{text.index('nope') + 1}: ")
    config = valid_config(parse_config(text.replace("nope: 1", ""), path=SOURCE))
    assert config.sequence_batching is not None
    assert config.sequence_batching.iterative


def test_a_config_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "m" / "config.pbtxt"
    file.parent.mkdir()
    file.write_text(LOGITS)
    assert valid_config(read_config_file(file)) == valid_config(parse_config(LOGITS, path=file))


@pytest.mark.parametrize("content", [None, b"name: \xff"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "config.pbtxt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        valid_config(read_config_file(file))
    assert raised.value.message.startswith(f"{file}:1:1: ")


def test_the_values_of_a_config_are_frozen() -> None:
    config = valid_config(parse_config(LOGITS, path=SOURCE))
    with pytest.raises(TypeError):
        config.parameters["max_sequence_length"] = "1"  # type: ignore[index]


def test_the_schema_loads_without_grpc_and_is_the_one_of_tritonclient() -> None:
    program = (
        "import sys\n"
        "from genserve.config.schema import new_model_config\n"
        "assert 'grpc' not in sys.modules\n"
        "from tritonclient.grpc import model_config_pb2\n"
        "assert type(new_model_config()) is model_config_pb2.ModelConfig\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
