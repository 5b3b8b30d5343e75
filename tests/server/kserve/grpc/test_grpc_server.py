from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.support.live_server import line_with, serving
from tests.support.python_models import write_model

MESSAGE_BYTES = 96 * 2**20
CALLS = [
    "/inference.GRPCInferenceService/ModelInfer",
    "/inference.GRPCInferenceService/ModelStreamInfer",
    "/inference.GRPCInferenceService/RepositoryModelLoad",
    "/inference.GRPCInferenceService/Unknown",
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, str]]:
    """The id of a process that needs an API key, and its gRPC address."""
    if not sys.platform.startswith("linux"):
        pytest.skip("the memory of a process is read from /proc")
    repository = tmp_path_factory.mktemp("repository")
    write_model(repository, "one")
    with serving(repository, key="secret") as process:
        yield process.pid, line_with(process, "over gRPC at").split()[-1]


def peak_bytes(process_id: int) -> int:
    text = Path(f"/proc/{process_id}/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s*(\d+) kB", text)[1])


@pytest.mark.parametrize("method", CALLS)
def test_without_the_key_no_message_is_read_into_memory(server, method):
    process_id, address = server
    options = [("grpc.max_send_message_length", -1)]
    before = peak_bytes(process_id)
    with grpc.insecure_channel(address, options=options) as channel:
        call = channel.stream_stream(method, request_serializer=None, response_deserializer=None)
        answers = call(iter([bytes(MESSAGE_BYTES)]), timeout=60)
        code = None
        try:
            next(answers)
            answers.cancel()
        except (grpc.RpcError, StopIteration):
            code = answers.code()
    if not method.endswith("Unknown") and "Health" not in method:
        assert code is grpc.StatusCode.UNAUTHENTICATED
    assert peak_bytes(process_id) - before < MESSAGE_BYTES / 4
