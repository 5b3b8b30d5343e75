from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest

from genserve.cli import batch
from genserve.errors import InvalidRequest, Unreachable
from genserve.llm import LLM
from tests.support.command_line import Ended, check_error, invoke
from tests.support.live_server import LiveServer

PATIENCE_S = 20
PROMPTS = [{"prompt": f"Tea {number}", "max_tokens": 3 + number % 4} for number in range(12)]


def write_lines(path: Path, *objects: object) -> Path:
    path.write_text("".join(f"{json.dumps(each)}\n" for each in objects))
    return path


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def generate(*arguments: object, **options: Any) -> Ended:
    return invoke(["generate", *map(str, arguments)], **options)


def test_a_batch_has_the_answers_of_the_same_prompts_one_by_one(
    tiny_repository: Path, tmp_path: Path
) -> None:
    source = write_lines(
        tmp_path / "in.jsonl", *PROMPTS, {"id": "c", "messages": [{"role": "user", "content": "Tea"}]}
    )
    target = tmp_path / "out.jsonl"
    flags = ("--model-repository", tiny_repository, "--max-tokens", 5)
    result = generate("--input", source, "--output", target, *flags)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr.startswith("13 answers, 0 failed; ")
    rows = rows_of(target)
    assert [row["id"] for row in rows] == [*range(1, 13), "c"]
    with LLM(model_repository=tiny_repository) as llm:
        one_by_one = [llm.generate(**line) for line in PROMPTS] + [llm.chat("Tea", max_tokens=5)]
    assert [row["text"] for row in rows] == [answer.text for answer in one_by_one]
    assert [tuple(row["token_ids"]) for row in rows] == [answer.token_ids for answer in one_by_one]
    assert {*rows[0]} == {"id", "text", "token_ids", "finish_reason", "stop_reason", "usage"}


def test_a_model_has_the_context_that_is_asked_for(tiny_repository: Path, tmp_path: Path) -> None:
    flags = ("--model-repository", tiny_repository, "--max-model-len", 32, "--set", "ignore_eos=true")
    source = write_lines(tmp_path / "in.jsonl", {"prompt": "Tea"})
    whole = [generate("Tea", "--json", *flags), generate("--input", source, *flags)]
    for result in whole:
        usage = json.loads(result.stdout)["usage"]
        assert usage["prompt_tokens"] + usage["completion_tokens"] == 32


def test_lines_of_openais_batches_get_the_replies_of_the_server(
    tiny_server: LiveServer, tmp_path: Path
) -> None:
    chat = {
        "messages": [{"role": "user", "content": "Tea"}],
        "max_tokens": 4,
        "temperature": 0,
        "logprobs": True,
    }
    lines = [
        {
            "custom_id": "a",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "tiny", **chat},
        },
        {
            "custom_id": "b",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "none", "prompt": "T"},
        },
        {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": chat | {"stream": True}},
    ]
    source, target = write_lines(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    result = generate("--input", source, "--output", target, "--url", tiny_server.url)
    assert result.exit_code == 1
    first, second, third = rows_of(target)
    reply = httpx2.post(f"{tiny_server.url}/v1/chat/completions", json={"model": "tiny", **chat}).json()
    assert (first["id"], first["custom_id"], first["error"]) == ("batch_req_a", "a", None)
    assert first["response"]["status_code"] == 200
    assert first["response"]["body"]["choices"] == reply["choices"]
    assert second["response"]["status_code"] == 404
    assert second["response"]["body"]["error"]["code"] == "model_not_found"
    assert third["response"] is None
    assert (third["error"]["code"], "stream" in third["error"]["remedy"]) == ("invalid_request", True)
    # With --model the file may be one that was written for another server.
    result = generate("--input", source, "--output", target, "--url", tiny_server.url, "--model", "tiny")
    assert "1 answer, 1 failed" in result.stderr
    assert rows_of(target)[1]["response"]["status_code"] == 200


def test_a_failed_line_is_a_row_and_the_exit_code_is_1(tiny_server: LiveServer, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(
        '{"prompt": "Tea", "max_tokens": 2}\n\nnonsense\n[1]\n{"prompt": "Tea", "temprature": 1}\n'
        '{"id": "x"}\n{"id": {}, "prompt": "Tea"}\n{"prompt": "Tea", "tools": 3, "messages": []}\n'
        '{"prompt": [1]}\n{"custom_id": "o", "url": "/v2/x", "body": {}}\n'
    )
    result = generate("--input", source, "--url", tiny_server.url)
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.exit_code == 1
    assert "1 answer, 8 failed; 2 tokens in " in result.stderr
    assert rows[0]["usage"]["completion_tokens"] == 2
    assert [row["error"]["message"].partition(":")[0] for row in rows[1:]] == [
        "line 3 is not JSON",
        "line 4 is not a JSON object",
        "there is no sampling parameter 'temprature'",
        "a line needs either prompt or messages",
        "the id of line 7 is neither text nor a whole number",
        "a line needs either prompt or messages",
        "prompt must be text",
        "a line with a body needs a url that begins with /v1/",
    ]
    assert rows[3]["error"]["remedy"] == "did you mean temperature?"
    assert rows[3]["error"]["field"] == "temprature"


def test_a_second_run_asks_only_for_what_is_missing(tiny_server: LiveServer, tmp_path: Path) -> None:
    source = write_lines(
        tmp_path / "in.jsonl", *({"id": name, "prompt": name, "max_tokens": 2} for name in "abcd")
    )
    target = write_lines(
        tmp_path / "out.jsonl", {"id": "c", "text": "kept"}, {"id": "a", "error": {"code": "overloaded"}}
    )
    with target.open("a") as file:
        file.write('{"id": "b", "text": "cut of')
    result = generate("--input", source, "--output", target, "--url", tiny_server.url)
    assert f"{target} has 1 of 4 answers" in result.stderr
    assert "3 answers, 0 failed" in result.stderr
    rows = rows_of(target)
    assert [row["id"] for row in rows] == ["a", "b", "c", "d"]
    assert rows[2] == {"id": "c", "text": "kept"}
    again = target.read_bytes()
    assert (
        "0 answers, 0 failed"
        in generate("--input", source, "--output", target, "--url", tiny_server.url).stderr
    )
    assert target.read_bytes() == again


@pytest.mark.parametrize(
    "content", ['{"id": "of another input", "text": ""}\n', "my notes\n", "my notes", "[1]\n"]
)
def test_a_file_that_is_not_the_output_of_this_batch_is_left_alone(tmp_path: Path, content: str) -> None:
    source, target = write_lines(tmp_path / "in.jsonl", {"prompt": "Tea"}), tmp_path / "out"
    target.write_text(content)
    check_error(generate("--input", source, "--output", target), InvalidRequest, "name another --output")
    assert target.read_text() == content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a", "id": 2}\n{"prompt": "b"}\n', "line 2 of .* repeats the id 2"),
        ("\n", "has no requests"),
        (None, "cannot be read: No such file"),
    ],
)
def test_an_unusable_input_is_rejected_before_a_model_is_loaded(
    tmp_path: Path, content: str | None, message: str
) -> None:
    source = tmp_path / "in.jsonl"
    if content is not None:
        source.write_text(content)
    check_error(generate("--input", source, "--url", "http://127.0.0.1:9"), InvalidRequest, message)


@pytest.mark.parametrize("target", ["folder", "file/answers", "missing/answers", "loop"])
def test_an_unusable_output_is_rejected_before_a_model_is_loaded(tmp_path: Path, target: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    source = write_lines(tmp_path / "in.jsonl", {"prompt": "Tea"})
    ran = generate("--input", source, "--output", tmp_path / target, "--url", "http://127.0.0.1:9")
    check_error(ran, InvalidRequest, f"{target} cannot be written: ")


def test_a_prompt_and_a_batch_are_wrong_usage(tmp_path: Path) -> None:
    result = generate("Tea", "--input", tmp_path / "in.jsonl")
    assert result.exit_code == 2
    assert "a batch has its prompts in --input" in result.stderr


def test_a_pipe_gets_the_answers_in_the_order_of_standard_input(tiny_server: LiveServer) -> None:
    lines = "".join(f"{json.dumps(line)}\n" for line in PROMPTS)
    result = generate("--input", "-", "--url", tiny_server.url, stdin="\ufeff" + lines)
    assert [json.loads(line)["id"] for line in result.stdout.splitlines()] == [*range(1, 13)]


def test_on_a_terminal_the_progress_is_a_bar(
    tiny_server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_lines(tmp_path / "in.jsonl", *PROMPTS)
    monkeypatch.setenv("FORCE_COLOR", "1")
    result = generate("--input", source, "--output", tmp_path / "out", "--url", tiny_server.url)
    assert "/12" in result.stderr
    assert "0 failed, left" in result.stderr


class Server:
    """A server of one model; `answer(prompt)` returns the status and the text of a completion."""

    def __init__(self, answer: Any) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._reply(200, {"data": [{"id": "m"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                status, text = answer(body["prompt"][0])
                choice = {"text": text, "token_ids": [1], "prompt_token_ids": [1], "logprobs": None}
                if status == 0:  # without a reply, the connection is closed
                    return
                self._reply(status, {"choices": [choice | {"finish_reason": "stop", "stop_reason": None}]})

            def _reply(self, status: int, payload: object) -> None:
                content = json.dumps(payload).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                self.send_header("retry-after-ms", "1")
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"


@contextmanager
def serving(answer: Any) -> Iterator[Server]:
    server = Server(answer)
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.http.shutdown()
        thread.join()
        server.http.server_close()


def test_as_many_lines_as_wanted_are_asked_at_the_same_time(tmp_path: Path) -> None:
    together = threading.Barrier(4)

    def answer(prompt: str) -> tuple[int, str]:
        together.wait(PATIENCE_S)
        return 200, prompt

    source = write_lines(tmp_path / "in.jsonl", *({"prompt": f"{n}"} for n in range(8)))
    with serving(answer) as server:
        result = generate("--input", source, "--url", server.url, "--max-concurrency", 4)
    assert [json.loads(line)["text"] for line in result.stdout.splitlines()] == [*"01234567"]


def test_an_overloaded_server_is_asked_again(tmp_path: Path) -> None:
    asked: list[str] = []

    def answer(prompt: str) -> tuple[int, str]:
        asked.append(prompt)
        return (429 if len(asked) == 1 else 200), prompt

    source = write_lines(tmp_path / "in.jsonl", {"prompt": "Tea"})
    with serving(answer) as server:
        assert generate("--input", source, "--url", server.url).exit_code == 0
    assert asked == ["Tea", "Tea"]


def test_without_the_server_the_batch_stops_and_keeps_its_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(prompt: str) -> tuple[int, str]:
        return (0 if prompt == "end" else 200), prompt

    monkeypatch.setattr(batch, "_MAX_RETRIES", 0)
    source = write_lines(tmp_path / "in.jsonl", {"prompt": "a"}, {"prompt": "end"}, {"prompt": "b"})
    target = tmp_path / "out.jsonl"
    with serving(answer) as server:
        flags = ("--url", server.url, "--max-concurrency", 1)
        check_error(generate("--input", source, "--output", target, *flags), Unreachable)
    assert [row["id"] for row in rows_of(target)] == [1]


def test_ctrl_c_keeps_the_answers_and_exits_with_130(tmp_path: Path) -> None:
    is_asked, ends = threading.Event(), threading.Event()

    def answer(prompt: str) -> tuple[int, str]:
        if prompt == "wait":
            is_asked.set()
            ends.wait(PATIENCE_S)
        return 200, prompt

    source = write_lines(tmp_path / "in.jsonl", {"prompt": "a"}, {"prompt": "wait"})
    target = tmp_path / "out.jsonl"
    with serving(answer) as server:
        flags = (
            "--input",
            str(source),
            "--output",
            str(target),
            "--url",
            server.url,
            "--max-concurrency",
            "1",
        )
        command = [sys.executable, "-m", "genserve", "generate", *flags]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert is_asked.wait(PATIENCE_S)
                process.send_signal(signal.SIGINT)
                _, stderr = process.communicate(timeout=PATIENCE_S)
            finally:
                process.kill()
                ends.set()
    assert process.returncode == 130
    assert stderr == f"stopped; the same command goes on from what is in {target}\n"
    assert [row["id"] for row in rows_of(target)] == [1]
