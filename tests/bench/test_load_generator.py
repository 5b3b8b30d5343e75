"""The load loop against a static server over real sockets."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest
import trustme

from genserve.bench.answers import LoadResult
from genserve.bench.datasets import BenchPrompt
from genserve.bench.dialects import DIALECTS, Requested
from genserve.bench.load_generator import Load, Target, run_load
from genserve.client_credentials import tls_context
from genserve.errors import InvalidRequest
from tests.bench.mock_server import KEY, NUM_TOKENS, MockServer
from tests.support.live_server import wait_until


def target(url: str, model: str = "good", **options: Any) -> Target:
    requested = Requested(model=model, temperature=0.0, ignore_eos=True)
    return Target(base_url=url, dialect=DIALECTS["openai-chat"], requested=requested, **options)


def run(at: Target, *, count: int = 3, on_tick: Any = lambda: None, **options: Any) -> LoadResult:
    prompts = (BenchPrompt(text=f"prompt {number}", max_tokens=9) for number in itertools.count())
    load = Load(prompts=prompts, **{"arrivals_s": [0.0] * count} | options)
    result = LoadResult()
    run_load(load, at, result, on_tick=on_tick)
    return result


def only_failure(result: LoadResult) -> tuple[str, str]:
    [failure] = set(result.failures())
    assert len(result.failures()) == len(result.answers)
    assert not result.complete()
    return failure.kind, failure.message


def test_text_chunks_and_the_servers_counts_are_noted(mock: MockServer) -> None:
    result = run(target(mock.url))
    assert len(result.complete()) == 3
    for answer in result.answers:
        assert len(answer.text_times_s) == NUM_TOKENS, "neither the role nor the end is text"
        assert (answer.prompt_tokens, answer.output_tokens) == (7, NUM_TOKENS)
        assert answer.sent_s <= answer.text_times_s[0] <= answer.text_times_s[-1] <= answer.end_s
    assert result.elapsed_s >= max(answer.end_s for answer in result.answers) - result.started_s


def test_without_usage_chunks_are_counted(mock: MockServer) -> None:
    [answer] = run(target(mock.url, "uncounted"), count=1).answers
    assert answer.is_complete
    assert answer.output_tokens is None
    assert answer.num_tokens == NUM_TOKENS


def test_an_answer_without_text_is_complete(mock: MockServer) -> None:
    [answer] = run(target(mock.url, "empty"), count=1).answers
    assert answer.is_complete
    assert answer.first_text_s is None
    assert answer.time_per_output_token_s is None


def test_the_body_has_the_prompt_and_more_fields_replace_or_remove_its_own(mock: MockServer) -> None:
    run(target(mock.url, extra_body={"temperature": 0.5, "ignore_eos": None, "top_k": 3}), count=1)
    assert mock.bodies[-1] == {
        "model": "good",
        "messages": [{"role": "user", "content": "prompt 0"}],
        "max_tokens": 9,
        "temperature": 0.5,
        "top_k": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_headers_reach_the_server(mock: MockServer) -> None:
    run(target(mock.url, headers={"authorization": f"Bearer {KEY}", "x-team": "a"}), count=1)
    assert mock.headers[-1]["authorization"] == f"Bearer {KEY}"
    assert mock.headers[-1]["x-team"] == "a"


@pytest.mark.parametrize("limit", [1, 3])
def test_the_concurrency_is_reached_and_not_exceeded(mock: MockServer, limit: int) -> None:
    mock.most_at_once = 0
    result = run(target(mock.url), count=12, max_concurrency=limit)
    assert len(result.complete()) == 12
    assert mock.most_at_once == limit


def test_without_a_limit_all_requests_are_sent_when_they_are_due(mock: MockServer) -> None:
    result = run(target(mock.url, "silent"), count=6, timeout_s=0.3)
    assert only_failure(result)[0] == "timeout"
    assert max(answer.sent_s for answer in result.answers) < min(answer.end_s for answer in result.answers)


def test_no_request_is_sent_before_it_is_due(mock: MockServer) -> None:
    arrivals_s = [0.0, 0.05, 0.05, 0.15]
    result = run(target(mock.url), arrivals_s=arrivals_s)
    sent_s = [answer.sent_s - result.started_s for answer in result.answers]
    assert all(sent >= due for sent, due in zip(sent_s, arrivals_s, strict=True))


@pytest.mark.parametrize(
    ("model", "kind", "message"),
    [
        ("401", "http_401", "no luck"),
        ("429", "http_429", "no luck"),
        ("500", "http_500", "no luck"),
        ("silent", "timeout", "no complete answer within 0.3 s"),
        ("broken", "stream_cut", ""),
        ("ended", "stream_cut", "the answer ended before its last event"),
        ("invalid", "invalid_event", "unexpected event: {nothing"),
        ("strange", "invalid_event", 'unexpected event: ["what"]'),
        ("error", "error_event", "the model broke"),
    ],
)
def test_a_failure_is_counted_by_its_kind(mock: MockServer, model: str, kind: str, message: str) -> None:
    result = run(target(mock.url, model), count=2, timeout_s=0.3 if model == "silent" else 60)
    found, said = only_failure(result)
    assert found == kind
    assert message in said


def test_failures_do_not_end_the_load(mock: MockServer) -> None:
    mock.asked.clear()
    result = run(target(mock.url, "busy"), count=6, max_concurrency=1)
    assert [failure.kind for failure in result.failures()] == ["http_429"] * 3
    assert len(result.complete()) == 3


def test_a_rejected_request_is_repeated_on_demand(mock: MockServer) -> None:
    mock.asked.clear()
    result = run(target(mock.url, "busy"), count=4, max_concurrency=1, retry_rejected=True)
    assert len(result.complete()) == 4
    assert [len(answer.rejections_s) for answer in result.answers] == [1, 1, 1, 1]
    assert mock.asked["busy"] == 8


def test_nobody_at_the_port_is_a_failure_of_the_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    kind, _ = only_failure(run(target(f"http://127.0.0.1:{port}")))
    assert kind == "connection"


def test_a_server_that_closes_idle_connections_fails_no_request() -> None:
    """As llama.cpp's does after each stream, although it announces to keep them open."""
    with MockServer(timeout_keep_alive=0) as server:
        result = run(target(server.url), count=20, max_concurrency=2)
    assert len(result.complete()) == 20


def test_the_duration_cuts_unfinished_answers(mock: MockServer) -> None:
    at_once = itertools.repeat(0.0)
    result = run(target(mock.url, "silent"), arrivals_s=at_once, max_concurrency=2, duration_s=0.7)
    assert len(result.unfinished()) == 2
    assert not result.failures()
    assert [answer.num_tokens for answer in result.unfinished()] == [3, 3]


def test_ctrl_c_leaves_what_was_measured(mock: MockServer) -> None:
    result = LoadResult()

    def press() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    prompts = itertools.repeat(BenchPrompt(text="hi", max_tokens=9))
    load = Load(prompts=prompts, arrivals_s=[0.0] * 4)
    with pytest.raises(KeyboardInterrupt):
        run_load(load, target(mock.url, "silent"), result, on_tick=press)
    assert len(result.unfinished()) == 4
    assert result.elapsed_s > 0
    wait_until(lambda: not mock.running)


def test_https_is_verified(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    files = {name: tmp_path / name for name in ("ca.pem", "cert.pem", "key.pem")}
    authority.cert_pem.write_to_path(files["ca.pem"])
    certificate.cert_chain_pems[0].write_to_path(files["cert.pem"])
    certificate.private_key_pem.write_to_path(files["key.pem"])
    with MockServer(ssl_certfile=files["cert.pem"], ssl_keyfile=files["key.pem"]) as server:
        for options in ({"ca": files["ca.pem"], "insecure": False}, {"ca": None, "insecure": True}):
            trusting = run(target(server.url, tls=tls_context(**options)), count=1)
            assert len(trusting.complete()) == 1
        kind, message = only_failure(run(target(server.url, tls=ssl.create_default_context()), count=1))
    assert kind == "tls"
    assert f"certificate of {server.url}/v1/chat/completions" in message


def test_a_file_without_certificates_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("nothing")
    for name in ("ca.pem", "missing.pem"):
        with pytest.raises(InvalidRequest, match=re.escape(str(tmp_path / name))):
            tls_context(ca=tmp_path / name, insecure=False)
