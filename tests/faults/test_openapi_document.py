"""The OpenAPI document against the server: schemathesis sends what fits it and what does not.

One of schemathesis's checks is left out: that the server accepts whatever fits a schema. No schema can say
that a prompt fits into the context, or which parameters exclude each other.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.shared_server import SharedServer

# A process of its own: in Python 3.11, `ast`, of which Hypothesis has need, may fail beside other threads.
CHECKS = ("--checks=all", "--exclude-checks=positive_data_acceptance")
# `GET /` is a page for browsers, which the document leaves out; `POST /` is a route as `/generate` is.
RUN = (sys.executable, "-m", "schemathesis.cli", "run", *CHECKS, "--exclude-path=/", "--seed=1", "--no-color")


def run(server: SharedServer, folder: Path, *options: str) -> str:
    command = [*RUN, *options, f"{server.url}/openapi.json"]
    ended = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


@pytest.mark.extended
def test_every_route_answers_as_documented(server: SharedServer, tmp_path: Path) -> None:
    report = run(server, tmp_path, "--phases=fuzzing", "--max-examples=2")
    num_routes = len([*server.get("/openapi.json").json()["paths"]])
    assert int(report.partition("Tested: ")[2].split()[0]) >= num_routes - 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_route_answers_as_documented_for_long(server: SharedServer, tmp_path: Path) -> None:
    run(server, tmp_path, "--phases=examples,coverage,fuzzing", "--max-examples=100")


def test_the_document_has_the_errors_of_each_dialect(server: SharedServer) -> None:
    document = server.get("/openapi.json").json()
    for path, name, status in (
        ("/v1/chat/completions", "OpenaiError", "400"),
        ("/v1/messages", "AnthropicError", "400"),
        ("/api/chat", "OllamaError", "400"),
        ("/generate", "TgiError", "422"),
    ):
        responses = document["paths"][path]["post"]["responses"]
        schema = responses[status]["content"]["application/json"]["schema"]
        assert schema == {"$ref": f"#/components/schemas/{name}"}
        assert {"401", "404", "408", "413", "415", "429", "503"} <= responses.keys()
    assert "422" not in document["paths"]["/v1/chat/completions"]["post"]["responses"]


@pytest.mark.parametrize(
    ("path", "methods"),
    [("/ping", "GET, POST"), ("/v1/responses/none", "DELETE, GET"), ("/generate", "POST")],
)
def test_a_rejected_method_names_all_that_a_path_has(server: SharedServer, path: str, methods: str) -> None:
    data = f"OPTIONS {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    response = server.exchange(data)
    assert (response.status, response.headers["allow"]) == (405, methods)
