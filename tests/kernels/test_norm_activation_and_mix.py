"""Norm, Activation and StreamMix, compared with numpy; their bits depend on a row alone."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from torch.nn import functional

from tests.kernels.c_types import Error, Tensor, Threads, instruction_sets, library
from tests.kernels.test_linear_session import run, session_of

Array = NDArray[np.float32]
NORMS = ["", "rms", "layer"]
ACTIVATIONS = ["", "silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu", "sigmoid", "xielu"]
XIELU = (0.8, 1.3, 0.5)     # alpha_p, alpha_n, beta


class NormAttributes(ctypes.Structure):
    _fields_ = (("num_groups", ctypes.c_int64), ("norm", ctypes.c_int32), ("epsilon", ctypes.c_float))


class ActivationAttributes(ctypes.Structure):
    _fields_ = (
        ("activation", ctypes.c_int32),
        *((name, ctypes.c_float) for name in ("alpha_p", "alpha_n", "beta")),
    )


def call(
    name: str, attributes: ctypes.Structure | None, inputs: Sequence[Any], *, isa: str = "", threads: int = 1
) -> Array:
    """Call an operator, whose output has the shape of its first input; StreamMix has no attributes.

    Raises:
        ValueError: the operator refused; has its message.
    """
    y, error = np.full_like(inputs[0], np.nan), Error()
    good = getattr(library(isa), f"genserve_{name}")(
        *([] if attributes is None else [ctypes.byref(attributes)]),
        (Tensor * len(inputs))(*map(Tensor.of, inputs)),
        ctypes.byref(Tensor.of(y)),
        ctypes.byref(Threads.of(threads)),
        ctypes.byref(error),
    )
    if not good:
        raise ValueError(error.message.decode())
    return y


def norm(kind: str, inputs: Sequence[Any], *, num_groups: int = 1, **options: Any) -> Array:
    return call("norm", NormAttributes(num_groups, NORMS.index(kind), 1e-5), inputs, **options)


def activation(name: str, inputs: Sequence[Any], **options: Any) -> Array:
    return call("activation", ActivationAttributes(ACTIVATIONS.index(name), *XIELU), inputs, **options)


def random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def norm_inputs(rows: int, columns: int) -> list[Any]:
    """x, weight, bias and residual."""
    return [
        3 * random(rows, columns) + 1,
        random(columns, seed=1),
        random(columns, seed=2),
        random(rows, columns, seed=3),
    ]


@pytest.mark.parametrize("kind", NORMS[1:])
@pytest.mark.parametrize(("num_groups", "size"), [(1, 2304), (1, 5), (4, 80), (3, 1), (7, 33)])
def test_a_norm_equals_numpy(kind: str, num_groups: int, size: int) -> None:
    inputs = norm_inputs(9, num_groups * size)
    x, weight, bias, residual = (array.astype(np.float64) for array in inputs)
    groups = x.reshape(len(x), num_groups, size)
    if kind == "layer":
        groups = groups - groups.mean(-1, keepdims=True)
    normed = (groups / np.sqrt((groups**2).mean(-1, keepdims=True) + 1e-5)).reshape(x.shape)
    found = norm(kind, inputs, num_groups=num_groups)
    np.testing.assert_allclose(found, normed * weight + bias + residual, atol=5e-6)
    plain = norm(kind, [*inputs[:2], None, None], num_groups=num_groups)
    np.testing.assert_allclose(plain, normed * weight, atol=5e-6)


@pytest.mark.parametrize("name", ["sigmoid", "xielu", "gelu_tanh", "relu2", ""])
def test_an_activation_equals_torch(name: str) -> None:
    x, factor = 4 * random(7, 90), random(7, 90, seed=1)
    above, below, slope = XIELU
    functions = {
        "": lambda x: x,
        "sigmoid": torch.sigmoid,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "relu2": lambda x: torch.relu(x) ** 2,
        "xielu": lambda x: (
            torch.where(x > 0, above * x**2, below * (torch.expm1(torch.minimum(x, x * 0)) - x)) + slope * x
        ),
    }
    expected = functions[name](torch.tensor(x, dtype=torch.float64)).numpy()
    np.testing.assert_allclose(activation(name, [x, None]), expected, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(activation(name, [x, factor]), expected * factor, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("streams", "columns"), [(4, 77), (1, 5), (3, 512)])
def test_a_mix_of_streams_equals_numpy(streams: int, columns: int) -> None:
    x, matrices = random(9, streams, columns), random(9, streams, streams, seed=1)
    expected = x + matrices.astype(np.float64) @ x
    np.testing.assert_allclose(call("stream_mix", None, [x, matrices]), expected, atol=5e-6)


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("rows", [1, 70])
def test_bits_depend_neither_on_instruction_set_nor_rows_nor_threads(isa: str, rows: int) -> None:
    """70 rows are several parts for the threads."""
    for kind in NORMS[1:]:
        inputs = norm_inputs(rows, 6 * 170)
        expected = norm(kind, inputs, num_groups=6, isa="portable")
        for threads in (1, 3):
            found = norm(kind, inputs, num_groups=6, isa=isa, threads=threads)
            assert found.tobytes() == expected.tobytes()
        x, weight, bias, residual = inputs
        last = norm(kind, [x[-1:], weight, bias, residual[-1:]], num_groups=6, isa=isa)
        assert last.tobytes() == expected[-1:].tobytes()
    x = 4 * random(rows, 1021)
    for name in ACTIVATIONS:
        if name != "clamped_swiglu":
            expected = activation(name, [x, None], isa="portable")
            assert activation(name, [x, None], isa=isa, threads=3).tobytes() == expected.tobytes(), name
            assert activation(name, [x[-1:], None], isa=isa).tobytes() == expected[-1:].tobytes(), name
    x, matrices = random(rows, 4, 170), random(rows, 4, 4, seed=1)
    expected = call("stream_mix", None, [x, matrices], isa="portable")
    assert call("stream_mix", None, [x, matrices], isa=isa, threads=3).tobytes() == expected.tobytes()
    last = call("stream_mix", None, [x[-1:], matrices[-1:]], isa=isa)
    assert last.tobytes() == expected[-1:].tobytes()


def test_a_call_without_rows_is_valid() -> None:
    assert call("stream_mix", None, [random(0, 4, 8), random(0, 4, 4)]).shape == (0, 4, 8)
    assert norm("rms", norm_inputs(0, 8)).shape == (0, 8)
    assert activation("silu", [random(0, 8), None]).shape == (0, 8)


def test_wrong_inputs_are_refused() -> None:
    x, weight, bias, residual = norm_inputs(2, 12)
    with pytest.raises(ValueError, match="norm is missing"):
        norm("", [x, weight, bias, residual])
    with pytest.raises(ValueError, match="12 columns make no 5 groups"):
        norm("rms", [x, weight, bias, residual], num_groups=5)
    with pytest.raises(ValueError, match=r"x has shape \[2, 12\], not \[any, 11\]"):
        norm("rms", [x, weight[:-1].copy(), None, residual])
    with pytest.raises(ValueError, match=r"bias has shape \[11\], not \[12\]"):
        norm("rms", [x, weight, bias[:-1].copy(), residual])
    with pytest.raises(ValueError, match="residual has shape"):
        norm("rms", [x, weight, bias, residual[:1].copy()])
    with pytest.raises(ValueError, match="matrices has shape"):
        call("stream_mix", None, [random(2, 4, 8), random(2, 4, 3)])
    with pytest.raises(ValueError, match="factor has shape"):
        activation("silu", [x, residual[:1].copy()])
    with pytest.raises(ValueError, match="clamped_swiglu"):
        activation("clamped_swiglu", [x, None])


def model_of(op: str, inputs: Sequence[str], constants: dict[str, Array], **attributes: Any) -> bytes:
    """A graph of one node, whose inputs are constants or the graph's."""
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("genserve", 1)]
    node = helper.make_node(op, inputs, ["y"], domain="genserve", **attributes)
    given = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
        for name in inputs
        if name and name not in constants
    ]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    tensors = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph([node], "graph", given, [output], tensors)
    model: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    return model


def test_a_session_computes_the_same() -> None:
    x, weight, bias, residual = norm_inputs(70, 6 * 170)
    names = ["x", "weight", "", "residual"]
    model = model_of("Norm", names, {"weight": weight}, norm="layer", num_groups=6, epsilon=1e-5)
    expected = norm("layer", [x, weight, None, residual], num_groups=6)
    np.testing.assert_array_equal(run(session_of(model), x=x, residual=residual), expected)
    model = model_of("Norm", ["x", "weight", "bias"], {"bias": bias}, norm="rms")
    expected = norm("rms", [x, weight, bias, None])
    np.testing.assert_array_equal(run(session_of(model), x=x, weight=weight), expected)
    parameters = dict(zip(("alpha_p", "alpha_n", "beta"), XIELU, strict=True))
    model = model_of("Activation", ["x", "factor"], {}, activation="xielu", **parameters)
    expected = activation("xielu", [x, residual])
    np.testing.assert_array_equal(run(session_of(model), x=x, factor=residual), expected)
    streams, matrices = x.reshape(70, 6, 170), random(70, 6, 6)
    model = model_of("StreamMix", ["x", "matrices"], {})
    expected = call("stream_mix", None, [streams, matrices])
    np.testing.assert_array_equal(run(session_of(model), x=streams, matrices=matrices), expected)


@pytest.mark.parametrize(
    ("op", "attributes", "message"),
    [
        ("Norm", {}, "norm is missing"),
        ("Norm", {"norm": "batch"}, 'norm is "batch", which is not known'),
        ("Norm", {"norm": "rms", "num_groups": 0}, "12 columns make no 0 groups"),
        ("Norm", {"norm": "rms", "num_groups": 5}, "12 columns make no 5 groups"),
        ("Activation", {"activation": "clamped_swiglu"}, "of experts only"),
        ("Activation", {"activation": "tanh"}, 'activation is "tanh", which is not known'),
    ],
)
def test_wrong_attributes_are_refused_at_load(op: str, attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        session_of(model_of(op, ["x", "weight"], {"weight": random(12)}, **attributes))
