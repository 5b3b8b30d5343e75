from __future__ import annotations

import logging
import threading

import numpy as np
import onnxruntime
import pytest
from google.protobuf import text_format
from onnx import TensorProto

from genserve.backends.backend import Placement
from genserve.backends.onnxruntime import OnnxRuntimeBackend
from genserve.batching.model_instance import ModelInstance
from genserve.batching.queue_scheduler import make_scheduler
from genserve.config.schema import new_model_config
from genserve.errors import InferenceError, RepositoryError
from genserve.inference_statistics import ModelStatistics
from genserve.tensor import DataType, Tensor
from tests.backends.inferences import (
    ON_CPU,
    answers,
    ask,
    assert_runs_concurrently,
    assert_share_a_network,
    config_of,
    started,
)
from tests.backends.networks import bloom_onnx, save_onnx, sentence_vectors_onnx

SENTENCES = """
platform: "onnxruntime_onnx"
max_batch_size: 32
input [
  { name: "input_ids" data_type: TYPE_INT64 dims: [-1] },
  { name: "attention_mask" data_type: TYPE_INT64 dims: [-1] },
  { name: "token_type_ids" data_type: TYPE_INT64 dims: [-1] }
]
output [ { name: "vector" data_type: TYPE_FP32 dims: [768] } ]
dynamic_batching { }
optimization { execution_accelerators { gpu_execution_accelerator : [ { name : "tensorrt" } ] } }
"""

F, I64, S = TensorProto.FLOAT, TensorProto.INT64, TensorProto.STRING


def sentences(num_rows, length, *, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "input_ids": rng.integers(0, 1000, (num_rows, length)),
        "attention_mask": np.ones((num_rows, length), dtype=np.int64),
        "token_type_ids": rng.integers(0, 2, (num_rows, length)),
    }


def address(array):
    return array.__array_interface__["data"][0]


def one_node(path, operator="Identity", *, element=F, shape=("batch", None), out_shape=None, **attributes):
    return save_onnx(
        path / "1" / "model.onnx",
        [(operator, ["x"], ["y"], attributes)],
        inputs={"x": (element, shape)},
        outputs={"y": (element, out_shape or shape)},
    )


def plain(element="TYPE_FP32", *, batch=4, dims="-1", out_dims=None, more=""):
    return config_of(
        f"""max_batch_size: {batch}
        input {{ name: "x" data_type: {element} dims: [ {dims} ] }}
        output {{ name: "y" data_type: {element} dims: [ {out_dims or dims} ] }}
        {more}"""
    )


def test_a_batch_is_answered_as_onnx_runtime_answers_each_request_alone(tmp_path):
    file = sentence_vectors_onnx(tmp_path / "1" / "model.onnx")
    backend = started(OnnxRuntimeBackend, config_of(SENTENCES), tmp_path)
    asked = [ask(sentences(rows, 7, seed=rows), batch_size=rows) for rows in (1, 3, 2)]

    session = onnxruntime.InferenceSession(file)
    for rows, answer in zip((1, 3, 2), answers(backend, *asked), strict=True):
        [expected] = session.run(["vector"], sentences(rows, 7, seed=rows))
        assert answer["vector"].shape == (rows, 768)
        np.testing.assert_allclose(answer["vector"], expected, rtol=1e-5)


def test_a_missing_accelerator_is_named(tmp_path, caplog):
    sentence_vectors_onnx(tmp_path / "1" / "model.onnx")
    started(OnnxRuntimeBackend, config_of(SENTENCES), tmp_path)
    assert "the accelerator tensorrt needs a GPU, but m_0 runs on the CPU" in caplog.text


def test_an_instance_without_gpu_providers_runs_on_the_cpu_with_a_warning(tmp_path, caplog):
    sentence_vectors_onnx(tmp_path / "1" / "model.onnx")
    on_gpu = Placement(name="m_0_gpu1", kind="GPU", device_id=1)
    backend = started(OnnxRuntimeBackend, config_of(SENTENCES), tmp_path, placement=on_gpu)
    assert "m_0_gpu1 runs without TensorrtExecutionProvider" in caplog.text
    assert "m_0_gpu1 runs without CUDAExecutionProvider" in caplog.text
    assert answers(backend, ask(sentences(1, 2)))[0]["vector"].shape == (1, 768)


def test_a_logits_model_without_a_batch_dimension_gets_complete_shapes(tmp_path):
    file = bloom_onnx(tmp_path / "1" / "model.onnx", vocab_size=300)
    backend = started(
        OnnxRuntimeBackend,
        config_of(
            """platform: "onnxruntime_onnx" max_batch_size : 0
            input [ { name: "input_ids" data_type: TYPE_INT64 dims: [ -1, -1 ] },
                    { name: "attention_mask" data_type: TYPE_INT64 dims: [ -1, -1 ] } ]
            output [ { name: "logits" data_type: TYPE_FP32 dims: [ -1, -1, 300] } ]
            instance_group [ { count: 1 kind: KIND_CPU } ]"""
        ),
        tmp_path,
    )
    inputs = {"input_ids": np.array([[3, 4, 5]]), "attention_mask": np.array([[1, 1, 1]])}
    [expected] = onnxruntime.InferenceSession(file).run(None, inputs)
    [answer] = answers(backend, ask(inputs))
    np.testing.assert_array_equal(answer["logits"], expected)


def test_inputs_and_outputs_are_not_copied(tmp_path):
    one_node(tmp_path, "Relu")
    backend = started(OnnxRuntimeBackend, plain(), tmp_path)
    fed, made = [], []
    run = backend.network._session.run

    class Spy:
        def run(self, names, feed, options):
            fed.append(feed["x"])
            made.extend(run(names, feed, options))
            return made

    backend.network._session = Spy()
    x = np.ones((1, 5), dtype=np.float32)
    [answer] = answers(backend, ask({"x": x}))
    assert address(fed[0]) == address(x)
    assert address(answer["y"]) == address(made[0])


def test_the_responses_of_a_batch_are_views_of_one_output(tmp_path):
    one_node(tmp_path, "Relu")
    backend = started(OnnxRuntimeBackend, plain(), tmp_path)
    x = np.ones((1, 5), dtype=np.float32)
    first, second = answers(backend, ask({"x": x}), ask({"x": x}))
    assert address(second["y"]) == address(first["y"]) + 5 * 4


def test_a_request_at_an_unaligned_address_is_answered(tmp_path):
    one_node(tmp_path, "Relu")
    backend = started(OnnxRuntimeBackend, plain(), tmp_path)
    body = b"?" + np.arange(-2, 3, dtype=np.float32).tobytes()
    x = np.frombuffer(memoryview(body)[1:], dtype=np.float32).reshape(1, 5)
    [answer] = answers(backend, ask({"x": x}))
    np.testing.assert_array_equal(answer["y"], [[0, 0, 0, 1, 2]])


@pytest.mark.parametrize("data_type", [kind for kind in DataType if kind.name not in {"BYTES", "BF16"}])
def test_each_type_of_elements_passes_through(tmp_path, data_type):
    element = TensorProto.DataType.Value(
        {"FP16": "FLOAT16", "FP32": "FLOAT", "FP64": "DOUBLE"}.get(data_type.name, data_type.name)
    )
    one_node(tmp_path, element=element)
    backend = started(OnnxRuntimeBackend, plain(data_type.config_name), tmp_path)
    x = np.array([[0, 1, 1]]).astype(data_type.numpy)
    [answer] = answers(backend, ask({"x": x}))
    assert answer["y"].dtype == data_type.numpy
    np.testing.assert_array_equal(answer["y"], x)


def test_bfloat16_passes_through_as_its_bits(tmp_path):
    one_node(tmp_path, element=TensorProto.BFLOAT16)
    backend = started(OnnxRuntimeBackend, plain("TYPE_BF16"), tmp_path)
    bits = np.array([[0x3F80, 0x4000]], dtype=np.uint16)
    asked = ask({"x": bits}, types={"x": DataType.BF16})
    backend.execute([asked.inference])
    [output] = asked.responses[0].outputs
    assert output.data_type is DataType.BF16
    np.testing.assert_array_equal(output.array, bits)


def test_strings_pass_through_as_bytes(tmp_path):
    one_node(tmp_path, element=S)
    backend = started(OnnxRuntimeBackend, plain("TYPE_STRING"), tmp_path)
    x = np.array([["grün".encode(), b""]], dtype=object)
    [answer] = answers(backend, ask({"x": x}))
    assert answer["y"].tolist() == x.tolist()


def test_a_string_that_is_not_utf_8_is_rejected(tmp_path):
    one_node(tmp_path, element=S)
    backend = started(OnnxRuntimeBackend, plain("TYPE_STRING"), tmp_path)
    asked = ask({"x": np.array([[b"\xff"]], dtype=object)})
    with pytest.raises(InferenceError, match="input 'x' has an element that is not UTF-8"):
        backend.execute([asked.inference])
    assert not asked.responses


def test_a_scalar_of_the_graph_has_one_element_in_the_config(tmp_path):
    one_node(tmp_path, "Neg", shape=(), out_shape=())
    backend = started(OnnxRuntimeBackend, plain(batch=0, dims="1"), tmp_path)
    [answer] = answers(backend, ask({"x": np.array([3], dtype=np.float32)}))
    assert answer["y"].tolist() == [-3]


def test_an_error_of_the_run_fails_with_the_text_of_tritons_backend(tmp_path):
    one_node(tmp_path)
    backend = started(OnnxRuntimeBackend, plain(), tmp_path)
    asked = ask({"x": np.zeros((1, 2, 3), dtype=np.float32)})
    with pytest.raises(InferenceError, match=r"onnx runtime error 2: .*Invalid rank for input: x") as raised:
        backend.execute([asked.inference])
    assert raised.value.status == "INVALID_ARG"
    assert raised.value.remedy.endswith("it got x FP32 [1, 2, 3]")


def test_what_does_not_fit_the_graph_is_named_and_fails_alone(tmp_path):
    save_onnx(
        tmp_path / "1" / "model.onnx",
        [("Gather", ["words", "ids"], ["word"], {}), ("Mul", ["word", "x"], ["y"], {})],
        inputs={"ids": (TensorProto.INT64, ["batch", 1]), "x": (TensorProto.FLOAT, ["batch", "size"])},
        outputs={"y": (TensorProto.FLOAT, None)},
        weights={"words": np.array([2, 3, 5], np.float32)},
    )
    config = config_of(
        """max_batch_size: 8
        input [ { name: "ids" data_type: TYPE_INT64 dims: [ 1 ] } ]
        input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } ]
        output [ { name: "y" data_type: TYPE_FP32 dims: [ -1 ] } ]"""
    )
    backend = started(OnnxRuntimeBackend, config, tmp_path)
    ones = np.ones((1, 2), np.float32)
    asked = [ask({"ids": np.array([[index]]), "x": ones}) for index in (1, 7, -1, -4)]
    backend.execute([one.inference for one in asked])
    assert [one.outputs()["y"].tolist() for one in (asked[0], asked[2])] == [[[3, 3]], [[5, 5]]]
    for one, index in ((asked[1], 7), (asked[3], -4)):
        [response] = one.responses
        assert response.error.status == "INVALID_ARG"
        assert response.error.message.startswith("input 'ids': onnx runtime error 2: ")
        assert f"idx={index} must be within" in response.error.message
    rows = ask({"ids": np.array([[1], [1]]), "x": np.ones((3, 2), np.float32)})
    with pytest.raises(InferenceError, match="onnx runtime error 1: ") as raised:
        backend.execute([rows.inference])
    assert raised.value.status == "INVALID_ARG"


def test_each_request_gets_its_requested_outputs(tmp_path):
    kind = (F, ["batch", None])
    save_onnx(
        tmp_path / "1" / "model.onnx",
        [("Neg", ["x"], ["n"], {}), ("Abs", ["x"], ["a"], {}), ("Exp", ["x"], ["e"], {})],
        inputs={"x": kind},
        outputs={"n": kind, "e": kind, "a": kind},
    )
    outputs = "\n".join(f'output {{ name: "{name}" data_type: TYPE_FP32 dims: [ -1 ] }}' for name in "nea")
    backend = started(
        OnnxRuntimeBackend,
        config_of(f'max_batch_size: 4 input {{ name: "x" data_type: TYPE_FP32 dims: [ -1 ] }} {outputs}'),
        tmp_path,
    )
    x = {"x": np.ones((1, 2), dtype=np.float32)}
    one, two, all_of_them = answers(backend, ask(x, outputs=["n"]), ask(x, outputs=["n", "a"]), ask(x))
    assert (list(one), list(two), list(all_of_them)) == (["n"], ["a", "n"], ["a", "e", "n"])
    assert (two["a"].tolist(), two["n"].tolist()) == ([[1, 1]], [[-1, -1]])


def test_instances_share_one_session(tmp_path):
    one_node(tmp_path)
    assert_share_a_network(OnnxRuntimeBackend, plain(), tmp_path)


def test_instances_run_at_the_same_time(tmp_path):
    sentence_vectors_onnx(tmp_path / "1" / "model.onnx")
    requests = [sentences(1, 9, seed=seed) for seed in range(8)]
    assert_runs_concurrently(OnnxRuntimeBackend, config_of(SENTENCES), tmp_path, requests=requests)


def test_the_model_file_may_have_another_name_or_be_a_folder(tmp_path):
    file = one_node(tmp_path)
    file.rename(tmp_path / "1" / "other.onnx")
    started(OnnxRuntimeBackend, plain(more='default_model_filename: "other.onnx"'), tmp_path)
    (tmp_path / "1" / "model.onnx").mkdir()
    (tmp_path / "1" / "other.onnx").rename(tmp_path / "1" / "model.onnx" / "model.onnx")
    started(OnnxRuntimeBackend, plain(), tmp_path)


def test_a_missing_file_is_an_error_in_tritons_words(tmp_path):
    with pytest.raises(RepositoryError, match=r"unable to find '.*1/model.onnx' for model instance 'm'"):
        started(OnnxRuntimeBackend, plain(), tmp_path)


def test_a_file_that_is_not_a_graph_is_rejected(tmp_path):
    one_node(tmp_path).write_bytes(b"junk")
    with pytest.raises(RepositoryError, match=r"onnx runtime error 7: .*rotobuf parsing failed"):
        started(OnnxRuntimeBackend, plain(), tmp_path)


def test_parameters_become_session_options(tmp_path):
    one_node(tmp_path)
    more = "\n".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
        for key, value in {
            "intra_op_thread_count": 3,
            "inter_op_thread_count": 2,
            "execution_mode": 1,
            "enable_mem_arena": "off",
            "enable_mem_pattern": "0",
            "memory.enable_memory_arena_shrinkage": "cpu:0",
            "session.use_device_allocator_for_initializers": "1",
        }.items()
    )
    config = plain(more=more + "optimization { graph { level: -1 } }")
    backend = started(OnnxRuntimeBackend, config, tmp_path)
    options = backend.network._session.get_session_options()
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (3, 2)
    assert options.execution_mode == onnxruntime.ExecutionMode.ORT_PARALLEL
    assert options.graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    assert (options.enable_cpu_mem_arena, options.enable_mem_pattern) == (False, False)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("execution_mode", "2", "Expected values for  execution_mode are 0 or 1 but got 2 ."),
        ("enable_mem_arena", "maybe", "failed to convert 'maybe' to boolean"),
        ("intra_op_thread_count", "two", "failed to convert 'two' to integral number"),
    ],
)
def test_an_invalid_parameter_is_rejected(tmp_path, key, value, message):
    one_node(tmp_path)
    config = plain(more=f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}')
    with pytest.raises(RepositoryError) as raised:
        started(OnnxRuntimeBackend, config, tmp_path)
    assert raised.value.message.endswith(message)


def test_an_unknown_accelerator_is_rejected(tmp_path):
    one_node(tmp_path)
    accelerators = 'execution_accelerators { cpu_execution_accelerator { name: "magic" } }'
    with pytest.raises(RepositoryError, match="unknown Execution Accelerator 'magic' is requested"):
        started(OnnxRuntimeBackend, plain(more=f"optimization {{ {accelerators} }}"), tmp_path)


def test_an_output_of_another_shape_than_its_dims_is_warned_about_once(tmp_path, caplog):
    one_node(tmp_path)
    backend = started(OnnxRuntimeBackend, plain(out_dims="-1, 4"), tmp_path)
    caplog.set_level(logging.WARNING)
    for _ in range(3):
        [answer] = answers(backend, ask({"x": np.ones((1, 5), dtype=np.float32)}))
        assert answer["y"].shape == (1, 5)
    [record] = caplog.records
    assert (
        "shape [1, 5] for output y, but config.pbtxt says [-1, -1, 4] (including the batch dimension)"
        in record.message
    )


MISFITS = [
    (
        'max_batch_size: 4 input { name: "x" data_type: TYPE_INT32 dims: [ 3 ] }',
        "unable to load model 'm', configuration expects datatype TYPE_INT32 for input 'x', "
        "model provides TYPE_FP32",
    ),
    (
        'max_batch_size: 4 input { name: "z" data_type: TYPE_FP32 dims: [ 3 ] }',
        "unexpected inference input 'z', allowed inputs are: x",
    ),
    (
        """max_batch_size: 4 input [ { name: "x" data_type: TYPE_FP32 dims: [ 3 ] },
                                     { name: "z" data_type: TYPE_FP32 dims: [ 3 ] } ]""",
        "unable to load model 'm', configuration expects 2 inputs, model provides 1",
    ),
    (
        'max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] }',
        "model 'm', tensor 'x': the model expects 2 dimensions (shape [-1,3]) but the model configuration "
        "specifies 2 dimensions (an initial batch dimension because max_batch_size > 0 followed by the "
        "explicit tensor shape, making complete shape [-1,-1])",
    ),
    (
        'input { name: "x" data_type: TYPE_FP32 dims: [ 3 ] }',
        "model 'm', tensor 'x': the model expects 2 dimensions (shape [-1,3]) but the model configuration "
        "specifies 1 dimensions (shape [3])",
    ),
    (
        'max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: [ 3 ] allow_ragged_batch: true }',
        "unable to load model 'm', configuration expects model provides input with shape [-1]  for ragged "
        "input 'x', model provides [-1,3]",
    ),
    (
        'max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: [ 3 ] }'
        'output { name: "o" data_type: TYPE_FP32 dims: [ 3 ] }',
        "unexpected inference output 'o', allowed outputs are: y",
    ),
    (
        'max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: [ 3 ] }'
        'output { name: "y" data_type: TYPE_FP16 dims: [ 3 ] }',
        "unable to load model 'm', configuration expects datatype TYPE_FP16 for output 'y', "
        "model provides TYPE_FP32",
    ),
]


@pytest.mark.parametrize(("text", "message"), MISFITS)
def test_a_config_that_does_not_match_the_graph_is_rejected_in_tritons_words(tmp_path, text, message):
    one_node(tmp_path, shape=("batch", 3))
    with pytest.raises(RepositoryError) as raised:
        started(OnnxRuntimeBackend, config_of(text), tmp_path)
    assert raised.value.message == message


def test_a_graph_of_a_fixed_batch_is_not_batched(tmp_path):
    one_node(tmp_path, shape=(2, 3))
    with pytest.raises(RepositoryError, match=r"the first dimension must be -1; but shape .* is \[2,3\]"):
        started(OnnxRuntimeBackend, plain(dims="3"), tmp_path)


CONTROLLED = """max_batch_size: 4
input { name: "x" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "y" data_type: TYPE_INT32 dims: [ 1 ] }
sequence_batching { control_input { name: "START"
  control { kind: CONTROL_SEQUENCE_START %s } } }"""


@pytest.mark.parametrize(
    ("shape", "values", "message"),
    [
        (
            ["batch", 2],
            "int32_false_true: [0, 1]",
            "unable to load model 'm', sequence control 'START' in model has dims [2] "
            "but dims [1] is expected",
        ),
        (
            ["batch", 1],
            "fp32_false_true: [0, 1]",
            "unable to load model 'm', sequence control 'START', the model expects data-type INT32 but the "
            "model configuration specifies data-type TYPE_FP32",
        ),
    ],
)
def test_controls_are_checked_against_the_graph(tmp_path, shape, values, message):
    kind = (TensorProto.INT32, ["batch", 1])
    save_onnx(
        tmp_path / "1" / "model.onnx",
        [("Add", ["x", "START"], ["y"], {})],
        inputs={"x": kind, "START": (TensorProto.INT32, shape)},
        outputs={"y": (TensorProto.INT32, None)},
    )
    with pytest.raises(RepositoryError) as raised:
        started(OnnxRuntimeBackend, config_of(CONTROLLED % values), tmp_path)
    assert raised.value.message == message


def completed(path, text=""):
    message = text_format.Parse(text, new_model_config())
    message.name = "m"
    OnnxRuntimeBackend.auto_complete(message, path=path, version=1, default_max_batch_size=4)
    return message


def test_a_graph_that_can_batch_completes_an_empty_config(tmp_path):
    one_node(tmp_path, element=I64, shape=("batch", "length", 3))
    assert completed(tmp_path) == text_format.Parse(
        """name: "m" max_batch_size: 4 dynamic_batching { }
        input { name: "x" data_type: TYPE_INT64 dims: [ -1, 3 ] }
        output { name: "y" data_type: TYPE_INT64 dims: [ -1, 3 ] }""",
        new_model_config(),
    )


def test_one_number_per_row_is_completed_with_a_reshape(tmp_path):
    one_node(tmp_path, shape=("batch",))
    message = completed(tmp_path, "max_batch_size: 1")
    assert list(message.input[0].dims) == [1]
    assert message.input[0].HasField("reshape")
    assert not message.HasField("dynamic_batching")


def test_a_graph_of_fixed_shape_is_completed_without_batching(tmp_path):
    one_node(tmp_path, shape=(2, 3))
    message = completed(tmp_path)
    assert (message.max_batch_size, list(message.input[0].dims)) == (0, [2, 3])
    with pytest.raises(RepositoryError) as raised:
        completed(tmp_path, "max_batch_size: 2")
    assert raised.value.message == (
        "autofill failed for model 'm': model does not support batching while non-zero max_batch_size is "
        "specified"
    )


def test_a_configured_scheduler_is_kept(tmp_path):
    one_node(tmp_path)
    assert not completed(tmp_path, "sequence_batching { }").HasField("dynamic_batching")


def test_a_config_with_inputs_and_outputs_is_not_changed(tmp_path):
    text = 'input { name: "x" } output { name: "y" }'
    assert completed(tmp_path, text).max_batch_size == 0      # and the file, which is not there, is not read


def test_a_tensor_of_another_runtime_is_accepted(tmp_path):
    import torch

    one_node(tmp_path)
    backend = started(OnnxRuntimeBackend, plain(), tmp_path)
    asked = ask({})
    asked.inference.inputs["x"] = Tensor("x", torch.ones(1, 3), data_type=DataType.FP32)
    assert answers(backend, asked)[0]["y"].tolist() == [[1, 1, 1]]


RUNNING_SUM = """max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "sum" data_type: TYPE_FP32 dims: [ 1 ] }
sequence_batching {
  direct { }
  control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY fp32_false_true: [ 0, 1 ] } }
  state { input_name: "before" output_name: "after" data_type: TYPE_FP32 dims: [ 1 ]
          initial_state { name: "zero" data_type: TYPE_FP32 dims: [ 1 ] zero_data: true } }
}"""


def test_sequences_have_separate_states(tmp_path):
    kind = (F, ["batch", 1])
    save_onnx(
        tmp_path / "1" / "model.onnx",
        [
            ("Mul", ["x", "READY"], ["given"], {}),
            ("Add", ["before", "given"], ["after"], {}),
            ("Identity", ["after"], ["sum"], {}),
        ],
        inputs={"x": kind, "before": kind, "READY": kind},
        outputs={"sum": kind, "after": kind},
    )
    config = config_of(RUNNING_SUM)
    scheduler = make_scheduler(config, num_instances=1, path=tmp_path)
    instance = ModelInstance(
        lambda: started(OnnxRuntimeBackend, config, tmp_path),
        number=0,
        placement=ON_CPU,
        scheduler=scheduler,
        statistics=ModelStatistics(),
    )
    instance.started.result()
    sums = []
    for step, (sequence, value) in enumerate([(1, 1), (2, 10), (1, 2), (2, 20), (2, 30)]):
        asked = ask({"x": np.full((1, 1), value, np.float32)}, sequence=sequence, start=step < 2)
        ended = threading.Event()
        asked.inference.when_ended(lambda _, ended=ended: ended.set())
        scheduler.submit(asked.inference)
        assert ended.wait(10)
        sums.append((sequence, asked.outputs()["sum"].item()))
    scheduler.close()
    instance.join()
    assert sums == [(1, 1), (2, 10), (1, 3), (2, 30), (2, 60)]


@pytest.mark.parametrize(("size", "expected"), [(8, (8, True)), (1, (1, False)), (0, (0, False))])
def test_the_default_max_batch_size_is_configurable(tmp_path, size, expected):
    one_node(tmp_path, element=I64, shape=("batch", 3))
    message = text_format.Parse('name: "m"', new_model_config())
    OnnxRuntimeBackend.auto_complete(message, path=tmp_path, version=1, default_max_batch_size=size)
    assert (message.max_batch_size, message.HasField("dynamic_batching")) == expected
    assert list(message.input[0].dims) == ([3] if size else [-1, 3])
