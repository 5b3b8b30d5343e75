from __future__ import annotations

import socket
import statistics
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genserve.cli.load_generator import Load, percentile, random_prompts, run_load
from genserve.errors import InvalidRequest, Unreachable
from tests.support.live_server import LiveServer

OPTIONS: dict[str, Any] = {
    "host": "127.0.0.1",
    "model": "tiny",
    "api": "generate",
    "concurrency": 3,
    "num_requests": 7,
    "new_tokens": 12,
    "prompt_words": 6,
    "seed": 1,
}


def load(server: LiveServer, **changes: object) -> Load:
    return Load(**OPTIONS | {"port": server.port} | changes)


@pytest.mark.parametrize("api", ["generate", "chat"])
def test_every_request_is_answered_and_counted_as_the_server_reports(
    tiny_server: LiveServer, api: str
) -> None:
    result = run_load(load(tiny_server, api=api))
    assert result.new_tokens == [12] * 7
    assert statistics.fmean(result.prompt_tokens) > 6
    assert 0 < len(result.first_text_s) <= 7  # a random model may answer with special tokens alone
    assert 0 < len(result.gaps_s) <= 7 * 11
    assert max(result.first_text_s) <= result.elapsed_s


@pytest.mark.parametrize("keep_alive", [True, False])
def test_keep_alive_decides_the_number_of_connections(tiny_server: LiveServer, keep_alive: bool) -> None:
    made: list[object] = []
    create_connection = socket.create_connection

    def counted(address: tuple[str, int]) -> socket.socket:
        made.append(address)
        return create_connection(address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "create_connection", counted)
        result = run_load(load(tiny_server, keep_alive=keep_alive))
    assert result.new_tokens == [12] * 7
    assert len(made) == (3 if keep_alive else 7)


def test_an_error_reply_ends_the_load(tiny_server: LiveServer) -> None:
    with pytest.raises(Unreachable, match="answered with an error"):
        run_load(load(tiny_server, model="nowhere"))


def test_an_overloaded_request_is_retried_after_the_servers_time() -> None:
    rejection = b"HTTP/1.1 429 Too Many Requests\r\nretry-after-ms: 2\r\ncontent-length: 2\r\n\r\n{}"
    event = b'data: {"token": {"text": "tea"}, "details": {"generated_tokens": 3, "input_length": 5}}\n\n'
    answer = (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(event), event)
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        asked: list[bytes] = []

        def serve() -> None:
            for reply in (rejection, answer):
                with listener.accept()[0] as connection:
                    asked.append(connection.recv(65536))
                    connection.sendall(reply)

        server = threading.Thread(target=serve)
        server.start()
        port = listener.getsockname()[1]
        result = run_load(Load(**OPTIONS | {"port": port, "concurrency": 1, "num_requests": 1}))
        server.join()
    assert asked[0] == asked[1]
    assert result.new_tokens == [3]
    assert len(result.rejected_s) == 1


def test_a_load_may_end_after_a_number_of_answers(tiny_server: LiveServer) -> None:
    result = run_load(load(tiny_server, num_requests=10_000, num_answers=5))
    assert 5 <= len(result.new_tokens) <= 5 + 3
    texts = len(result.first_text_s) + len(result.gaps_s)
    assert 0 <= result.unfinished_texts < texts
    assert run_load(load(tiny_server)).unfinished_texts == 0


def test_the_remedy_for_a_closed_port_is_to_start_a_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    nobody = Load(
        host="127.0.0.1",
        port=port,
        model="tiny",
        api="chat",
        concurrency=1,
        num_requests=1,
        new_tokens=1,
        prompt_words=1,
        seed=0,
    )
    with pytest.raises(Unreachable, match=rf"127\.0\.0\.1:{port}.*genserve serve"):
        run_load(nobody)


def test_the_api_key_is_sent(tiny_repository: Path) -> None:
    with LiveServer(tiny_repository, api_key="secret") as server:
        assert run_load(load(server, api_key="secret")).new_tokens == [12] * 7
        with pytest.raises(Unreachable, match="401"):
            run_load(load(server, api_key="wrong"))
        with pytest.raises(InvalidRequest):
            run_load(load(server, api_key="secret\r\nX: y"))


def test_extra_fields_reach_the_server(tiny_server: LiveServer) -> None:
    result = run_load(load(tiny_server, api="chat", extra={"max_tokens": 5}))
    assert result.new_tokens == [5] * 7


def test_prompts_differ_among_each_other_and_by_seed() -> None:
    prompts = random_prompts(5, words=12, seed=1) + random_prompts(5, words=12, seed=2)
    assert len(set(prompts)) == 10
    assert all(len(prompt.split()) == 12 for prompt in prompts)


def test_every_prompt_begins_with_the_shared_words() -> None:
    prompts = [prompt.split() for prompt in random_prompts(5, words=20, shared_words=8, seed=1)]
    assert len({tuple(words[:8]) for words in prompts}) == 1
    assert len({tuple(words[8:]) for words in prompts}) == 5


@pytest.mark.parametrize("percent", [1, 50, 95, 99, 100])
@pytest.mark.parametrize("count", [1, 2, 20, 33])
def test_a_percentile_is_the_nearest_rank_of_numpy(percent: int, count: int) -> None:
    values = np.random.default_rng(count).permutation(count) / 7
    assert percentile(values, percent) == np.percentile(values, percent, method="inverted_cdf")
