from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from genserve.errors import InvalidRequest, ModelNotFound, Unauthenticated, Unreachable
from tests.bench.mock_server import KEY, MockServer
from tests.support.command_line import Ended, check_error, invoke
from tests.support.live_server import LiveServer

QUICK = ("--input-len", "4", "--output-len", "12", "--num-prompts", "4", "--seed", "1")


@pytest.fixture(scope="module")
def mock() -> Iterator[MockServer]:
    with MockServer() as server:
        yield server


def bench(*flags: str) -> Ended:
    return invoke(["bench", *QUICK, *flags])


def runs(*flags: str) -> list[dict]:
    ran = bench("--json", *flags)
    assert ran.exit_code == 0
    return json.loads(ran.stdout)["runs"]


@pytest.mark.parametrize(
    "backend",
    [
        "openai-chat",
        pytest.param("openai", marks=pytest.mark.extended),
        pytest.param("tgi", marks=pytest.mark.extended),
        "kserve-generate",
    ],
)
def test_each_concurrency_is_measured_and_printed(tiny_server: LiveServer, backend: str) -> None:
    levels = ("--concurrency", "1", "--max-concurrency", "3")
    ran = bench("--url", tiny_server.url, "--backend", backend, *levels)
    assert ran.exit_code == 0
    assert ran.stdout.startswith("1 at once: 4 requests in ")
    assert "\n3 at once: 4 requests in " in ran.stdout
    rows = [line.split() for line in ran.stdout.splitlines() if line.startswith("whole answer (E2EL)")]
    assert len(rows) == 2
    for row in rows:
        mean, p50, p90, p99 = map(float, row[3:])
        assert mean > 0
        assert p50 <= p90 <= p99


def test_the_json_has_vllms_names(mock: MockServer, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    ran = bench("--url", mock.url, "--json", "--output", str(file), "--concurrency", "2", "--save-detailed")
    document = json.loads(ran.stdout)
    assert document == json.loads(file.read_text())
    assert (document["model"], document["backend"]) == ("good", "openai-chat")
    assert not document["is_interrupted"]
    [run] = document["runs"]
    assert (run["completed"], run["failed"], run["max_concurrency"], run["request_rate"]) == (4, 0, 2, "inf")
    assert (run["total_input_tokens"], run["total_output_tokens"]) == (4 * 7, 4 * 5)
    assert run["output_tokens_counted_by"] == "server"
    assert run["mean_ttft_ms"] > 0
    assert {"p50_itl_ms", "p90_tpot_ms", "p99_e2el_ms"} <= run.keys()
    assert run["output_lens"] == [5] * 4
    assert [len(gaps) for gaps in run["itls"]] == [4] * 4


def test_an_open_loop_sends_at_each_rate(mock: MockServer) -> None:
    found = runs("--url", mock.url, "--request-rate", "200", "--request-rate", "400", "--burstiness", "2")
    assert [(run["request_rate"], run["max_concurrency"], run["completed"]) for run in found] == [
        (200, None, 4),
        (400, None, 4),
    ]
    assert all(run["duration"] >= 4 / run["request_rate"] for run in found)


def test_a_ramp_goes_from_one_rate_to_another(mock: MockServer) -> None:
    ramp = ("--ramp-up-strategy", "linear", "--ramp-up-start-rps", "100", "--ramp-up-end-rps", "200")
    [run] = runs("--url", mock.url, *ramp)
    assert (run["ramp_up_strategy"], run["ramp_up_start_rps"], run["ramp_up_end_rps"]) == ("linear", 100, 200)
    assert run["completed"] == 4
    assert "request_rate" not in run
    assert bench("--url", mock.url, *ramp).stdout.startswith("100 to 200 requests/s: 4 requests in ")


def test_several_loads_are_compared_in_one_table(mock: MockServer) -> None:
    ran = bench("--url", mock.url, "--concurrency", "1", "--concurrency", "2", "--percentiles", "25,75,95")
    headings, *rows = ran.stdout.splitlines()[-3:]
    names = ["requests/s", "tokens/s", "TTFT p25 ms", "TTFT p95 ms", "ITL p25 ms", "ITL p95 ms"]
    assert headings.split() == " ".join(names).split()
    assert [row.split()[:3] for row in rows] == [["1", "at", "once"], ["2", "at", "once"]]


@pytest.mark.parametrize("levels", [pytest.param(["1"], marks=pytest.mark.extended), ["1", "2"]], ids=str)
def test_the_plot_has_a_line_per_load(mock: MockServer, tmp_path: Path, levels: list[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "bench.svg"
    flags = [word for level in levels for word in ("--concurrency", level)]
    assert bench("--url", mock.url, *flags, "--plot", str(path)).exit_code == 0
    words = re.findall("<!-- (.*) -->", path.read_text(encoding="utf-8"))
    assert {"first token (TTFT), ms", "chunks with text per second"} <= set(words)
    for level in levels:
        panels_with_the_load = words.count(f"{level} at once")
        assert panels_with_the_load == (4 if levels == ["1"] else 6)
    ran = bench("--url", mock.url, "--plot", str(tmp_path / "bench.txt"))
    check_error(ran, InvalidRequest, "not an image format")


def test_progress_is_a_line_and_ctrl_c_prints_what_was_measured(mock: MockServer, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "genserve", "bench", "good", "--url", mock.url, "--tokenizer", "none"]
    command += ["--concurrency", "1", "--num-prompts", "100000", "--output", str(report)]
    progress = rb"1 at once: [1-9][\d,]*/100,?000 done, 1 running, 0 failed, \d+ tokens/s"
    ours, its = pty.openpty()
    with (
        os.fdopen(ours, "rb", buffering=0) as terminal,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=its, text=True) as process,
    ):
        os.close(its)
        shown = b""
        while not re.search(progress, shown):
            shown += terminal.read(4096)
        process.send_signal(signal.SIGINT)
        printed = process.communicate()[0]
    assert process.returncode == 130
    assert b"Traceback" not in shown
    assert re.match(r"1 at once: [1-9][\d,]* requests in ", printed)
    document = json.loads(report.read_text())
    assert document["is_interrupted"]
    assert document["runs"][0]["completed"] > 0


def test_a_duration_ends_an_endless_load(mock: MockServer) -> None:
    command = ["bench", "--json", "--url", mock.url, "--duration", "0.5", "--max-concurrency", "2"]
    ran = invoke(command)
    [run] = json.loads(ran.stdout)["runs"]
    assert run["completed"] > 0
    assert run["failed"] == 0


@pytest.mark.parametrize(
    "limits",
    [
        ["--goodput", "ttft:60000", "tpot:60000", "e2el:60000"],
        ["--goodput", "ttft:60000", "--goodput", "tpot:60000"],
        ["--goodput", "ttft:60000 e2el:60000"],
    ],
)
def test_goodput_limits_may_be_written_as_for_vllm(mock: MockServer, limits: list[str]) -> None:
    [run] = runs("--url", mock.url, "--concurrency", "2", *limits)
    assert run["request_goodput"] == run["request_throughput"] > 0


def test_the_prompts_of_a_file_are_sent_in_order(mock: MockServer, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one\ntwo\nthree\n")
    mock.bodies.clear()
    command = ["bench", "--url", mock.url, "--concurrency", "1", "--dataset-path", str(path)]
    ran = invoke(command)
    assert "1 at once: 3 requests" in ran.stdout
    sent = [body["messages"][0]["content"] for body in mock.bodies]
    assert sent == ["one", "two", "three", "one"], "the first is the warm-up"
    assert "ignore_eos" not in mock.bodies[0]


@pytest.mark.parametrize(
    ("line", "backend", "right"),
    [
        ({"messages": [{"role": "user", "content": "hi"}]}, "openai", "openai-chat"),
        ({"inputs": [{"name": "x"}]}, "openai-chat", "kserve-infer"),
    ],
)
def test_prompts_that_the_dialect_cannot_write_are_rejected(
    mock: MockServer, tmp_path: Path, line: dict, backend: str, right: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(line))
    ran = bench("--url", mock.url, "--dataset-path", str(path), "--backend", backend)
    check_error(ran, InvalidRequest, f"{backend} does not take .*--backend {right}")


def test_the_key_and_headers_are_sent(mock: MockServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GENSERVE_API_KEY", KEY)
    runs("--url", mock.url, "--concurrency", "1", "--header", "x-team=a=b")
    assert mock.headers[-1]["authorization"] == f"Bearer {KEY}"
    assert mock.headers[-1]["x-team"] == "a=b"
    monkeypatch.setenv("GENSERVE_API_KEY", "wrong")
    check_error(bench("--url", mock.url), Unauthenticated)


def test_errors_are_counted_and_printed(mock: MockServer) -> None:
    mock.asked.clear()
    ran = bench("busy", "--url", mock.url, "--concurrency", "1", "--num-warmups", "0")
    assert ran.exit_code == 0
    assert "1 at once: 2 requests" in ran.stdout
    assert ", 2 failed" in ran.stdout
    assert "  2 x http_429: later" in ran.stdout


def test_without_any_complete_answer_the_exit_code_is_1(mock: MockServer) -> None:
    ran = bench("500", "--url", mock.url, "--concurrency", "1", "--num-warmups", "0")
    assert ran.exit_code == 1
    assert "  4 x http_500: no luck" in ran.stdout


def test_files_without_a_folder_are_rejected_before_anything_is_measured(tmp_path: Path) -> None:
    ran = bench("--url", "http://127.0.0.1:9", "--output", str(tmp_path / "missing" / "bench.json"))
    check_error(ran, InvalidRequest, "for the results")


def test_a_failed_warm_up_ends_the_command(tiny_server: LiveServer) -> None:
    check_error(bench("nowhere", "--url", tiny_server.url), InvalidRequest, "there is no model 'nowhere'")
    check_error(bench("--url", tiny_server.url, "--endpoint", "/v3/chat"), InvalidRequest, "http_404")


def test_a_server_with_several_models_needs_a_name() -> None:
    async def models(_request: Request) -> Response:
        return JSONResponse({"data": [{"id": "a"}, {"id": "b"}]})

    with (
        MockServer(more=[Route("/v1/models", models)]) as server,
    ):
        check_error(bench("--url", server.url), ModelNotFound, "name one of: a, b")


def test_a_kserve_server_lists_its_models_in_its_index() -> None:
    async def models(_request: Request) -> Response:
        return JSONResponse({"error": "not found"}, status_code=404)

    async def index(_request: Request) -> Response:
        return JSONResponse([{"name": "good", "state": "READY"}])

    routes = [Route("/v1/models", models), Route("/v2/repository/index", index, methods=["POST"])]
    with MockServer(more=routes) as server:
        assert bench("--url", server.url).exit_code == 0
        assert server.bodies[0]["model"] == "good"


def test_without_a_server_it_raises_unreachable() -> None:
    check_error(bench("--url", "http://127.0.0.1:9"), Unreachable, "genserve serve")
    ran = bench("named", "--url", "http://127.0.0.1:9", "--tokenizer", "none")
    check_error(ran, Unreachable, "genserve serve")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--url", "ftp://127.0.0.1"], "is not http://HOST:PORT"),
        (["--goodput", "itl:5"], "is not ttft:MS, tpot:MS or e2el:MS"),
        (["--request-rate", "0"], "is not a number above 0"),
        (["--request-rate", "fast"], "is not a number above 0"),
        (["--ramp-up-strategy", "linear"], "needs --ramp-up-start-rps"),
        (["--ramp-up-start-rps", "2"], "needs --ramp-up-start-rps"),
        (["--burstiness", "0"], "not in the range x>=0.001"),
        (["--percentiles", "50,101"], "beyond 0 to 100"),
        (["--extra-body", "{"], "is not JSON"),
        (["--extra-body", "3"], "is not an object"),
        (["--header", "x-team"], "is not NAME=VALUE"),
    ],
)
def test_wrong_values_are_wrong_usage(flags: list[str], message: str) -> None:
    ran = bench(*flags)
    assert ran.exit_code == 2
    assert message in " ".join(ran.stderr.replace("│", " ").split())
