"""Large messages are parsed and written on threads, off the event loop."""

from __future__ import annotations

import threading
from pathlib import Path

import httpx2
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

import genserve.server.http.request_body
import genserve.tensor
from genserve.server.dialects import logprob_formats
from genserve.server.http.offload import offload_if_large, write_cost
from genserve.server.pages import health
from genserve.tensor import Tensor
from tests.server.live_kserve import copy_models
from tests.support.live_server import LiveServer


async def test_large_work_runs_on_another_thread():
    here = threading.get_ident()
    assert await offload_if_large(100, threading.get_ident) == here
    assert await offload_if_large(10**7, threading.get_ident) != here


def test_writing_strings_costs_more_than_numbers_and_copying_least():
    numbers = Tensor("Y", np.zeros(10000, np.float32))
    strings = Tensor("Y", np.array([b""] * 10000, object))
    long = Tensor("Y", np.array([b"a" * 10**6], object))
    assert write_cost(numbers, copied=True) < write_cost(numbers, copied=False) == 40000
    assert write_cost(strings, copied=True) > 256 * 1024
    assert write_cost(long, copied=True) == 10**6


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    copy_models(("identity_string",), Path(folder))
    with LiveServer(folder) as live:
        yield live


def threads_of(module, *names, monkeypatch):
    """The threads that call these functions."""
    threads = set()

    def note(function):
        def noted(*args, **kwargs):
            threads.add(threading.current_thread())
            return function(*args, **kwargs)

        return noted

    for name in names:
        monkeypatch.setattr(module, name, note(getattr(module, name)))
    return threads


def test_a_large_body_of_another_dialect_is_parsed_off_the_event_loop_too(server, monkeypatch):
    threads = threads_of(genserve.server.http.request_body, "parse_json", monkeypatch=monkeypatch)
    with httpx2.Client(base_url=server.url) as http:
        assert http.post("/v1/completions", json={"prompt": [1] * 200000}).status_code == 404
    assert threads
    assert server.thread not in threads


def test_metrics_are_written_off_the_event_loop(tiny_server, monkeypatch):
    threads = threads_of(health, "metrics_text", monkeypatch=monkeypatch)
    assert httpx2.get(f"{tiny_server.url}/metrics").status_code == 200
    assert threads
    assert tiny_server.thread not in threads


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("num_prompt_tokens", "is_off_the_loop"), [(60, True), (3, False)])
def test_many_log_probabilities_are_written_off_the_event_loop(
    tiny_server, monkeypatch, stream, num_prompt_tokens, is_off_the_loop
):
    threads = threads_of(logprob_formats.TokenScores, "read", monkeypatch=monkeypatch)
    body = {"prompt": [5] * num_prompt_tokens, "echo": True, "logprobs": 20, "max_tokens": 1}
    answer = httpx2.post(f"{tiny_server.url}/v1/completions", json=body | {"stream": stream})
    assert answer.status_code == 200
    assert threads
    assert (tiny_server.thread not in threads) == is_off_the_loop


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_many_strings_block_the_event_loop_of_neither_protocol(server, monkeypatch, protocol):
    threads = threads_of(genserve.tensor, "_split_strings", "_join_strings", monkeypatch=monkeypatch)
    library = {"http": tritonclient.http, "grpc": tritonclient.grpc}[protocol]
    address = {"http": f"127.0.0.1:{server.port}", "grpc": server.info.grpc_address}[protocol]
    x = library.InferInput("X", [20000], "BYTES")
    x.set_data_from_numpy(np.array([b"a"] * 20000, object))
    with library.InferenceServerClient(address) as client:
        assert len(client.infer("identity_string", [x]).as_numpy("Y")) == 20000
    assert threads
    assert server.thread not in threads
