from __future__ import annotations

import time

import pytest

from genserve.backends.python.model_context import RunningBatch
from genserve.errors import InferenceError, Status
from genserve.inference import Inference, InferenceRequest, common_share
from genserve.request_context import NO_KEY, KeyShare
from genserve.tensor import Tensor
from tests.backends.python.models import DECOUPLED, Answer, declared, floats
from tests.backends.python.test_stub import PROCESS
from tests.support.live_server import wait_until

TWO = "instance_group [{ count: 2 kind: KIND_CPU }]"

DOUBLE = """
    class TritonPythonModel:
        def execute(self, requests):
            return [answer(tensor(request).as_numpy() * 2) for request in requests]
"""
REPEAT = """
    class TritonPythonModel:
        def execute(self, requests):
            for request in requests:
                sender = request.get_response_sender()
                for number in range(int(tensor(request).as_numpy()[0])):
                    sender.send(answer(np.array([number])))
                sender.send(flags=1)
"""


def calling(body, kind="def"):
    """A model whose `call` has this body and returns text."""
    lines = "".join(f"\n            {line}" for line in body.splitlines())
    wait = "await " if kind == "async def" else ""
    return f"""
    class TritonPythonModel:
        {kind} call(self, x):{lines}
        {kind} execute(self, requests):
            shown = [repr({wait}self.call(tensor(request))) for request in requests]
            return [answer(np.array([text], dtype=object)) for text in shown]
    """


def shown(models, body, kind="def"):
    models.add("caller", calling(body, kind))
    return models.infer("caller", floats(3)).array[0].decode()


def test_a_tensor_is_passed_to_the_target_and_back_by_pointer(models):
    models.add(
        "target",
        """
        class TritonPythonModel:
            def execute(self, requests):
                [request] = requests
                self.made = tensor(request).as_numpy() * 2
                pointers = np.array([tensor(request).as_numpy().ctypes.data, self.made.ctypes.data])
                return [pb_utils.InferenceResponse(
                    [pb_utils.Tensor("Y", self.made), pb_utils.Tensor("P", pointers)])]
        """,
        declared("Y", "P"),
    )
    body = """\
sent = np.arange(5, dtype=np.float32)
y, pointers = ask("target", pb_utils.Tensor("X", sent), outputs=[]).exec().output_tensors()
return [sent.ctypes.data, y.as_numpy().ctypes.data] == pointers.as_numpy().tolist()"""
    assert shown(models, body) == "True"


def test_tensors_of_a_call_are_freed_without_garbage_collection(models):
    models.add("double", DOUBLE)
    body = """\
import gc, weakref
sent = np.arange(5, dtype=np.float32)
held = weakref.ref(sent)
gc.disable()
try:
    for array in (sent, np.zeros(1, np.float32)):  # the second one makes the instance drop the first
        assert not ask("double", pb_utils.Tensor("X", array)).exec().has_error()
    del sent, array
    return held() is None
finally:
    gc.enable()"""
    assert shown(models, body) == "True"


def test_all_fields_of_a_request_reach_the_target(models):
    models.add(
        "target",
        """
        class TritonPythonModel:
            def execute(self, requests):
                [r] = requests
                seen = [r.request_id(), r.correlation_id(), r.flags(), r.timeout(), r.parameters()]
                return [answer(np.array([repr(seen)], dtype=object))]
        """,
    )
    body = """\
request = ask("target", x, request_id="7", correlation_id="s", flags=1, timeout=9, parameters={"a": True})
request.set_flags(2)
return request.exec().output_tensors()[0].as_numpy()[0].decode()"""
    assert shown(models, body) == repr("""['7', 's', 2, 9, '{"a":true}']""")


@pytest.mark.parametrize("config", ["", PROCESS])
def test_a_call_is_for_the_key_of_the_batch(models, config):
    models.add("double", DOUBLE)
    models.add("caller", calling("return ask('double', x).exec().has_error()"), config)
    shares = []
    submit = models.submit

    def submitted(inference):
        shares.append(inference.share)
        submit(inference)

    models.submit = submitted
    answers = [Answer(), Answer()]
    keys = KeyShare("alice"), KeyShare("bob", 3.0)
    for answer, key in zip(answers, keys, strict=True):
        asked = InferenceRequest(model_name="caller", inputs={"X": Tensor("X", floats(3))})
        answer.inference = Inference(request=asked, on_response=answer.receive, share=key)
        models.submit(answer.inference)
        assert answer.array[0].decode() == "False"
    assert shares == [keys[0], keys[0], keys[1], keys[1]]


def test_the_calls_of_a_batch_of_several_keys_have_none():
    asked = InferenceRequest(model_name="m", inputs={})
    names = ("alice", "alice", "bob")
    batch = [Inference(request=asked, on_response=print, share=KeyShare(name)) for name in names]
    for inferences, expected in ((batch[:2], KeyShare("alice")), (batch, NO_KEY), ([], NO_KEY)):
        assert common_share(inferences) == expected


FAILURES = [
    ("'nothing', x", "Model nothing - Error when running inference: Failed for execute the inference "
     "request. Model 'nothing' is not ready.", "NOT_FOUND"),
    ("'target', x, model_version=7", "Model target - Error when running inference: Failed for execute the "
     "inference request. Model 'target' is not ready.", "NOT_FOUND"),
    ("'repeat', x", "Model repeat - Error when running inference: Model repeat is using the decoupled. The "
     "current BLS request call doesn't support models using the decoupled transaction policy. Please use "
     "'decoupled=True' argument to the 'exec' or 'async_exec' calls for decoupled models.'", "INTERNAL"),
    ("'rejects', x", "not today", "UNAVAILABLE"),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "text", "code"), FAILURES)
@pytest.mark.parametrize(
    "call", ["ask({}).exec()", "asyncio.run(later({}))", "next(iter(ask({}).exec(decoupled=True)))"]
)
def test_a_failure_is_a_response_with_its_code(models, asked, text, code, call):
    models.add("target", DOUBLE)
    models.add("repeat", REPEAT, DECOUPLED)
    models.add(
        "rejects",
        """
        class TritonPythonModel:
            def execute(self, requests):
                error = pb_utils.TritonError("not today", pb_utils.TritonError.UNAVAILABLE)
                return [pb_utils.InferenceResponse(error=error)]
        """,
    )
    if "decoupled=True" in call and "repeat" in asked:
        return
    body = f"""\
async def later(*args, **fields):
    return await ask(*args, **fields).async_exec()
response = {call.format(asked)}
return (response.has_error(), response.error().message(), response.error().code().name)"""
    assert shown(models, body) == repr((True, text, code))


def test_an_exception_of_the_target_is_in_the_response(models):
    models.add(
        "target", "class TritonPythonModel:\n    def execute(self, requests):\n        raise ValueError('b')"
    )
    text = shown(models, "return ask('target', x).exec().error().message()")
    assert "Failed to process the request(s) for model 'target_0', message: ValueError: b\\n\\nAt:" in text


def test_async_calls_run_concurrently(models):
    models.add("target", DOUBLE, TWO)
    body = """\
async def both():
    requests = [ask("target", pb_utils.Tensor("X", np.array([n], np.float32))) for n in (1, 2)]
    responses = await asyncio.gather(*[request.async_exec() for request in requests])
    return [float(response.output_tensors()[0].as_numpy()[0]) for response in responses]
return asyncio.run(both())"""
    assert shown(models, body) == "[2.0, 4.0]"


def test_an_answered_async_call_is_not_checked_for_deadlock(models):
    models.add("target", DOUBLE)
    body = """\
looks = []
class Loop(asyncio.SelectorEventLoop):
    def call_later(self, *args, **fields):
        looks.append(super().call_later(*args, **fields))
        return looks[-1]
async def later(**fields):
    await ask("target", x).async_exec(**fields)
for fields in ({}, {"decoupled": True}):
    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(later(**fields))
return [look.cancelled() for look in looks]"""
    assert shown(models, body) == "[True, True]"


def test_an_async_execute_awaits_its_calls(models):
    models.add("target", DOUBLE)
    body = "return float((await ask('target', x).async_exec()).output_tensors()[0].as_numpy()[0])"
    assert shown(models, body, "async def") == "6.0"


def test_a_decoupled_target_is_iterated(models):
    models.add("target", REPEAT, DECOUPLED)
    body = """\
numbers = lambda responses: [r.output_tensors()[0].as_numpy().item() for r in responses if r.output_tensors()]
responses = ask("target", x).exec(decoupled=True)
first = [(len(r.output_tensors()), r.has_error()) for r in responses]
async def later():
    return numbers(await ask("target", x).async_exec(decoupled=True))
return first, numbers(responses), asyncio.run(later())"""
    # One at the end is empty, since the target ends the request separately.
    assert shown(models, body) == repr(([(1, False)] * 3 + [(0, False)], [0, 1, 2], [0, 1, 2]))


def test_a_target_that_is_not_decoupled_is_iterated(models):
    models.add("target", DOUBLE)
    body = "return [len(r.output_tensors()) for r in ask('target', x).exec(decoupled=True)]"
    assert shown(models, body) == "[1]"


def test_an_iterator_that_is_cancelled_cancels_the_request(models):
    models.add(
        "target",
        """
        class TritonPythonModel:
            def execute(self, requests):
                [request] = requests
                sender = request.get_response_sender()
                sender.send(answer(np.zeros(1)))
                while not request.is_cancelled():
                    time.sleep(0.001)
                sender.send(flags=1)
        """,
        DECOUPLED,
    )
    body = """\
responses = ask("target", x).exec(decoupled=True)
next(responses)
responses.cancel()
return len(list(responses))"""
    assert shown(models, body) == "1"


def test_calls_from_threads_of_the_model_are_answered(models):
    models.add("target", DOUBLE)
    body = """\
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as pool:
    made = [ask("target", x) for _ in range(8)]
    responses = list(pool.map(lambda request: request.exec(), made))
    responses += list(pool.map(lambda _: ask("target", x).exec(), range(8)))
return {float(response.output_tensors()[0].as_numpy()[0]) for response in responses}"""
    assert shown(models, body) == "{6.0}"


def test_calls_are_rejected_before_and_after_execute(models):
    models.add("target", DOUBLE)
    source = """
        messages = []
        class TritonPythonModel:
            def initialize(self, args):
                self.call()
            def call(self):
                try:
                    ask("target", pb_utils.Tensor("X", np.zeros(1, np.float32))).exec()
                except pb_utils.TritonModelException as error:
                    with open(pb_utils.get_model_dir() + "/messages", "a") as file:
                        file.write(str(error) + "\\n")
            def execute(self, requests):
                return [answer(np.zeros(1)) for _ in requests]
            def finalize(self):
                self.call()
    """
    models.add("caller", source)
    models.stop("caller")
    messages = (models.root / "caller" / "1" / "messages").read_text().splitlines()
    assert messages == ["BLS is only supported during the 'execute' function."] * 2


RECURSE = """
    class TritonPythonModel:
        def execute(self, requests):
            return [self.answer(request) for request in requests]
        def answer(self, request):
            depth = int(tensor(request).as_numpy()[0])
            if depth == 0:
                return answer(np.zeros(1))
            response = ask({target!r}, pb_utils.Tensor("X", np.array([depth - 1], np.float32))).exec()
            if response.has_error():
                return pb_utils.InferenceResponse(error=response.error())
            return answer(response.output_tensors()[0].as_numpy() + 1)
"""
NO_INSTANCE = "deadlock: every instance that could run the request waits"


def fails_fast(*answers):
    started_s = time.monotonic()
    errors = [answer.error for answer in answers]
    assert time.monotonic() - started_s < 10  # not a measure: the alternative is for ever
    return errors


def test_a_model_that_calls_itself_without_a_free_instance_gets_an_error(models):
    models.add("m", RECURSE.format(target="m"))
    [error] = fails_fast(models.infer("m", floats(1)))
    assert isinstance(error, InferenceError)
    assert error.message.startswith("Model m - Error when running inference: ")
    assert NO_INSTANCE in error.message
    assert error.status is Status.UNAVAILABLE
    assert models.infer("m", floats(0)).array == [0]


def test_a_model_that_calls_itself_with_enough_instances_works(models):
    models.add("m", RECURSE.format(target="m"), "instance_group [{ count: 3 kind: KIND_CPU }]")
    assert models.infer("m", floats(2)).array == [2]


def test_models_that_call_each_other_in_a_cycle_get_an_error(models):
    models.add("a", RECURSE.format(target="b"))
    models.add("b", RECURSE.format(target="a"))
    assert models.infer("a", floats(1)).array == [1]
    [error] = fails_fast(models.infer("a", floats(2)))
    assert NO_INSTANCE in error.message


def test_recursive_calls_that_exhaust_the_instances_all_end(models):
    models.add("m", RECURSE.format(target="m"), TWO)
    answers = [models.infer("m", floats(1)) for _ in range(8)]
    errors = fails_fast(*answers)
    assert all(error is None or NO_INSTANCE in error.message for error in errors)
    assert any(errors)


@pytest.mark.parametrize(
    "body",
    [
        "return asyncio.run(later()).error().message()",
        """\
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor() as pool:
    return pool.submit(ask("caller", x).exec).result().error().message()""",
        """\
found = []
thread = threading.Thread(target=lambda: found.append(ask("caller", x).exec()))
thread.start()
thread.join()
return found[0].error().message()""",
        "return next(ask('caller', x).exec(decoupled=True)).error().message()",
        "return next(asyncio.run(later(decoupled=True))).error().message()",
    ],
)
def test_a_cycle_is_detected_for_each_kind_of_call(models, body):
    later = "async def later(**how):\n    return await ask('caller', x).async_exec(**how)\n"
    assert NO_INSTANCE in shown(models, later + body)


def test_a_cycle_is_detected_in_an_async_execute(models):
    body = "return (await ask('caller', x).async_exec()).error().message()"
    assert NO_INSTANCE in shown(models, body, "async def")


def test_a_slow_target_is_waited_for(models):
    models.add(
        "slow",
        """
        import time
        class TritonPythonModel:
            def execute(self, requests):
                time.sleep(0.9)  # longer than it takes to see a circle
                return [answer(tensor(request).as_numpy()) for request in requests]
    """,
    )
    models.add("caller", calling("return ask('slow', x).exec().has_error()"), TWO)
    answers = [models.infer("caller", floats(1)) for _ in range(2)]
    assert [answer.array[0] for answer in answers] == [b"False", b"False"]


def test_a_future_that_is_cancelled_cancels_the_request(models):
    models.add(
        "target",
        """
        class TritonPythonModel:
            def execute(self, requests):
                [request] = requests
                while not request.is_cancelled():
                    time.sleep(0.001)
                return [answer(np.zeros(1))]
        """,
    )
    body = """\
async def give_up():
    try:
        await asyncio.wait_for(ask("target", x).async_exec(), 0.01)
    except asyncio.TimeoutError:
        return "gave up"
return asyncio.run(give_up())"""
    assert shown(models, body) == "'gave up'"
    assert models.instances("target").ready


UNTIL_CANCELLED = """
    class TritonPythonModel:
        def execute(self, requests):
            [request] = requests
            open(request.request_id(), "w").close()     # it runs
            while not request.is_cancelled():
                time.sleep(0.001)
            request.get_response_sender().send(
                pb_utils.InferenceResponse(error=pb_utils.TritonError("left")), flags=1)
            return None if DECOUPLED else [None]
"""
FORWARDING = """
    from concurrent.futures import ThreadPoolExecutor
    class TritonPythonModel:
        KIND execute(self, requests):
            [r] = requests
            call = ask("target", tensor(r), request_id=r.request_id())
            said = [each.error().message() for each in CALL if each.has_error()]
            call = ask("double", tensor(r))     # as a model that cleans up
            said += [each.has_error() for each in AGAIN]
            r.get_response_sender().send(answer(np.array(list(map(str, said)), dtype=object)), flags=1)
            return None if DECOUPLED else [None]
"""
ONE, LATER = "[call.exec()]", "[await call.async_exec()]"
WAYS = {
    "exec": ("def", ONE, ONE),
    "thread": ("def", "[ThreadPoolExecutor(1).submit(call.exec).result()]", ONE),
    "async_exec": ("async def", LATER, LATER),
    "decoupled exec": ("def", "call.exec(decoupled=True)", ONE),
    "decoupled async_exec": ("async def", "await call.async_exec(decoupled=True)", LATER),
}
ALWAYS_IN_A_STUB = ("thread", "decoupled async_exec")


# A stub forwards the calls of a thread, and of a coroutine with several answers: between them all its ways.
IN_PROCESSES = [
    *(pytest.param(way, "", id=f"{way}-in process") for way in WAYS),
    *(
        pytest.param(
            way, PROCESS, id=f"{way}-stub", marks=[] if way in ALWAYS_IN_A_STUB else pytest.mark.extended
        )
        for way in WAYS
    ),
]


@pytest.mark.parametrize(("way", "process"), IN_PROCESSES)
def test_a_call_is_cancelled_with_the_request_that_it_was_made_for(models, tmp_path, way, process):
    kind, call, again = WAYS[way]
    config = DECOUPLED if "decoupled" in way else ""
    forwarding = FORWARDING.replace("KIND", kind).replace("CALL", call).replace("AGAIN", again)
    models.add("double", DOUBLE)
    models.add("target", UNTIL_CANCELLED.replace("DECOUPLED", str(bool(config))), config)
    models.add("caller", forwarding.replace("DECOUPLED", str(bool(config))), config + process)
    runs = tmp_path / "runs"
    answer = models.infer("caller", floats(3), id=str(runs))
    wait_until(runs.exists)
    answer.inference.cancel()
    assert answer.array.tolist() == [b"left", b"False"]


def test_a_call_is_cancelled_with_the_last_request_of_its_batch():
    first, second, call, ended = (
        Inference(request=InferenceRequest(model_name="m", inputs={}), on_response=lambda *_: None)
        for _ in range(4)
    )
    batch = RunningBatch([first, second])
    batch.add(call)
    batch.add(ended)
    ended.send(None, final=True)
    first.cancel()
    assert not call.cancelled
    second.cancel()
    assert call.cancelled
    assert not batch._calls - {call}    # what has ended is not kept


def test_models_load_and_check_other_models(models):
    models.add("target", DOUBLE)
    body = """\
pb_utils.load_model("target", config="{}", files={"file:1/model.py": b""})
pb_utils.unload_model("target", unload_dependents=True)
texts = []
for rejected in [
    lambda: pb_utils.load_model("nothing"),
    lambda: pb_utils.load_model("target", files=[1]),
    lambda: pb_utils.is_model_ready("target", "x"),
    lambda: pb_utils.is_model_ready("target", "-3"),
]:
    try:
        rejected()
    except pb_utils.TritonModelException as error:
        texts.append(str(error))
asked = [("target",), ("target", "1"), ("target", "2"), ("nothing",)]
ready = [pb_utils.is_model_ready(*args) for args in asked]
return texts, ready"""
    by = "Failed to process the request for model 'caller_0', message: "
    assert shown(models, body) == repr((
        [
            f"Failed to load model: {by}failed to load 'nothing', failed to poll from model repository",
            "failed to load model 'target', files should be a dictionary of file paths and file contents",
            f"Failed to check model readiness: {by}failed to get model version from specified version string "
            "'x' (details: stol), version should be an integral value > 0",
            f"Failed to check model readiness: {by}failed to get model version from specified version string "
            "'-3', version should be an integral value > 0",
        ],
        [True, True, False, False],
    ))  # fmt: skip
    assert models.loaded == [("target", "{}", {"1/model.py": b""}), ("target", True)]
