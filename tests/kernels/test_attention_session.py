"""PagedAttention in ONNX Runtime equals the plain C function."""

from __future__ import annotations

import re
from itertools import islice
from typing import Any

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from genserve import kernels
from tests.kernels.attention_calls import CACHES, FAMILIES, INPUTS, bits, make_call, run
from tests.kernels.reference_attention import PagedAttentionCall


def make_session(call: PagedAttentionCall, *, num_outputs: int = 5) -> onnxruntime.InferenceSession:
    """A graph with only the operator and its first outputs; norms and tables are its constants."""
    constants = ("cos_cache", "sin_cache", "q_norm_weight", "k_norm_weight", "alibi_slopes")
    present = {name: getattr(call, name, None) for name in INPUTS}
    names = [name if present[name] is not None else "" for name in INPUTS]
    kinds = {name: helper.np_dtype_to_tensor_dtype(x.dtype) for name, x in present.items() if x is not None}
    outputs = {"output": kinds["query"]}
    outputs |= {f"{name}_out": kinds[name] for name in CACHES if name in kinds}
    outputs = dict(islice(outputs.items(), num_outputs))
    attributes = {"num_heads": call.num_heads, "kv_num_heads": call.kv_num_heads, "do_rotary": 1}
    attributes |= {"local_window_size": call.local_window_size, "softcap": call.softcap}
    node = helper.make_node("PagedAttention", names, [*outputs], domain="genserve", **attributes)
    graph = helper.make_graph(
        [node],
        "attention",
        [
            helper.make_tensor_value_info(name, kind, [None] * present[name].ndim)
            for name, kind in kinds.items()
            if name not in constants
        ],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs.items()],
        [numpy_helper.from_array(present[name], name) for name in constants if name in kinds],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("genserve", 1)]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(str(kernels.library_path()))
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def run_session(
    session: onnxruntime.InferenceSession, call: PagedAttentionCall, *, bind_caches: bool = True
) -> NDArray[Any]:
    binding = session.io_binding()
    names = [item.name for item in session.get_inputs()]
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(getattr(call, name)) for name in names}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("output")
    for item in session.get_outputs()[1:]:
        if bind_caches:
            binding.bind_ortvalue_output(item.name, values[item.name.removesuffix("_out")])
        else:
            binding.bind_output(item.name)
    session.run_with_iobinding(binding)
    for name in CACHES:
        if name in values:
            setattr(call, name, values[name].numpy().copy())
    return binding.get_outputs()[0].numpy().copy()


@pytest.mark.parametrize(
    "family", ["llama", "llama, int8 cache", "qwen3, float16 query", "gemma2", "gpt-oss"]
)
def test_a_session_computes_the_same_as_the_function(family: str) -> None:
    sequences = [(600, 1), (30, 40), (0, 2)]
    call, other = make_call(FAMILIES[family], sequences), make_call(FAMILIES[family], sequences)
    output = run_session(make_session(call), call)
    np.testing.assert_array_equal(bits(output), bits(run(other)))
    for name in CACHES:
        if getattr(other, name) is not None:
            np.testing.assert_array_equal(bits(getattr(call, name)), bits(getattr(other, name)))


def test_errors_of_a_session_have_the_reason() -> None:
    call = make_call(FAMILIES["llama"], [(600, 1), (30, 40)])
    session = make_session(call)
    with pytest.raises(Exception, match="PagedAttention: key_cache_out and value_cache_out are not bound"):
        run_session(session, call, bind_caches=False)
    call.block_table[0, 3] = -7
    with pytest.raises(Exception, match=re.escape("PagedAttention: block_table[0, 3] is -7")):
        run_session(session, call)
    call.num_heads = 5
    with pytest.raises(Exception, match="num_heads is 5, not a multiple of kv_num_heads, 2"):
        make_session(call)


def test_a_node_without_the_scales_of_its_cache_is_an_error_and_no_crash() -> None:
    call = make_call(FAMILIES["llama, int8 cache"], [(30, 4)])
    with pytest.raises(Exception, match="PagedAttention: output 3 is left out"):
        run_session(make_session(call, num_outputs=3), call)
