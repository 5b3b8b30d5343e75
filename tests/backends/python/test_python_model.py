from __future__ import annotations

import asyncio
import gc
import json
import logging
import re
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch

from genserve.backends.python.python_model import EventLoop
from genserve.errors import InferenceError, Status
from genserve.tensor import DataType, Tensor
from tests.backends.python.models import DECOUPLED, declared, floats
from tests.support.live_server import wait_until

IDENTITY = """
    class TritonPythonModel:
        def execute(self, requests):
            return [answer(tensor(request).as_numpy()) for request in requests]
"""


def executing(body):
    lines = "".join(f"\n            {line}" for line in body.splitlines())
    return f"""
    class TritonPythonModel:
        def execute(self, requests):
            request = requests[0]{lines}
    """


def failure(models, body, config=""):
    models.add("m", executing(body), config)
    error = models.infer("m", floats(1)).error
    assert isinstance(error, InferenceError)
    return error


def test_the_input_array_is_not_copied(models):
    models.add("m", IDENTITY)
    x = floats(1, 2)
    assert models.infer("m", x).array.ctypes.data == x.ctypes.data


def test_initialize_gets_the_instance_in_strings(models):
    models.add(
        "m",
        """
        class TritonPythonModel:
            def initialize(self, args):
                self.args = args
            def execute(self, requests):
                return [answer(np.array([json.dumps(self.args)], dtype=object))]
            """,
        'parameters { key: "a" value { string_value: "b" } }',
    )
    args = json.loads(models.infer("m", floats(1)).array[0])
    config = json.loads(args.pop("model_config"))
    assert args == {
        "model_instance_kind": "CPU",
        "model_instance_name": "m_0",
        "model_instance_device_id": "0",
        "model_repository": str(models.root / "m"),
        "model_version": "1",
        "model_name": "m",
    }
    assert config["parameters"] == {"a": {"string_value": "b"}}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("return 'x'", "Expected a list in the execute return, found type '<class 'str'>'."),
        (
            "return [3]",
            "Expected an 'InferenceResponse' object in the execute function return list, found type "
            "'<class 'int'>'.",
        ),
        (
            "return []",
            "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
            "InferenceRequest(s) size is:1, and InferenceResponse(s) size is:0\n",
        ),
        ("return None", "execute has left a request unanswered."),
        ("return [None]", "execute has left a request unanswered."),
        (
            "request.get_response_sender().send(answer(floats))\nreturn [answer(floats)]".replace(
                "floats", "np.zeros(1)"
            ),
            "Unable to send response. Non-decoupled model cannot send more than one response.",
        ),
        (
            "request.set_release_flags(2)\nreturn [answer(np.zeros(1))]",
            "Expected a None object in the execute function return list for reschduled request, found type "
            "'<class 'genserve.backends.python.pb_utils.pb_response.InferenceResponse'>'.",
        ),
    ],
)
def test_a_contract_violation_is_an_error_in_tritons_words(models, body, text):
    error = failure(models, body)
    assert error.message == f"Failed to process the request(s) for model 'm_0', message: {text}"
    assert error.status is Status.INTERNAL


def test_an_exception_is_reported_with_its_position(models):
    error = failure(models, "raise ValueError('boom')")
    path = models.root / "m" / "1" / "model.py"
    line = path.read_text().splitlines().index("        raise ValueError('boom')") + 1
    assert error.message == (
        "Failed to process the request(s) for model 'm_0', message: ValueError: boom\n\n"
        f"At:\n  {path}({line}): execute\n"
    )


def test_tracebacks_begin_with_the_innermost_frame_and_omit_genserve(models):
    models.add(
        "m",
        executing("import helper\nhelper.make(pb_utils)"),
        **{"helper.py": "def make(pb_utils):\n    pb_utils.Tensor('', None)"},
    )
    text = models.infer("m", floats(1)).error.message
    assert "message: TritonModelException: Tensor name cannot be an empty string.\n\nAt:\n" in text
    assert [line.rsplit(" ")[-1] for line in text.splitlines()[-2:]] == ["make", "execute"]


def test_an_exception_without_text_and_an_exit_are_failures(models):
    assert "message: ValueError: <EMPTY MESSAGE>\n" in failure(models, "raise ValueError").message
    models.stop("m")
    assert "message: SystemExit: 3\n" in failure(models, "raise SystemExit(3)").message
    assert models.instances("m").ready


def test_an_error_has_the_code_of_the_model(models):
    body = (
        "error = pb_utils.TritonError('no', pb_utils.TritonError.NOT_FOUND)\n"
        "return [pb_utils.InferenceResponse(error=error)]"
    )
    error = failure(models, body)
    assert (error.message, error.status) == ("no", Status.NOT_FOUND)


def test_outputs_that_were_not_requested_are_dropped(models):
    tensors = "[pb_utils.Tensor(name, np.zeros(1)) for name in ('Y', 'Z', 'UNDECLARED')]"
    models.add("m", executing(f"return [pb_utils.InferenceResponse({tensors})]"), declared("Y", "Z"))
    for asked, got in [((), ["Y", "Z"]), (("Z",), ["Z"]), (("N",), [])]:
        [response] = models.infer("m", floats(1), requested_outputs=asked).wait().responses
        assert [tensor.name for tensor in response.outputs] == got


def test_a_request_without_output_names_gets_all_outputs(models):
    body = "return [answer(np.array([json.dumps(sorted(request.requested_output_names()))], dtype=object))]"
    models.add("m", executing(body), declared("Y", "Z"))
    assert json.loads(models.infer("m", floats(1)).array[0]) == ["Y", "Z"]


def test_a_request_shows_all_fields(models):
    models.add(
        "m",
        executing(
            "shown = [request.request_id(), request.correlation_id(), request.flags(), request.timeout(),"
            " json.loads(request.parameters()), sorted(request.requested_output_names()),"
            " request.trace().get_context(), request.is_cancelled(), tensor(request, 'N') is None]\n"
            "return [answer(np.array([json.dumps(shown)], dtype=object))]"
        ),
    )
    answer = models.infer(
        "m",
        floats(1),
        id="7",
        correlation_id="s",
        flags=3,
        timeout_us=9,
        parameters={"a": True, "b": "c"},
        requested_outputs=("Y",),
    )
    assert json.loads(answer.array[0]) == ["7", "s", 3, 9, {"a": True, "b": "c"}, ["Y"], None, False, True]


def test_parameters_are_json_without_spaces(models):
    models.add("m", executing("return [answer(np.array([request.parameters()], dtype=object))]"))
    assert models.infer("m", floats(1), parameters={"a": 1, "é": "ü"}).array[0] == '{"a":1,"é":"ü"}'.encode()
    assert models.infer("m", floats(1)).array[0] == b"{}"


def test_a_response_has_the_parameters_of_the_model(models):
    models.add("m", executing("return [pb_utils.InferenceResponse([], parameters={'a': 1})]"))
    [response] = models.infer("m", floats(1)).wait().responses
    assert response.parameters == {"a": 1}


def test_a_read_only_input_can_be_written(models):
    models.add(
        "m", executing("x = tensor(request).as_numpy()\nx += 1\nreturn [answer(tensor(request).as_numpy())]")
    )
    x = floats(1)
    x.flags.writeable = False
    assert models.infer("m", x).array == [2]
    assert x == [1]


def test_a_decoupled_model_answers_many_times_from_another_thread(models):
    models.add(
        "m",
        """
        class TritonPythonModel:
            def execute(self, requests):
                for request in requests:
                    threading.Thread(target=self.answer, args=[request.get_response_sender()]).start()
            def answer(self, sender):
                for number in range(3):
                    sender.send(answer(np.array([number])))
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        """,
        DECOUPLED,
    )
    assert [int(array[0]) for array in models.infer("m", floats(1)).arrays] == [0, 1, 2]


def test_a_decoupled_model_must_return_none(models):
    text = "Python model 'm_0' is using the decoupled mode and the execute function must return None."
    assert text in failure(models, "return [answer(np.zeros(1))]", DECOUPLED).message


def test_a_model_that_is_not_decoupled_may_use_a_sender_once(models):
    models.add(
        "m",
        executing(
            "sender = request.get_response_sender()\n"
            "texts = []\n"
            "for arguments in [{}, {'flags': 7}, {'flags': 1}]:\n"
            "    try:\n"
            "        sender.send(**arguments)\n"
            "    except pb_utils.TritonModelException as error:\n"
            "        texts.append(str(error))\n"
            "sender.send(answer(np.array(texts, dtype=object)))\n"
            "for arguments in [{'response': answer(np.zeros(1))}, {'flags': 1}, {'flags': 1}]:\n"
            "    try:\n"
            "        sender.send(**arguments)\n"
            "    except pb_utils.TritonModelException as error:\n"
            "        self.later = getattr(self, 'later', []) + [str(error)]\n"
            "pb_utils.Logger.log_info(json.dumps(self.later))\n"
            "return [None]"
        ),
    )
    array = models.infer("m", floats(1)).array
    assert array.tolist() == [
        b"Inference Response object must be provided when the response flags is set to zero.",
        b"Unable to send response. Unsupported flag provided.",
        b"Unable to send response. Non-decoupled model cannot send complete final before sending a response.",
    ]


def test_a_closed_sender_raises(models, caplog):
    caplog.set_level(logging.INFO)
    models.add(
        "m",
        executing(
            "sender = request.get_response_sender()\n"
            "sender.send(flags=1)\n"
            "try:\n"
            "    sender.send(answer(np.zeros(1)))\n"
            "except pb_utils.TritonModelException as error:\n"
            "    pb_utils.Logger.log_warn(str(error))"
        ),
        DECOUPLED,
    )
    assert models.infer("m", floats(1)).wait().responses == []
    models.stop("m")
    [record] = [record for record in caplog.records if record.name == "genserve.models.m"]
    assert record.message == "Unable to send response. Response sender has been closed."
    assert record.levelno == logging.WARNING


@pytest.mark.parametrize("config", ["", DECOUPLED])
def test_a_dropped_sender_ends_the_request(models, config):
    error = failure(models, "request.get_response_sender()\nreturn None", config)
    assert error.message == "model 'm' dropped the request without a response"


def test_a_sender_dropped_after_a_response_ends_without_an_error(models):
    models.add("m", executing("request.get_response_sender().send(answer(np.ones(1)))"), DECOUPLED)
    assert models.infer("m", floats(1)).array == [1]


def test_an_exception_after_some_responses_ends_the_request(models):
    body = "request.get_response_sender().send(answer(np.ones(1)))\nraise ValueError('late')"
    models.add("m", executing(body), DECOUPLED)
    first, second = models.infer("m", floats(1)).wait().responses
    assert first.error is None
    assert "ValueError: late" in second.error.message


def test_an_async_execute_is_awaited(models):
    models.add(
        "m",
        """
        class TritonPythonModel:
            async def execute(self, requests):
                await asyncio.sleep(0)
                return [answer(tensor(request).as_numpy()) for request in requests]
        """,
    )
    assert models.infer("m", floats(5)).array == [5]


def test_an_async_execute_that_raises_fails_its_requests(models):
    models.add(
        "m", "class TritonPythonModel:\n    async def execute(self, requests):\n        raise ValueError('a')"
    )
    text = models.infer("m", floats(5)).error.message
    assert text.startswith(
        "Failed to process the request(s) for model 'm_0', message: ValueError: a\n\nAt:\n"
    )
    assert text.endswith("): execute\n")


DECOUPLED_ASYNC = """
    class TritonPythonModel:
        def initialize(self, args):
            self.met = None
        async def execute(self, requests):
            if self.met is None:
                self.met = asyncio.Event()
                await self.met.wait()
            else:
                self.met.set()
            for request in requests:
                request.get_response_sender().send(answer(tensor(request).as_numpy()), flags=1)
"""


def test_decoupled_async_executes_run_concurrently(models):
    models.add("m", DECOUPLED_ASYNC, DECOUPLED)
    first = models.infer("m", floats(1))
    assert models.infer("m", floats(2)).array == [2]
    assert first.array == [1]


def test_a_decoupled_async_execute_that_raises_fails_its_requests(models):
    models.add(
        "m",
        "class TritonPythonModel:\n    async def execute(self, requests):\n        raise ValueError('a')",
        DECOUPLED,
    )
    assert "ValueError: a" in models.infer("m", floats(5)).error.message


def test_a_model_sees_a_cancellation(models):
    models.add(
        "m",
        """
        class TritonPythonModel:
            def execute(self, requests):
                [request] = requests
                sender = request.get_response_sender()
                sender.send(answer(np.zeros(1)))
                while not request.is_cancelled():
                    time.sleep(0.001)
                sender.send(answer(np.array([sender.is_cancelled()])), flags=1)
        """,
        DECOUPLED,
    )
    answer = models.infer("m", floats(1))
    wait_until(lambda: answer.responses)
    answer.inference.cancel()
    assert answer.arrays[1] == [True]


ITERATIVE = """
    max_batch_size: 2
    sequence_batching { iterative_sequence: true oldest { max_candidate_sequences: 4 } }
    model_transaction_policy { decoupled: true }
"""
COUNTS = """
    class TritonPythonModel:
        def initialize(self, args):
            self.left = {}
        def execute(self, requests):
            for request in requests:
                id = request.request_id()
                self.left.setdefault(id, int(tensor(request).as_numpy()[0, 0]))
                self.left[id] -= 1
                sender = request.get_response_sender()
                sender.send(answer(np.array([[self.left[id], request.flags()]])))
                if self.left[id]:
                    request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                else:
                    sender.send(flags=1)
"""


@pytest.mark.parametrize("execution", ["thread", "process"])
def test_a_request_is_rescheduled_until_it_ends(models, execution):
    parameter = f'parameters {{ key: "EXECUTION" value {{ string_value: "{execution}" }} }}'
    models.add("m", COUNTS, ITERATIVE + parameter)
    answers = [models.infer("m", floats(3)[None], id=name) for name in "ab"]
    for answer in answers:
        assert [array[0].tolist() for array in answer.arrays] == [[2, 1], [1, 0], [0, 0]]  # START once


def test_rescheduling_is_rejected_if_the_model_is_not_iterative(models):
    error = failure(
        models, "request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)\nreturn None"
    )
    assert error.message == (
        "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not configured "
        "to handle such a flag."
    )


def test_a_model_without_execute_is_an_error(models):
    models.add("m", "class TritonPythonModel: pass")
    path = models.root / "m" / "1" / "model.py"
    text = f"message: Python model {path} does not implement `execute` method."
    assert models.infer("m", floats(1)).error.message.endswith(text)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("import nothere", "ModuleNotFoundError: No module named 'nothere'\n\nAt:\n  {path}(19): <module>\n"),
        ("x = 1", "AttributeError: module '1.model' has no attribute 'TritonPythonModel'"),
        (
            "class TritonPythonModel:\n    def initialize(self, args):\n        raise ValueError('none')",
            "ValueError: none\n\nAt:\n  {path}(21): initialize\n",
        ),
    ],
)
def test_a_failed_load_has_the_reason_and_the_position(models, source, text):
    with pytest.raises(InferenceError) as raised:
        models.add("m", source)
    assert raised.value.message == text.format(path=models.root / "m" / "1" / "model.py")
    assert raised.value.status is Status.INTERNAL


def test_a_syntax_error_is_reported_without_a_traceback(models):
    with pytest.raises(InferenceError) as raised:
        models.add("m", "def f(:")
    assert re.fullmatch(r"SyntaxError: .*\(model.py, line \d+\)", raised.value.message)


@pytest.mark.parametrize(
    ("source", "remedy"),
    [
        ("def f(:", "correct line 19 of {path}"),
        (
            "import nothere",
            f"install the package of 'nothere' into {sys.prefix}, or put the module into the model's folder",
        ),
        ("x = 1", "define `class TritonPythonModel` in {path}"),
        ("raise ValueError('none')", ""),
    ],
)
def test_a_failed_load_has_a_remedy(models, source, remedy):
    with pytest.raises(InferenceError) as raised:
        models.add("m", source)
    assert raised.value.remedy == remedy.format(path=models.root / "m" / "1" / "model.py")


def test_a_missing_file_is_named(models):
    path = models.write("m", "") / "model.py"
    path.unlink()
    with pytest.raises(InferenceError) as raised:
        models.start("m")
    assert raised.value.message == f"Python model file not found in '{path}'"


def test_each_instance_has_its_own_modules_and_thread(models):
    models.add(
        "m",
        """
        import threading
        instances = []
        class TritonPythonModel:
            def initialize(self, args):
                instances.append(args["model_instance_name"])
                self.thread = threading.get_ident()
            def execute(self, requests):
                assert threading.get_ident() == self.thread
                return [answer(np.array(instances, dtype=object)) for _ in requests]
            def finalize(self):
                assert threading.get_ident() == self.thread
        """,
        "instance_group [{ count: 2 kind: KIND_CPU }]",
    )
    seen = {tuple(models.infer("m", floats(1)).array) for _ in range(4)}
    assert seen <= {(b"m_0_0",), (b"m_0_1",)}


def test_finalize_is_called_and_its_failure_is_logged(models, caplog):
    models.add(
        "m",
        """
        class TritonPythonModel:
            def execute(self, requests): pass
            def finalize(self):
                raise ValueError("at the end")
        """,
    )
    models.stop("m")
    assert "ValueError: at the end" in caplog.text


@pytest.mark.parametrize(
    ("method", "ready"),
    [
        ("def is_ready(self): return True", True),
        ("def is_ready(self): return False", False),
        ("async def is_ready(self): return True", True),
        ("def is_ready(self): raise ValueError", False),
        ("def is_ready(self): return 1", False),
        ("is_ready = property(lambda self: 1 / 0)", False),
    ],
)
def test_a_model_may_implement_is_ready(models, method, ready):
    models.add("m", f"class TritonPythonModel:\n    {method}\n    def execute(self, requests): pass")
    assert models.is_ready("m") is ready


def test_the_thread_of_an_instance_has_an_event_loop(models):
    body = (
        "value = asyncio.get_event_loop().run_until_complete(asyncio.sleep(0, 4))\n"
        "return [answer(np.array([value]))]"
    )
    models.add("m", executing(body))
    assert [models.infer("m", floats(1)).array[0] for _ in range(2)] == [4, 4]


def test_inputs_on_a_device_are_copied_to_the_cpu_unless_configured_otherwise(models):
    class OnDevice:
        """A tensor that reports the memory of a GPU."""

        def __init__(self, tensor):
            self.tensor, self.shape = tensor, tuple(tensor.shape)

        def __dlpack__(self, **options):
            return self.tensor.__dlpack__(**options)

        def __dlpack_device__(self):
            return (2 if sys._getframe(1).f_code.co_name == "is_cpu" else 1, 0)

    config = 'parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "no" } }'
    tensors = {"X": Tensor("X", OnDevice(torch.ones(2)), data_type=DataType.FP32)}
    for name, config_text in (("yes", ""), ("no", config)):
        models.add(name, executing("return [answer(np.array([tensor(request).is_cpu()]))]"), config_text)
    assert models.infer("yes", inputs=tensors).array == [True]
    assert models.infer("no", inputs=tensors).array == [False]


def test_a_model_on_two_threads_logs_under_its_own_name(models, caplog):
    caplog.set_level(logging.DEBUG, "genserve")
    models.add(
        "m",
        executing(
            "log = lambda: pb_utils.Logger.log_verbose(pb_utils.get_model_dir())\n"
            "thread = threading.Thread(target=log)\n"
            "thread.start()\nthread.join()\nreturn [answer(np.zeros(1))]"
        ),
    )
    models.infer("m", floats(1)).wait()
    [record] = [record for record in caplog.records if record.name == "genserve.models.m"]
    assert record.message == str(models.root / "m" / "1")
    assert record.levelno == logging.DEBUG
    assert record.filename == "model.py"


def test_no_thread_is_left_behind(models):
    models.add("m", DECOUPLED_ASYNC, DECOUPLED)
    models.infer("m", floats(1))
    models.infer("m", floats(1)).wait()
    models.stop("m")
    assert not [thread for thread in threading.enumerate() if thread.name.endswith("-m_0")]


def test_concurrent_readiness_checks_share_an_event_loop(models):
    source = """
    class TritonPythonModel:
        async def is_ready(self):
            self.threads = getattr(self, "threads", set()) | {threading.get_ident()}
            return len(self.threads) == 1
    """
    models.add("m", source)
    at_once = threading.Barrier(8)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: at_once.wait() >= 0 and models.is_ready("m"), range(8)))
    assert all(answers)
    models.stop("m")
    assert not [thread for thread in threading.enumerate() if thread.name.endswith("-m_0")]


def test_objects_of_a_model_are_freed_when_it_is_unloaded(models):
    source = """
    class TritonPythonModel:
        def initialize(self, args):
            self.weights = np.zeros(1)
        async def execute(self, requests):
            return [answer(self.weights) for request in requests]
    """
    models.add("m", source)
    weights = weakref.ref(models.infer("m", floats(1)).array)
    assert weights() is not None
    models.stop("m")
    gc.collect()
    assert weights() is None


def test_a_coroutine_that_ignores_its_cancellation_does_not_block_close(caplog):
    started, end = threading.Event(), threading.Event()

    async def reject():
        while not end.is_set():
            started.set()
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    loop = EventLoop("m_0", close_timeout_s=0)
    loop.submit(reject())
    assert started.wait(10)
    loop.close()
    assert "asyncio-m_0: a coroutine does not react to its cancellation" in caplog.text
    [thread] = [thread for thread in threading.enumerate() if thread.name == "asyncio-m_0"]
    end.set()
    thread.join()
