"""Faults of concurrency: many requests at once, and what is closed or unloaded while others use it."""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPResponse
from pathlib import Path
from random import Random
from typing import Any

import grpc
import httpx2
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from tokenizers import processors
from tritonclient.grpc import service_pb2_grpc

from benchmarks.text_faces import FACES
from genserve.completion import join_deltas
from genserve.engine.admission_control import QueueLimits
from genserve.engine.delta_streams import DeltaStream, EventLoopSink
from genserve.errors import Closed, InferenceError
from genserve.generation_metrics import Metrics
from genserve.repository.options import ControlMode, RepositoryOptions
from genserve.repository.repository import Repository
from genserve.text.tokenizer import Tokenizer, TooManyTokens
from genserve.wakeup import MAX_ITEMS_PER_TURN
from tests.fakes.engines import engine_thread
from tests.fakes.logits import PagedLogits, greedy_answer
from tests.fakes.sequences import sequence_of
from tests.faults.broken_repository import CONFIG, MATRIX, graph, write_model
from tests.faults.one_place import connect, grpc_message, leave, send, small_cache
from tests.support.live_server import LiveServer, wait_until
from tests.support.python_models import ask
from tests.support.request_ledger import RequestLedger
from tests.support.step_gate import StepGate
from tests.text.vocabularies import byte_level_bpe, sentencepiece_bpe, tokenizer_of

NUM_BLOCKS, BLOCK_SIZE = 8, 16
POOL = NUM_BLOCKS * BLOCK_SIZE  # tokens
_node, _value = helper.make_node, helper.make_tensor_value_info


class HeldLogits(PagedLogits):
    """Holds its first forward until it may go on."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def forward(self, batch: Any) -> Any:
        self.begun.set()
        self.goes_on.wait()
        return super().forward(batch)


def ends_of(metrics: Metrics) -> dict[str, int]:
    """Return how the sequences of an engine of the tests have ended."""
    endings = ("length", "stop", "error", "abort")
    counts = {
        ending: metrics.registry.get_sample_value(
            "genserve_requests_total", {"model": "test", "finished_reason": ending}
        )
        for ending in endings
    }
    return {ending: int(count) for ending, count in counts.items() if count}


async def test_the_event_loop_serves_others_while_a_thousand_requests_end_in_one_step() -> None:
    model, metrics = HeldLogits(max_num_seqs=2000, max_length=4), Metrics()
    engine = engine_thread(model, limits=QueueLimits(max_requests=1000), metrics=metrics)
    sink = EventLoopSink(asyncio.get_running_loop())
    turns = 0  # turns of the event loop, as another task sees them
    ends: list[int] = []

    async def probe() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def read(prompt: int) -> int:
        deltas = [delta async for arrived in streams[prompt] for delta in arrived]
        ends.append(turns)
        [only] = deltas
        assert only.finish_reason is not None
        return only.token_ids[0]

    streams = [sink.open(engine, sequence_of([0], max_length=4, max_tokens=1).request)]
    await asyncio.to_thread(model.begun.wait)
    streams += [
        sink.open(engine, sequence_of([number % 64], max_length=4, max_tokens=1).request)
        for number in range(1, 1000)
    ]
    probing, *reading = map(asyncio.create_task, (probe(), *map(read, range(1000))))
    await asyncio.sleep(0)  # all of them wait
    model.goes_on.set()
    answers = await asyncio.gather(*reading)
    probing.cancel()
    engine.close()
    assert [len(counts) for counts in model.forwards] == [1, 999]
    assert answers == [greedy_answer([number % 64], num_tokens=1)[0] for number in range(1000)]
    assert ends_of(metrics) == {"length": 1000}
    # The outputs of both steps may be handed over in one turn.
    assert max(Counter(ends).values()) <= 2 * MAX_ITEMS_PER_TURN


@pytest.mark.parametrize(
    ("max_tokens", "closes", "ends"),
    [
        (50, False, {"abort": 3, "length": 1}),
        (1, False, {"length": 4}),
        (50, True, {"abort": 1, "error": 3}),
    ],
    ids=["tokens", "last-tokens", "a-token-and-the-end-of-the-engine"],
)
def test_outputs_for_an_event_loop_that_has_closed_end_their_requests(
    caplog: pytest.LogCaptureFixture, max_tokens: int, closes: bool, ends: dict[str, int]
) -> None:
    model, metrics = HeldLogits(), Metrics()
    engine = engine_thread(model, metrics=metrics)
    closing = threading.Thread(target=engine.close)
    event_loop = asyncio.new_event_loop()
    sink = EventLoopSink(event_loop)
    sink.open(engine, sequence_of([0], max_tokens=max_tokens).request)
    model.begun.wait()
    for prompt in (1, 2):
        sink.open(engine, sequence_of([prompt], max_tokens=max_tokens).request)
    event_loop.close()
    with DeltaStream(engine, sequence_of([5], max_tokens=6).request) as other:
        if closes:
            closing.start()
            wait_until(lambda: not engine.alive)
            model.goes_on.set()
            with pytest.raises(Closed):
                list(other)
            closing.join()
        else:
            model.goes_on.set()
            assert [*join_deltas(other).token_ids] == greedy_answer([5], num_tokens=6)
    engine.drain(timeout_s=30)
    assert (engine.num_accepted, engine.num_running) == (0, 0)
    engine.close()
    assert ends_of(metrics) == ends
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture(scope="module")
def live(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server whose model has a small cache, and a queue for hundreds of requests."""
    repository = tmp_path_factory.mktemp("concurrency") / "repository"
    shutil.copytree(tiny_repository, repository)
    small_cache(repository, num_blocks=NUM_BLOCKS)
    queue = {"max_queue": 1000, "max_queue_tokens": 0, "max_queue_wait_s": 0.0}
    explicit = {"model_control_mode": "explicit", "load_model": ("*",)}
    with LiveServer(repository, **queue, **explicit) as server:
        yield server


def complete(live: LiveServer, *, prompt: int, tokens: int, **fields: Any) -> Any:
    """Send a prompt of so many tokens; return the connection."""
    body = {"model": "tiny", "prompt": [5] * prompt, "max_tokens": tokens, "ignore_eos": True, **fields}
    return connect(live, "/v1/completions", body)


def answer_on(connection: Any) -> tuple[int, bytes]:
    with connection:
        response = HTTPResponse(connection)
        response.begin()
        return response.status, response.read()


TOO_LONG = {
    "prompt": {"prompt": POOL + 1, "tokens": 1},
    "no-room": {"prompt": POOL, "tokens": 1},
    "beams": {"prompt": POOL // 4, "tokens": 1, "use_beam_search": True, "n": 4},
}


def test_a_request_that_needs_more_than_the_pool_is_rejected_at_once_and_blocks_no_other(
    live: LiveServer, gate: StepGate
) -> None:
    ledger, engine = RequestLedger(live), live.model.engine
    gate.shut()
    running = complete(live, prompt=POOL - 20, tokens=20)  # all blocks
    wait_until(lambda: gate.num_begun == 1)
    waiting = [complete(live, prompt=POOL - 40, tokens=5)]
    wait_until(lambda: engine.num_accepted == 2)
    for request in TOO_LONG.values():  # nothing runs meanwhile
        status, answer = answer_on(complete(live, **request))
        assert (status, b"context_length_exceeded" in answer) == (400, True), answer
    waiting.append(complete(live, prompt=20, tokens=5))
    wait_until(lambda: engine.num_accepted == 3)
    gate.open()
    assert [answer_on(connection)[0] for connection in (running, *waiting)] == [200] * 3
    assert ledger.ends() == {"length": 3}


def outcome(call: Callable[[Tokenizer], Any], tokenizer: Tokenizer) -> Any:
    try:
        return call(tokenizer)
    except TooManyTokens as error:
        return error.num_tokens, error.is_least


def streamed(tokenizer: Tokenizer, ids: list[int], **options: bool) -> str:
    detokenizer = tokenizer.detokenizer(**options)
    return "".join(map(detokenizer.push, ids)) + detokenizer.flush()


def tokenizer_calls(text: str, ids: list[int]) -> list[Callable[[Tokenizer], Any]]:
    """Return calls that differ in the options that the library itself keeps as its state."""
    return [
        lambda tokenizer: tokenizer.encode(text),
        lambda tokenizer: tokenizer.encode(text, add_special_tokens=False),
        lambda tokenizer: tokenizer.encode(text, max_tokens=1000),
        lambda tokenizer: tokenizer.encode(text, max_tokens=3),
        lambda tokenizer: tokenizer.encode(text[:3], max_tokens=3),
        lambda tokenizer: tokenizer.encode_plain(text),
        lambda tokenizer: tokenizer.encode_spans(text),
        lambda tokenizer: tokenizer.encode_spans(text, add_special_tokens=False),
        lambda tokenizer: tokenizer.decode(ids),
        lambda tokenizer: tokenizer.decode(ids, skip_special_tokens=False),
        lambda tokenizer: streamed(tokenizer, ids),
        lambda tokenizer: streamed(tokenizer, ids, skip_special_tokens=False),
    ]


@pytest.mark.parametrize("family", [byte_level_bpe, sentencepiece_bpe])
def test_threads_with_different_options_share_one_tokenizer(family: Callable[[], Any]) -> None:
    backend = family()
    name = backend.id_to_token(1)
    backend.post_processor = processors.TemplateProcessing(single=f"{name} $A", special_tokens=[(name, 1)])
    calls = tokenizer_calls(f"ab {name} a\u00e9\N{GRINNING FACE} b" * 20, [1, 5, 100, 2, 60, 7, 1, 200] * 10)
    alone = tokenizer_of(backend)
    expected = [outcome(call, alone) for call in calls]
    assert expected[0] != expected[1] != expected[5]
    shared, start = tokenizer_of(type(backend).from_str(backend.to_str())), threading.Barrier(64)

    def work(seed: int) -> list[Any]:
        order = Random(seed).sample(range(len(calls)), len(calls))
        start.wait()
        found = {index: outcome(calls[index], shared) for index in order}
        return [found[index] for index in range(len(calls))]

    with ThreadPoolExecutor(64) as pool:
        assert list(pool.map(work, range(64))) == [expected] * 64


def runs_until_zero() -> bytes:
    """A graph that runs until its input, which is not copied, becomes 0, and then returns 1."""
    weights = {"true": np.array(True), "zero": np.float32(0), "one": np.float32(1)}
    body = helper.make_graph(
        [
            _node("ReduceMax", ["X"], ["largest"], keepdims=0),
            _node("Greater", ["largest", "zero"], ["goes_on"]),
            _node("Identity", ["x"], ["y"]),
        ],
        "body",
        [
            _value("i", TensorProto.INT64, []),
            _value("go", TensorProto.BOOL, []),
            _value("x", TensorProto.FLOAT, []),
        ],
        [_value("goes_on", TensorProto.BOOL, []), _value("y", TensorProto.FLOAT, [])],
    )
    return graph(
        _node("Loop", ["", "true", "one"], ["end"], body=body),
        _node("Mul", ["X", "zero"], ["zeros"]),
        _node("Add", ["zeros", "end"], ["Y"]),
        weights=[numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()],
        output=("Y", TensorProto.FLOAT, MATRIX),
    )


def test_an_unload_waits_for_each_run_of_the_session_that_the_instances_share(tmp_path: Path) -> None:
    write_model(tmp_path / "m", runs_until_zero(), config=CONFIG + "instance_group { count: 2 }")
    models = Repository([tmp_path], options=RepositoryOptions(control_mode=ControlMode.EXPLICIT))
    models.start(["m"])
    inputs = [np.ones((1, 2), np.float32) for _ in range(2)]

    def state() -> str:
        [entry] = models.index()
        return f"{entry.state} {entry.reason}"

    try:
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(ask, models, "m", X=x) for x in inputs]
            wait_until(lambda: models.find("m").num_pending == 2 and not models.find("m").num_waiting)
            models.unload("m")
            with pytest.raises(InferenceError, match="no available versions"):
                ask(models, "m", X=[[0, 0]])
            for x, answer in zip(inputs, asked, strict=True):
                assert (state(), answer.done()) == ("UNLOADING ", False)
                x[:] = 0
                [output] = answer.result().outputs
                assert output.array.tolist() == [[1, 1]]
        wait_until(lambda: state() == "UNAVAILABLE unloaded")
    finally:
        for x in inputs:
            x[:] = 0
        models.close()


def test_an_unload_lets_streams_of_text_end(live: LiveServer, gate: StepGate) -> None:
    ledger = RequestLedger(live)
    gate.shut()
    streams = {face: send(live, face, stream=True, tokens=20) for face in FACES}
    wait_until(lambda: live.model.engine.num_accepted == len(FACES))
    with httpx2.Client(base_url=live.url) as http, grpc.insecure_channel(live.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        over_grpc = stub.ModelStreamInfer(iter([grpc_message(tokens=20)]))
        wait_until(lambda: live.model.engine.num_accepted == len(FACES) + 1)
        assert http.post("/v2/repository/models/tiny/unload").status_code == 200
        late = http.post("/v1/completions", json={"model": "tiny", "prompt": "a"})
        assert late.status_code in (404, 503)
        gate.open()
        for face, connection in streams.items():
            status, events = answer_on(connection)
            assert (status, FACES[face].num_ends(events)) == (200, 1)
            assert not FACES[face].failure.search(events), events
        assert not [answer.error_message for answer in over_grpc if answer.error_message]
        ends = ledger.ends()
        assert sum(ends.values()) == len(FACES) + 1
        assert ends.keys() <= {"length", "stop"}
        assert http.post("/v2/repository/models/tiny/load").status_code == 200
        again = http.post("/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 2})
        assert again.status_code == 200


def open_and_drop(live: LiveServer, gate: StepGate, *, per_face: int, over_grpc: int) -> None:
    """Open streams that have nothing to send, and leave them all."""
    ledger, engine, num_begun = RequestLedger(live), live.model.engine, gate.num_begun
    gate.shut()
    sockets = [send(live, face, stream=True) for face in [*FACES] * per_face]
    dropped = threading.Event()

    def requests(number: int) -> Iterator[Any]:
        if number % 2:  # every other stream has a request
            yield grpc_message()
        dropped.wait()

    with grpc.insecure_channel(live.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        calls = [stub.ModelStreamInfer(requests(number)) for number in range(over_grpc)]
        num_requests = len(sockets) + over_grpc // 2
        wait_until(lambda: engine.num_accepted == num_requests)
        gate.allow(1)
        wait_until(lambda: gate.num_begun == num_begun + 2)  # some have their first token, the others wait
        for number, connection in enumerate(sockets):
            leave(connection, reset=bool(number % 2))
        for call in calls[: over_grpc // 2]:
            call.cancel()
    dropped.set()
    wait_until(lambda: len(engine._queue._arrivals.cancelled) == num_requests)
    gate.open()
    assert ledger.ends() == {"abort": num_requests}


def test_hundreds_of_idle_streams_that_are_dropped_leave_nothing(live: LiveServer, gate: StepGate) -> None:
    def num_descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def num_tasks() -> int:
        return len(asyncio.all_tasks(event_loop))

    open_and_drop(live, gate, per_face=2, over_grpc=4)  # what is created once and kept
    event_loop = live.server.services.output_sink()._queue._event_loop
    wait_until(lambda: not live.server.server_state.connections)
    before = num_descriptors(), num_tasks()
    open_and_drop(live, gate, per_face=40, over_grpc=100)
    wait_until(lambda: not live.server.server_state.connections)
    wait_until(lambda: num_descriptors() <= before[0])
    wait_until(lambda: num_tasks() <= before[1])
    usage = partial(
        live.server.services.metrics.registry.get_sample_value,
        "genserve_kv_cache_usage_perc",
        {"model": "tiny"},
    )
    wait_until(lambda: usage() == 0)
