"""The layout of a model: the shipped files equal those of an export, and match Triton's schema."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from genserve.config.parse import parse_config
from genserve.errors import ExportError
from genserve.export.checkpoints.checkpoint import Checkpoint
from genserve.export.decoder import Cache, Dimensions
from genserve.export.export_options import ExportFormat
from genserve.export.layout import ModelLayout, stage_files
from genserve.export.model_folders import ModelFolders
from genserve.repository.model_validation import valid_config
from genserve.textmodel.decoder_stage import load_decoding

SHIPPED = Path(__file__).parents[2] / "model_repository"
SMOLLM2 = Dimensions(
    num_layers=30,
    caches=tuple(Cache(layer=layer, num_kv_heads=3, head_dim=64) for layer in range(30)),
    vocab_size=49152,
    context_length=8192,
)
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
    paths = [Path(path) for path in CONFIGS]
    configs = {path.parent.name: valid_config(parse_config(FILES[str(path)], path=path)) for path in paths}
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
    config = valid_config(parse_config(FILES[path], path=Path(path)))
    batching = config.sequence_batching
    assert batching is not None
    assert batching.iterative
    assert len(batching.states) == 60
    assert all(state.same_buffer and state.dims == (-1, 3, 64) for state in batching.states)
    assert {state.data_type for state in batching.states} == {"TYPE_FP16"}
    assert "The KV cache takes 22.5 KiB per token, 180 MiB for" in FILES[path]


def test_an_int8_cache_also_has_a_scale_for_each_token_and_head() -> None:
    text = stage_files(ModelFolders("m"), dimensions=SMOLLM2, cache=np.int8)["m_logits/config.pbtxt"]
    assert "The KV cache takes 11.95 KiB per token" in text
    assert 'output_name: "present.29.value" data_type: TYPE_INT8 dims: [ -1, 3, 64 ]' in text


@pytest.mark.parametrize(("limit", "expected"), [(None, "131072"), (2048, "2048")])
def test_the_sequence_length_is_the_models_own_or_the_limit(limit: int | None, expected: str) -> None:
    caches = (Cache(layer=0, num_kv_heads=1, head_dim=8),)
    dimensions = Dimensions(num_layers=1, caches=caches, vocab_size=10, context_length=131072)
    files = stage_files(
        ModelFolders("m"), dimensions=dimensions, cache=np.float32, max_sequence_length=limit
    )
    text = files["m_logits/config.pbtxt"]
    assert valid_config(parse_config(text, path=Path("m_logits/config.pbtxt"))).parameters == {
        "max_sequence_length": expected
    }


def test_a_limit_above_the_models_context_is_rejected() -> None:
    layout = ModelLayout(
        folders=ModelFolders("m"),
        export_format=ExportFormat.ONNX,
        precision="int8",
        checkpoint=Checkpoint(
            source="m",
            config={},
            tensor_names=frozenset(),
            load=lambda _, rows: np.zeros(1)[rows],
            shape=lambda _: (1,),
            tokenizer_files={},
        ),
        dimensions=SMOLLM2,
    )
    assert layout.limited(None).max_sequence_length is None
    assert layout.limited(8192).max_sequence_length == 8192
    with pytest.raises(ExportError, match=r"8193.* 8192"):
        layout.limited(8193)


def test_the_decoder_stage_has_the_default_loop() -> None:
    path = SHIPPED / "smollm2_decoder" / "1" / "model.py"
    assert load_decoding(path, name="decoder").is_default_loop
