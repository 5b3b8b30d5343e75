"""One version of a model that answers: real Python models behind the door."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path

import numpy as np

from genserve.errors import Status
from genserve.inference import Inference, InferenceRequest
from genserve.tensor import Tensor
from tests.models import CONFIG, ask, value, write_model
from tests.repository.test_control import opened


def test_an_output_that_does_not_fit_its_reshape_is_an_error(tmp_path: Path) -> None:
    old, new = "dims: [ -1 ] } ]\n", "dims: [ 4 ] reshape { shape: [ 2, 2 ] } } ]\n"
    config = new.join(CONFIG.rsplit(old, 1))
    code = """
        import numpy as np
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            def execute(self, requests):
                shapes = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy() for request in requests]
                return [
                    pb_utils.InferenceResponse(
                        [pb_utils.Tensor("Y", np.zeros(shape.astype(int), np.float32))]) for shape in shapes
                ]
    """
    write_model(tmp_path, "one", code=code, config=config)
    with opened(tmp_path, "one") as repository:
        assert value(ask(repository, "one", X=[2, 2])) == [0] * 4
        error = ask(repository, "one", X=[3, 1]).error
        assert error is not None
        assert error.message == "output 'Y' of model 'one' has shape [3,1], whose elements do not fit [4]"
        assert error.status is Status.INTERNAL


def test_inputs_are_gone_without_a_garbage_collection(tmp_path: Path) -> None:
    write_model(tmp_path, "one")
    with opened(tmp_path, "one") as repository:
        gc.disable()
        try:
            array = np.zeros(1_000_000, np.float32)
            gone, ended = threading.Event(), threading.Event()
            weakref.finalize(array, gone.set)
            inference = Inference(
                request=InferenceRequest(model_name="one", inputs={"X": Tensor("X", array)}),
                on_response=lambda response, final: ended.set(),
            )
            repository.submit(inference)
            assert ended.wait(30)
            del array, inference
            assert gone.wait(5)
        finally:
            gc.enable()
