"""The layout of a model: the shipped files equal those of an export, and match Triton's schema."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from genserve.config.parse import parse_model_config
from genserve.export.decoder import Dimensions
from genserve.export.layout import stage_files
from genserve.export.model_folders import ModelFolders

SHIPPED = Path(__file__).parents[2] / "model_repository"
SMOLLM2 = Dimensions(num_layers=30, num_kv_heads=3, head_dim=64, vocab_size=49152, context_length=8192)
FILES = stage_files(ModelFolders("smollm2"), dimensions=SMOLLM2, cache=np.float16)
CONFIGS = [path for path in FILES if path.endswith("config.pbtxt")]


@pytest.mark.parametrize("path", FILES)
def test_the_shipped_files_of_the_default_model_are_the_generated_ones(path: str) -> None:
    assert (SHIPPED / path).read_text(encoding="utf-8") == FILES[path]


@pytest.mark.parametrize("path", CONFIGS)
def test_a_config_holds_to_the_official_schema_and_names_its_folder(path: str) -> None:
    config = text_format.Parse(FILES[path], model_config_pb2.ModelConfig())
    assert config.name == Path(path).parent.name


def test_the_ensemble_connects_tensors_of_one_type_and_shape() -> None:
    configs = {Path(path).parent.name: parse_model_config(FILES[path], source=Path(path)) for path in CONFIGS}
    ensemble = configs["smollm2"]
    tensors = {spec.name: (spec.data_type, spec.dims) for spec in ensemble.inputs}
    for step in ensemble.ensemble_steps:
        inputs = {spec.name: spec for spec in configs[step.model_name].inputs}
        for inner, outer in step.input_map.items():
            data_type, dims = tensors[outer]
            assert inputs[inner].data_type == data_type
            assert len(dims) == len(inputs[inner].dims)
        assert {spec.name for spec in inputs.values() if not spec.optional} <= step.input_map.keys()
        outputs = {spec.name: (spec.data_type, spec.dims) for spec in configs[step.model_name].outputs}
        tensors |= {outer: outputs[inner] for inner, outer in step.output_map.items()}
    assert all(tensors[spec.name] == (spec.data_type, spec.dims) for spec in ensemble.outputs)
    assert {config.max_batch_size for config in configs.values()} == {32}


def test_the_kv_cache_is_implicit_state_that_is_written_in_place() -> None:
    path = "smollm2_logits/config.pbtxt"
    config = parse_model_config(FILES[path], source=Path(path))
    batching = config.sequence_batching
    assert batching is not None
    assert batching.iterative
    assert len(batching.states) == 60
    assert all(state.same_buffer and state.dims == (-1, 3, 64) for state in batching.states)
    assert {state.data_type for state in batching.states} == {"TYPE_FP16"}
    assert "The KV cache takes 22.5 KiB per token, 90 MiB for" in FILES[path]


def test_an_int8_cache_also_has_a_scale_for_each_token_and_head() -> None:
    text = stage_files(ModelFolders("m"), dimensions=SMOLLM2, cache=np.int8)["m_logits/config.pbtxt"]
    assert "The KV cache takes 11.95 KiB per token" in text
    assert 'output_name: "present.29.value" data_type: TYPE_INT8 dims: [ -1, 3, 64 ]' in text


@pytest.mark.parametrize(("context", "expected"), [(8192, "4096"), (2048, "2048")])
def test_the_sequence_length_is_the_context_length_up_to_a_limit(context: int, expected: str) -> None:
    dimensions = Dimensions(num_layers=1, num_kv_heads=1, head_dim=8, vocab_size=10, context_length=context)
    text = stage_files(ModelFolders("m"), dimensions=dimensions, cache=np.float32)["m_logits/config.pbtxt"]
    assert parse_model_config(text, source=Path("m_logits/config.pbtxt")).parameters == {
        "max_sequence_length": expected
    }


class Countdown:
    """A token sequence with the tokens of a model with three logits."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []

    @property
    def finished(self) -> bool:
        return len(self.token_ids) == 3

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)

    async def sample(self) -> int:
        return int(np.argmax([0.1, 0.7, 0.2]))


async def test_the_decoding_loop_appends_samples_until_the_sequence_is_finished() -> None:
    spec = importlib.util.spec_from_file_location("decoder", SHIPPED / "smollm2_decoder" / "1" / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sequence = Countdown()
    await module.TritonPythonModel().decode(sequence)
    assert sequence.token_ids == [1, 1, 1]
