"""Ensembles over real Python models, from clients of a real server."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as client

from tests.support.live_server import LiveServer
from tests.support.python_models import write_model

DECOUPLED = """
    backend: "python"
    input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
    output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
    model_transaction_policy { decoupled: true }
"""
PLAIN = DECOUPLED.replace("model_transaction_policy { decoupled: true }", "")
PROCESS = 'parameters { key: "EXECUTION" value { string_value: "process" } }'
ENSEMBLE = """
    platform: "ensemble"
    input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
    output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
    ensemble_scheduling {
      max_inflight_requests: 2
      step { model_name: "producer" model_version: -1
        input_map { key: "X" value: "X" } output_map { key: "Y" value: "M" } }
      step { model_name: "consumer" model_version: -1
        input_map { key: "X" value: "M" } output_map { key: "Y" value: "Y" } }
    }
"""
# Sends as many numbers as it is asked for, as fast as it may, and notes in a folder what it has sent.
PRODUCER = """
    from pathlib import Path
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def initialize(self, args):
            self.notes = Path(args["model_repository"]).parent.parent / "notes"

        def execute(self, requests):
            for request in requests:
                self.answer(request, request.get_response_sender())

        def answer(self, request, sender):
            count = int(pb_utils.get_input_tensor_by_name(request, "X").as_numpy()[0])
            for number in range(count):
                tensor = pb_utils.Tensor("Y", np.array([number], np.float32))
                sender.send(pb_utils.InferenceResponse([tensor]))
                (self.notes / f"sent-{number}").touch()
                if request.is_cancelled():
                    (self.notes / "cancelled").touch()
                    break
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            (self.notes / "done").touch()
"""
ASYNC_PRODUCER = PRODUCER.replace("def execute", "async def execute")
# Answers with how many the producer had sent when it began with each.
CONSUMER = """
    from pathlib import Path
    import threading
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def initialize(self, args):
            self.notes = Path(args["model_repository"]).parent.parent / "notes"

        def execute(self, requests):
            assert len(requests) == 1
            while not (self.notes / "sent-1").exists():
                threading.Event().wait(0.001)
            threading.Event().wait(0.002)
            num_sent = len(list(self.notes.glob("sent-*")))
            return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([num_sent], np.float32))])]
"""
# Waits until the test lets it go on.
HELD_CONSUMER = """
    from pathlib import Path
    import threading
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def initialize(self, args):
            self.notes = Path(args["model_repository"]).parent.parent / "notes"

        def execute(self, requests):
            while not (self.notes / "go").exists():
                threading.Event().wait(0.001)
            if (self.notes / "fail").exists():
                raise ValueError("no more")
            return [pb_utils.InferenceResponse(
                [pb_utils.Tensor("Y", pb_utils.get_input_tensor_by_name(request, "X").as_numpy())]
            ) for request in requests]
"""
# Asks the producer, of which there is one instance, for one more number.
CALLING_CONSUMER = """
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            [request] = requests
            one = pb_utils.Tensor("X", np.array([1], np.float32))
            call = pb_utils.InferenceRequest(
                model_name="producer", inputs=[one], requested_output_names=["Y"]
            )
            for response in call.exec(decoupled=True):
                assert not response.has_error(), response.error().message()
            return [pb_utils.InferenceResponse(
                [pb_utils.Tensor("Y", pb_utils.get_input_tensor_by_name(request, "X").as_numpy())]
            )]
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "notes").mkdir()
    folder = tmp_path / "models"
    (folder / "both" / "1").mkdir(parents=True)
    (folder / "both" / "config.pbtxt").write_text(ENSEMBLE)
    return folder


@contextmanager
def served(root: Path, *, producer: str, consumer: str, more: str = "") -> Iterator[LiveServer]:
    write_model(root, "producer", config=DECOUPLED + more, code=producer)
    write_model(root, "consumer", config=PLAIN + more, code=consumer)
    with LiveServer(root, drain_s=5) as server:
        yield server


class Stream:
    """A stream of one request, over gRPC."""

    def __init__(self, server: LiveServer, count: int) -> None:
        self._arrived: queue.SimpleQueue[tuple[client.InferResult | None, Exception | None]]
        self._arrived = queue.SimpleQueue()
        self._client = client.InferenceServerClient(server.grpc_url)
        self._client.start_stream(lambda result, error: self._arrived.put((result, error)))
        x = client.InferInput("X", [1], "FP32")
        x.set_data_from_numpy(np.array([count], np.float32))
        self._client.async_stream_infer("both", [x], enable_empty_final_response=True)

    def numbers(self) -> Iterator[float]:
        """The answers until the last; raises an error that comes."""
        while True:
            result, error = self._arrived.get(timeout=60)
            if error is not None:
                raise error
            assert result is not None
            output = result.as_numpy("Y")
            if output is not None:
                yield float(output[0])
            if result.get_response().parameters["triton_final_response"].bool_param:
                self._client.stop_stream()
                return

    def leave(self) -> None:
        self._client.stop_stream(cancel_requests=True)


def wait_for(file: Path) -> None:
    while not file.exists():
        threading.Event().wait(0.001)


IN_THE_SERVER = [
    pytest.param(PRODUCER, "", id="thread"),
    pytest.param(ASYNC_PRODUCER, "", id="coroutine"),
]
KINDS = pytest.mark.parametrize(
    ("producer", "more"),
    [
        *IN_THE_SERVER,
        *(
            pytest.param(producer, PROCESS, id=name, marks=pytest.mark.extended)
            for name, producer in (("process", PRODUCER), ("coroutine in a process", ASYNC_PRODUCER))
        ),
    ],
)


@pytest.mark.parametrize(
    ("producer", "more"),
    [
        *IN_THE_SERVER,
        pytest.param(PRODUCER, PROCESS, id="process"),
        pytest.param(ASYNC_PRODUCER, PROCESS, id="coroutine in a process", marks=pytest.mark.extended),
    ],
)
def test_a_fast_step_waits_for_a_slow_one_that_has_a_limit(root, producer, more):
    with served(root, producer=producer, consumer=CONSUMER, more=more) as server:
        num_sent = list(Stream(server, 60).numbers())
    assert len(num_sent) == 60
    # When the consumer begins with number n, n have ended, and at most two are at the consumer.
    assert all(sent <= ended + 2 for ended, sent in enumerate(num_sent))


@KINDS
def test_a_cancelled_request_unblocks_a_waiting_step(root, producer, more):
    notes = root.parent / "notes"
    with served(root, producer=producer, consumer=HELD_CONSUMER, more=more) as server:
        stream = Stream(server, 1000)
        wait_for(notes / "sent-1")
        stream.leave()
        wait_for(notes / "done")
        assert (notes / "cancelled").exists()
        (notes / "go").touch()
        assert list(Stream(server, 4).numbers()) == [0, 1, 2, 3]


@KINDS
def test_a_failed_step_unblocks_a_waiting_one(root, producer, more):
    notes = root.parent / "notes"
    with served(root, producer=producer, consumer=HELD_CONSUMER, more=more) as server:
        stream = Stream(server, 1000)
        wait_for(notes / "sent-1")
        (notes / "fail").touch()
        (notes / "go").touch()
        with pytest.raises(client.InferenceServerException, match=r"in ensemble 'both', .*no more"):
            list(stream.numbers())
        stream.leave()  # the server would wait for it at its end
        wait_for(notes / "done")
        (notes / "fail").unlink()
        assert list(Stream(server, 4).numbers()) == [0, 1, 2, 3]


@KINDS
def test_a_step_may_call_the_step_that_waits_for_it(root, producer, more, caplog):
    with served(root, producer=producer, consumer=CALLING_CONSUMER, more=more) as server:
        assert list(Stream(server, 8).numbers()) == list(range(8))
    assert "ignores max_inflight_requests" in caplog.text


def test_two_requests_share_the_limit(root):
    notes = root.parent / "notes"
    slots = "instance_group { count: 8 }"
    with served(root, producer=PRODUCER, consumer=HELD_CONSUMER, more=slots) as server:
        streams = [Stream(server, 20), Stream(server, 20)]
        consumer = server.server.services.repository.find("consumer")
        # Two numbers of one request, or one of each.
        while consumer.num_pending < 2:
            threading.Event().wait(0.001)
        wait_for(notes / "sent-0")
        assert consumer.num_pending == 2
        (notes / "go").touch()
        # Two run at a time: which of them ends first is chance.
        assert [sorted(stream.numbers()) for stream in streams] == [list(range(20))] * 2
