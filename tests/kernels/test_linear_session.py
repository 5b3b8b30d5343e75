"""Linear in ONNX Runtime: equals the plain function on any threads, and refuses wrong graphs."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from genserve import kernels
from tests.kernels.linear_calls import FORMATS, INPUTS, Layer, compute, make_layer
from tests.support.representatives import with_extended

FLOAT = TensorProto.FLOAT


def model_of(layers: list[Layer], *, residual: bool = False, constant: bool = True, **changed: Any) -> bytes:
    """A graph of consecutive layers; `changed` are attributes of the first."""
    nodes, tensors, given = [], [], []
    for i, layer in enumerate(layers):
        named = [name if name in layer.inputs else "" for name in INPUTS]
        names = [f"{name}_{i}" if name else "" for name in named]
        names[0], names[6] = "x" if i == 0 else f"y_{i - 1}", "residual" if residual else ""
        attributes = layer.attributes() | (changed if i == 0 else {})
        attributes = {name: value for name, value in attributes.items() if value is not None}
        nodes.append(helper.make_node("Linear", names, [f"y_{i}"], domain="genserve", **attributes))
        for name, value in layer.inputs.items():
            tensors.append(numpy_helper.from_array(value, f"{name}_{i}"))
            kind = helper.np_dtype_to_tensor_dtype(value.dtype)
            given.append(helper.make_tensor_value_info(f"{name}_{i}", kind, [None] * value.ndim))
    inputs = [helper.make_tensor_value_info("x", FLOAT, None)]
    if residual:
        inputs.append(helper.make_tensor_value_info("residual", FLOAT, None))
    output = helper.make_tensor_value_info(f"y_{len(layers) - 1}", FLOAT, ["rows", None])
    graph = helper.make_graph(
        nodes, "layers", inputs + ([] if constant else given), [output], tensors if constant else []
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("genserve", 1)]
    serialized: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    return serialized


def session_of(model: bytes, threads: int = 2) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.register_custom_ops_library(str(kernels.library_path()))
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def run(session: onnxruntime.InferenceSession, **inputs: NDArray[Any]) -> NDArray[np.float32]:
    y: NDArray[np.float32] = session.run(None, inputs)[0]
    return y


@pytest.mark.parametrize("norm", with_extended(["", "rms", "layer"], always={"", "rms"}))
@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_session_computes_the_same_as_the_function(weight_format: str, norm: str) -> None:
    rng = np.random.default_rng(0)
    layer = make_layer(
        rng,
        in_features=200,
        out_features=77,
        weight_format=weight_format,
        norm=norm,
        activation="gelu",
        softcap=5.0,
    )
    sessions = [session_of(model_of([layer], residual=True), threads) for threads in (1, 2, 4)]
    for rows in (0, 1, 7, 200):
        x = rng.standard_normal((rows, 200), dtype=np.float32)
        residual = rng.standard_normal((rows, 77), dtype=np.float32)
        want = compute(layer, x, residual)
        for session in sessions:
            np.testing.assert_array_equal(run(session, x=x, residual=residual), want)


def test_weights_may_be_inputs_of_the_graph() -> None:
    rng = np.random.default_rng(0)
    layer = make_layer(rng, in_features=64, out_features=40, norm="rms")
    x = rng.standard_normal((5, 64), dtype=np.float32)
    inputs = {f"{name}_0": value for name, value in layer.inputs.items()}
    got = run(session_of(model_of([layer], constant=False)), x=x, **inputs)
    np.testing.assert_array_equal(got, compute(layer, x))


@pytest.mark.parametrize("name", ["scales", "norm_weight", "bias"])
def test_one_of_the_weights_may_be_an_input_of_the_graph(name: str) -> None:
    rng = np.random.default_rng(0)
    layer = make_layer(rng, in_features=64, out_features=40, norm="rms")
    model = onnx.load_model_from_string(model_of([layer]))
    [constant] = [tensor for tensor in model.graph.initializer if tensor.name == f"{name}_0"]
    model.graph.initializer.remove(constant)
    model.graph.input.append(helper.make_tensor_value_info(f"{name}_0", FLOAT, [None] * len(constant.dims)))
    x = rng.standard_normal((5, 64), dtype=np.float32)
    got = run(session_of(model.SerializeToString()), x=x, **{f"{name}_0": layer.inputs[name]})
    np.testing.assert_array_equal(got, compute(layer, x))


def test_a_float_attribute_may_be_an_integer() -> None:
    layer = make_layer(np.random.default_rng(0), in_features=64, out_features=40, softcap=5.0)
    x = np.full((3, 64), 100, np.float32)
    np.testing.assert_array_equal(run(session_of(model_of([layer], softcap=5)), x=x), compute(layer, x))


def test_attributes_may_be_left_out() -> None:
    layer = make_layer(np.random.default_rng(0), in_features=64, out_features=40)
    x = np.ones((3, 64), np.float32)
    left_out = dict.fromkeys(["norm", "activation", "gated", "softcap", "epsilon", "weight_format"])
    np.testing.assert_array_equal(run(session_of(model_of([layer], **left_out)), x=x), compute(layer, x))


def test_sessions_run_concurrently_and_on_two_threads() -> None:
    rng = np.random.default_rng(0)
    formats = ("int8", "int4_block")
    stacks = [
        [make_layer(rng, in_features=96, out_features=96, weight_format=name, norm="rms") for _ in range(6)]
        for name in formats
    ]
    sessions = [session_of(model_of(stack)) for stack in stacks]
    xs = [rng.standard_normal((rows, 96), dtype=np.float32) for rows in (1, 3, 40, 150)]
    want = [[run(session, x=x) for x in xs] for session in sessions]
    wrong: list[str] = []

    def repeat(which: int) -> None:
        for turn in range(100):
            index = turn % len(xs)
            if not np.array_equal(run(sessions[which], x=xs[index]), want[which][index]):
                wrong.append(f"{formats[which]}, {len(xs[index])} rows")

    threads = [threading.Thread(target=repeat, args=(which,)) for which in (0, 1, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


CORRUPT: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown format": ({"weight_format": "int2"}, 'weight_format is "int2", which is not known'),
    "an unknown norm": ({"norm": "batch"}, 'norm is "batch", which is not known'),
    "an unknown activation": ({"activation": "x" * 500}, "activation is a word of 500 letters"),
    "another width": ({"in_features": 65}, "weight has shape"),
    "another height": ({"out_features": 1 << 30}, "weight has shape"),
    "more than any width": ({"in_features": 2**63 - 1}, "make no layer"),
    "more than any height": ({"out_features": 2**63 - 1}, "make no layer"),
    "no width": ({"in_features": None}, "make no layer"),
    "less than nothing": ({"in_features": -(1 << 60)}, "make no layer"),
    "another format": ({"weight_format": "int4_block"}, "weight has shape"),
    "a format of floats": ({"weight_format": "float32"}, "weight has type uint8|have no scales"),
}


@pytest.mark.parametrize("case", CORRUPT)
def test_a_graph_with_weights_of_wrong_shapes_does_not_load(case: str) -> None:
    changed, message = CORRUPT[case]
    layer = make_layer(np.random.default_rng(0), in_features=64, out_features=40)
    with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.RuntimeException, match=message):
        session_of(model_of([layer], **changed))


def test_a_graph_without_a_weight_does_not_load() -> None:
    layer = make_layer(np.random.default_rng(0), in_features=64, out_features=40)
    model = onnx.load_model_from_string(model_of([layer]))
    del model.graph.node[0].input[1:]
    with pytest.raises(Exception, match="Linear"):
        session_of(model.SerializeToString())


@pytest.mark.parametrize("shape", [(3, 63), (64,), (1, 3, 64), ()])
def test_rows_of_a_wrong_shape_are_an_error(shape: tuple[int, ...]) -> None:
    session = session_of(model_of([make_layer(np.random.default_rng(0), in_features=64, out_features=40)]))
    with pytest.raises(
        onnxruntime.capi.onnxruntime_pybind11_state.Fail, match=r"genserve\.Linear: x has shape"
    ):
        run(session, x=np.zeros(shape, np.float32))
    assert run(session, x=np.zeros((3, 64), np.float32)).shape == (3, 40)
