"""tritonclient's stub for the server of a module."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from tests.server.kserve.grpc.live_grpc import LiveGrpc


@pytest.fixture(scope="module")
def stub(server: LiveGrpc) -> Iterator[service_pb2_grpc.GRPCInferenceServiceStub]:
    with grpc.insecure_channel(server.address) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)
