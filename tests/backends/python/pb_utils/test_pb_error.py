from __future__ import annotations

import logging

import numpy as np
import pytest

from genserve.backends.python import pb_utils
from genserve.backends.python.pb_utils.pb_error import text_argument
from tests.backends.python.models import declared, floats

# As in the BLS example of Triton's own documentation: the name is an element of a string tensor.
NAMED_BY_A_TENSOR = """
    class TritonPythonModel:
        def execute(self, requests):
            names = pb_utils.Tensor("NAMES", np.array([b"double", b"Y"], dtype=object)).as_numpy()
            call = pb_utils.InferenceRequest(
                model_name=names[0], requested_output_names=[names[1]], request_id=b"7",
                inputs=[pb_utils.Tensor(b"X", tensor(requests[0]).as_numpy())],
            )
            assert call.request_id() == "7"
            assert pb_utils.is_model_ready(names[0], b"1")
            return [call.exec()]
"""
DOUBLE = """
    class TritonPythonModel:
        def execute(self, requests):
            return [answer(tensor(request).as_numpy() * 2) for request in requests]
"""


def test_names_in_a_bls_request_may_be_bytes(models):
    models.add("double", DOUBLE, declared("Y"))
    models.add("caller", NAMED_BY_A_TENSOR, declared("Y"))
    assert models.infer("caller", floats(3)).array.tolist() == [6]


def test_invalid_utf_8_is_replaced_and_other_types_are_rejected():
    assert text_argument(b"caf\xe9", "a name") == "caf�"
    assert text_argument(np.bytes_(b"a"), "a name") == "a"
    with pytest.raises(TypeError, match="a name is a str or bytes, got <class 'int'>"):
        text_argument(3, "a name")


def test_an_error_and_a_log_line_may_be_bytes(caplog):
    assert pb_utils.TritonError(b"too much").message() == "too much"
    with caplog.at_level(logging.INFO, logger="genserve.models"):
        pb_utils.Logger.log_info(b"so it is")
    assert [record.getMessage() for record in caplog.records] == ["so it is"]
