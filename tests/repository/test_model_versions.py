"""One version of a model that answers: real Python models behind the door."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

from genserve.backends.backend import Placement
from genserve.batching.model_instance import ModelInstances
from genserve.batching.queue_scheduler import make_scheduler
from genserve.batching.request_queue import stopping_error
from genserve.config.model_config import DynamicBatching, ModelConfig
from genserve.errors import Status
from genserve.inference import Inference, InferenceRequest, InferenceResponse
from genserve.inference_statistics import ModelStatistics
from genserve.repository.model_versions import ModelVersion
from genserve.repository.response_cache import ResponseCache
from genserve.tensor import Tensor
from tests.repository.test_model_lifecycle import opened
from tests.support.python_models import CONFIG, ask, value, write_model


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
        assert all(part in error.message for part in ("'Y'", "'one'", "[3,1]", "[4]"))
        assert error.status is Status.INTERNAL


def test_inputs_are_freed_without_a_garbage_collection(tmp_path: Path) -> None:
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


class Stuck:
    """A model that hangs in its code until the test lets it go on."""

    def __init__(self) -> None:
        self.executing, self.may_go_on, self.closed = (threading.Event() for _ in range(3))
        self.num_executed = 0

    def execute(self, batch) -> None:
        self.num_executed += len(batch)
        self.executing.set()
        assert self.may_go_on.wait(30)
        for inference in batch:
            inference.send(None, final=True)  # nobody waits for it any more

    def close(self) -> None:
        self.closed.set()


class Requester:
    """Notes what came, and waits for the end."""

    def __init__(self, served: ModelVersion) -> None:
        self.responses: list[InferenceResponse | None] = []
        self._ended = threading.Event()
        request = InferenceRequest(model_name="m", inputs={})
        served.submit(Inference(request=request, on_response=self._take))

    def _take(self, response: InferenceResponse | None, final: bool) -> None:
        self.responses.append(response)
        if final:
            self._ended.set()

    def error(self):
        assert self._ended.wait(30)
        [response] = self.responses
        return response.error


def test_an_unload_fails_late_requests_and_abandons_a_stuck_instance(
    tmp_path: Path, caplog
) -> None:
    model, statistics = Stuck(), ModelStatistics()
    config = ModelConfig(name="m", dynamic_batching=DynamicBatching())
    instances = ModelInstances(
        lambda placement: model,
        placements=[Placement(name="m_0", kind="CPU")],
        scheduler=make_scheduler(config, num_instances=1, path=tmp_path),
        statistics=statistics,
        exit_timeout_s=0,
    )
    served = ModelVersion(instances, config=config, version=1, statistics=statistics)
    running = Requester(served)
    assert model.executing.wait(30)
    waiting = Requester(served)
    with caplog.at_level(logging.ERROR):
        served.close(timeout_s=0)
    assert "instance m_0 is abandoned" in caplog.text
    for requester in (running, waiting):
        assert requester.error().message == "model 'm' was unloaded before this request ended"
        assert requester.error().status is Status.UNAVAILABLE
    assert (statistics.fail.count, served.num_pending) == (2, 0)
    model.may_go_on.set()
    assert model.closed.wait(30)
    assert model.num_executed == 1


def test_a_request_during_an_unload_fails_once() -> None:
    class Closing:
        """Rejects what comes, since the model was unloaded just before."""

        def submit(self, inference: Inference) -> None:
            served.close(timeout_s=0)
            raise stopping_error(inference.request)

        def close(self) -> None:
            pass

    statistics = ModelStatistics()
    served = ModelVersion(Closing(), config=ModelConfig(name="m"), version=1, statistics=statistics)
    assert Requester(served).error().status is Status.UNAVAILABLE
    assert (statistics.fail.count, served.num_pending) == (1, 0)


def test_a_cached_request_during_an_unload_fails_once() -> None:
    class Closing(ResponseCache):
        """Finds the answer as the model is unloaded."""

        def get(self, key: bytes) -> InferenceResponse:
            served.close(timeout_s=0)
            return InferenceResponse()

    class Idle:
        def close(self) -> None:
            pass

    cache = Closing(size_bytes=1)
    served = ModelVersion(
        Idle(), config=ModelConfig(name="m"), version=1, statistics=ModelStatistics(), cache=cache
    )
    assert Requester(served).error().status is Status.UNAVAILABLE
    assert served.num_pending == 0


def test_a_request_that_its_runtime_rejects_does_not_block_an_unload() -> None:
    class Broken:
        def submit(self, inference: Inference) -> None:
            raise OSError("no room")

        def close(self) -> None:
            pass

    served = ModelVersion(Broken(), config=ModelConfig(name="m"), version=1, statistics=ModelStatistics())
    with pytest.raises(OSError, match="no room"):
        Requester(served)
    assert served.num_pending == 0
