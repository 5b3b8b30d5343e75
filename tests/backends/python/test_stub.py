from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import threading
import weakref

import numpy as np
import pytest
from prometheus_client import generate_latest

from genserve.backends.python.model_context import ModelContext
from genserve.backends.python.python_model import ModelSetup
from genserve.backends.python.stub import ModelProcess
from genserve.errors import InferenceError, Status
from genserve.inference import Backlog, Inference, InferenceRequest
from genserve.tensor import Tensor
from tests.backends.python.models import DECOUPLED, Answer, declared, floats
from tests.support.live_server import wait_until

PROCESS = 'parameters { key: "EXECUTION" value { string_value: "process" } }'


def test_a_model_runs_in_a_stub_process(models, caplog):
    caplog.set_level(logging.INFO)
    models.add(
        "m",
        """
        import os, sys
        class TritonPythonModel:
            def initialize(self, args):
                self.args = args
            def execute(self, requests):
                pb_utils.Logger.log_info("in it")
                return [pb_utils.InferenceResponse([
                    pb_utils.Tensor("Y", tensor(r).as_numpy() * 2),
                    pb_utils.Tensor("S", np.array([self.args["model_name"], r.request_id()], dtype=object)),
                    pb_utils.Tensor("P", np.array([os.getpid()])),
                ]) for r in requests]
        """,
        PROCESS + declared("Y", "S", "P"),
    )
    answer = models.infer("m", floats(1, 2), id="7")
    y, s, p = answer.wait().responses[0].outputs
    assert y.array.tolist() == [2, 4]
    assert s.array.tolist() == [b"m", b"7"]
    assert p.array != os.getpid()
    assert ("genserve.models.m", logging.INFO, "in it") in caplog.record_tuples


def test_log_records_use_the_servers_current_level_and_keep_tracebacks_separate(models, caplog):
    logger = logging.getLogger("genserve")
    caplog.set_level(logging.WARNING)
    models.add(
        "m",
        """
        class TritonPythonModel:
            def execute(self, requests):
                pb_utils.Logger.log_verbose(f"verbose {tensor(requests[0]).as_numpy()[0]:.0f}")
                raise ValueError("boom")
        """,
        PROCESS,
    )
    models.infer("m", floats(1)).wait()
    with caplog.at_level(logging.DEBUG, logger=logger.name):
        models.infer("m", floats(2)).wait()
    results = [record.getMessage() for record in caplog.records if record.name == "genserve.models.m"]
    assert results == ["verbose 2"]
    failed = next(record for record in caplog.records if record.getMessage() == "model m failed")
    assert failed.exc_text.startswith("Traceback")
    assert failed.exc_text.endswith("ValueError: boom")


def test_failures_equal_those_of_a_model_in_the_server(models):
    models.add(
        "m",
        """
        class TritonPythonModel:
            def execute(self, requests):
                if tensor(requests[0]).as_numpy()[0]:
                    raise ValueError("boom")
                error = pb_utils.TritonError("no", pb_utils.TritonError.NOT_FOUND)
                return [pb_utils.InferenceResponse(error=error)]
        """,
        PROCESS,
    )
    assert "message: ValueError: boom\n\nAt:\n" in models.infer("m", floats(1)).error.message
    assert models.infer("m", floats(0)).error.status.name == "NOT_FOUND"


def test_a_failed_load_has_the_reason(models):
    source = "class TritonPythonModel:\n    def initialize(self, args):\n        raise ValueError('none')"
    with pytest.raises(InferenceError, match=r"^ValueError: none\n\nAt:\n"):
        models.add("m", source, PROCESS)


CALLS = """
    class TritonPythonModel:
        def execute(self, requests):
            x = tensor(requests[0])
            ok = ask("double", x).exec()
            unknown = ask("nothing", x).exec()
            stream = [r.output_tensors()[0].as_numpy().item() for r in ask("repeat", x).exec(decoupled=True)
                      if r.output_tensors()]
            async def both():
                return await asyncio.gather(*[ask("double", x).async_exec() for _ in range(2)])
            async_ = [r.output_tensors()[0].as_numpy().item() for r in asyncio.run(both())]
            results = [ok.output_tensors()[0].as_numpy().item(), unknown.error().message(), stream, async_,
                    pb_utils.is_model_ready("double")]
            return [answer(np.array([json.dumps(results)], dtype=object))]
"""


def test_its_bls_requests_reach_the_models_of_the_server(models):
    models.add(
        "double",
        """
        class TritonPythonModel:
            def execute(self, requests):
                return [answer(tensor(request).as_numpy() * 2) for request in requests]
        """,
    )
    models.add(
        "repeat",
        """
        class TritonPythonModel:
            def execute(self, requests):
                sender = requests[0].get_response_sender()
                for number in range(3):
                    sender.send(answer(np.array([number])))
                sender.send(flags=1)
        """,
        DECOUPLED,
    )
    models.add("m", CALLS, PROCESS)
    assert models.infer("m", floats(3)).array[0].decode() == (
        '[6.0, "Model nothing - Error when running inference: Failed for execute the inference request. '
        "Model 'nothing' is not ready.\", [0, 1, 2], [6.0, 6.0], true]"
    )


def test_a_cycle_of_calls_is_detected(models):
    models.add(
        "m",
        """
        class TritonPythonModel:
            def execute(self, requests):
                response = ask("m", tensor(requests[0])).exec()
                return [pb_utils.InferenceResponse(error=response.error())]
        """,
        PROCESS,
    )
    assert "every instance that could run the request waits" in models.infer("m", floats(1)).error.message


def test_a_cycle_of_calls_is_detected_while_the_process_sends_many_messages(models):
    models.add(
        "m",
        """
        class TritonPythonModel:
            def initialize(self, args):
                threading.Thread(target=self.talk, daemon=True).start()
            def talk(self):
                while not threading.Event().wait(0.01):
                    pb_utils.Logger.log_verbose("still there")
            def execute(self, requests):
                response = ask("m", tensor(requests[0])).exec()
                return [pb_utils.InferenceResponse(error=response.error())]
        """,
        PROCESS,
    )
    assert "every instance that could run the request waits" in models.infer("m", floats(1)).error.message


def test_a_failed_check_does_not_affect_requests(models, caplog):
    models.add(
        "m",
        """
        import pathlib
        class TritonPythonModel:
            def execute(self, requests):
                while not (pathlib.Path(__file__).parent / "go").exists():
                    threading.Event().wait(0.001)
                return [answer(tensor(request).as_numpy()) for request in requests]
        """,
        PROCESS,
    )

    def fail():
        looked.set()
        raise ValueError("no look")

    looked, answered = threading.Event(), Answer()
    request = InferenceRequest(model_name="m", inputs={"X": Tensor("X", floats(1))})
    waiting = Inference(request=request, on_response=answered.receive, blocked_by=fail)
    inference = Inference(request=request, on_response=answered.receive, backlog=Backlog())
    inference.backlog.add(waiting)
    models.submit(inference)
    assert looked.wait(20)
    (models.root / "m" / "1" / "go").touch()
    assert answered.array == [1]
    assert "no look" in caplog.text


def test_a_decoupled_model_responds_through_its_senders(models):
    models.add(
        "m",
        """
        class TritonPythonModel:
            def execute(self, requests):
                for request in requests:
                    threading.Thread(target=self.answer, args=[request]).start()
            def answer(self, request):
                sender = request.get_response_sender()
                sender.send(answer(np.array([1])))
                while not sender.is_cancelled():
                    time.sleep(0.001)
                sender.send(answer(np.array([2])), flags=1)
        """,
        f"{PROCESS} {DECOUPLED}",
    )
    answer = models.infer("m", floats(1))
    wait_until(lambda: answer.responses)
    answer.inference.cancel()
    assert np.concatenate(answer.arrays).tolist() == [1, 2]


def test_a_crash_fails_its_own_requests_and_the_process_is_restarted(models):
    models.add(
        "m",
        """
        import os
        class TritonPythonModel:
            def execute(self, requests):
                if tensor(requests[0]).as_numpy()[0]:
                    os._exit(3)
                return [answer(np.array([os.getpid()])) for _ in requests]
        """,
        PROCESS,
    )
    other = "class TritonPythonModel:\n    def execute(self, requests):\n        return [answer(np.ones(1))]"
    models.add("other", other)
    first = models.infer("m", floats(0)).array
    error = models.infer("m", floats(1)).error
    assert error.message == "Stub process 'm_0' is not healthy."
    # As in Triton, no status on which clients repeat a request: it may have caused the crash.
    assert error.status is Status.INTERNAL
    assert "may be the cause" in error.remedy
    assert not models.is_ready("m")
    assert models.infer("other", floats(1)).array == [1]
    wait_until(lambda: models.is_ready("m"))
    assert models.infer("m", floats(0)).array != first


def test_its_metrics_are_exposed_by_the_server(models):
    models.add(
        "m",
        """
        class TritonPythonModel:
            def initialize(self, args):
                pb_utils.Logger.log_info("before it is ready")
                family = pb_utils.MetricFamily("calls", "how many", pb_utils.MetricFamily.COUNTER)
                self.calls = family.Metric(labels={"of": "m"})
            def execute(self, requests):
                self.calls.increment(2)
                try:
                    self.calls.set(0)
                except pb_utils.TritonModelException as error:
                    rejected = str(error)
                return [answer(np.array([f"{self.calls.value()} {rejected}"], dtype=object))]
        """,
        PROCESS,
    )
    assert models.infer("m", floats(1)).array[0].decode() == (
        "2.0 Failed to set metric value: Failed to process the request for model 'm_0', message: "
        "TRITONSERVER_METRIC_KIND_COUNTER does not support Set"
    )
    assert 'calls{of="m"} 2.0' in generate_latest(models.metrics.registry).decode()
    models.stop("m")
    assert "calls{" not in generate_latest(models.metrics.registry).decode()


def test_its_is_ready_decides_readiness(models):
    models.add(
        "m",
        """
        class TritonPythonModel:
            executed = False
            async def is_ready(self):
                return self.executed
            def execute(self, requests):
                self.executed = True
                return [answer(np.array([pb_utils.is_model_ready("m")]))]
        """,
        PROCESS,
    )
    assert not models.is_ready("m")
    assert models.infer("m", floats(1)).array
    assert models.is_ready("m")


ECHO = """
    class TritonPythonModel:
        def execute(self, requests):
            return [answer(tensor(request).as_numpy()) for request in requests]
"""


def test_an_undeliverable_response_does_not_affect_other_requests(models, caplog):
    models.add("m", ECHO, PROCESS)

    def reject(response, final):
        raise ValueError("no room")

    request = InferenceRequest(model_name="m", inputs={"X": Tensor("X", floats(1))})
    models.submit(Inference(request=request, on_response=reject))
    assert models.infer("m", floats(2)).array == [2]
    assert "no room" in caplog.text


def test_a_failure_of_the_server_reaches_the_model(models):
    class Broken:
        def load(self, name, *, config, files):
            raise OSError("disk is full")

    models.load = Broken().load
    models.add(
        "m",
        """
        class TritonPythonModel:
            def execute(self, requests):
                try:
                    pb_utils.load_model("other")
                except pb_utils.TritonModelException as error:
                    return [answer(np.array([str(error)], dtype=object))]
        """,
        PROCESS,
    )
    assert b"message: OSError: disk is full" in models.infer("m", floats(1)).array[0]


def test_requests_of_a_failed_batch_are_removed_in_both_processes(models):
    models.add(
        "m",
        """
        import gc
        class TritonPythonModel:
            def execute(self, requests):
                if tensor(requests[0]).as_numpy()[0]:
                    raise ValueError("boom")
                gc.collect()
                return [answer(np.array([sum(type(o).__name__ == "Inference" for o in gc.get_objects())]))]
        """,
        PROCESS,
    )
    sent = floats(1)
    kept = weakref.ref(sent)
    assert models.infer("m", sent).error
    del sent
    assert models.infer("m", floats(0)).array == [1]
    gc.collect()
    assert kept() is None


def started(models, source, *, arguments, **limits):
    folder = models.write("m", source)
    setup = ModelSetup(path=folder / "model.py", folders=(folder,), arguments=arguments, iterative=False)
    return ModelProcess(setup, context=ModelContext(model="m", instance="m_0", folder=folder), **limits)


def test_a_model_may_be_closed_while_its_process_is_restarted(models):
    starts, go_on = threading.Semaphore(0), threading.Event()

    class Arguments(dict):
        def __reduce__(self):  # called as the process is started
            starts.release()
            go_on.wait(20)
            return dict, ()

    source = """
    import os
    class TritonPythonModel:
        def execute(self, requests):
            os._exit(3)
    """
    go_on.set()
    model = started(models, source, arguments=Arguments())
    starts.acquire()
    go_on.clear()
    request = InferenceRequest(model_name="m", inputs={})
    with pytest.raises(InferenceError, match="is not healthy"):
        model.execute([Inference(request=request, on_response=lambda response, final: None)])
    starts.acquire()
    closing = threading.Thread(target=model.close, daemon=True)
    closing.start()
    go_on.set()
    closing.join(20)
    assert not closing.is_alive()
    assert not multiprocessing.active_children()


def test_a_process_that_does_not_end_is_killed(models):
    source = """
    import signal
    class TritonPythonModel:
        def initialize(self, args):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        def finalize(self):
            threading.Event().wait()
    """
    model = started(models, source, arguments={}, close_timeout_s=0)
    [process] = multiprocessing.active_children()
    model.close()
    assert not process.is_alive()


def test_a_dead_process_is_detected_even_if_its_child_lives(models):
    models.add(
        "m",
        """
        import os, time
        class TritonPythonModel:
            def execute(self, requests):
                if not os.fork():
                    while not os.path.exists(pb_utils.get_model_dir() + "/end"):
                        time.sleep(0.01)
                os._exit(3)
        """,
        PROCESS,
    )
    try:
        assert models.infer("m", floats(1)).error.message == "Stub process 'm_0' is not healthy."
    finally:
        (models.root / "m" / "1" / "end").touch()


@pytest.mark.parametrize("signal_name", ["SIGINT", "SIGHUP"])
def test_a_terminals_signals_do_not_end_the_process(models, signal_name):
    models.add("m", ECHO, PROCESS)
    [process] = multiprocessing.active_children()
    os.kill(process.pid, getattr(signal, signal_name))
    assert models.infer("m", floats(1)).array == [1]


@pytest.fixture
def stopped(models):
    """A model of a process that is stopped, so that it reads nothing."""
    models.exit_timeout_s = 0
    models.add("m", ECHO, PROCESS)
    [process] = multiprocessing.active_children()
    os.kill(process.pid, signal.SIGSTOP)
    yield process
    process.kill()


def test_cancelling_does_not_block_on_a_process_that_does_not_read(models, stopped):
    answer = models.infer("m", np.zeros(2**22, np.float32))  # more than a pipe holds
    wait_until(lambda: answer.inference.started_ns)
    cancelling = threading.Thread(target=answer.inference.cancel, daemon=True)
    cancelling.start()
    cancelling.join(20)
    assert not cancelling.is_alive()
    stopped.kill()
    assert "is not healthy" in answer.error.message


def test_a_process_with_an_endless_batch_is_killed_when_its_model_is_unloaded(models, stopped, caplog):
    answer = models.infer("m", np.zeros(2**22, np.float32))
    wait_until(lambda: answer.inference.started_ns)
    models.stop("m")
    assert not stopped.is_alive()
    assert "is not healthy" in answer.error.message
    assert "the process of m_0 does not finish its batch and is killed" in caplog.text
    assert "abandoned" not in caplog.text


def test_a_process_that_ends_in_time_is_not_killed_even_if_many_threads_wait(models, caplog):
    model = started(models, ECHO, arguments={})
    closing = [threading.Thread(target=model.close) for _ in range(16)]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join()
    assert "killed" not in caplog.text
