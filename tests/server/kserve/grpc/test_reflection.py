"""Reflection: a client without .proto files finds the services, and calls them with what it was told."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.fakes.inference_server import fake_model
from tests.server.kserve.grpc.live_grpc import LiveGrpc


@pytest.fixture(scope="module")
def channel() -> Iterator[grpc.Channel]:
    with LiveGrpc([fake_model("m")]) as server, grpc.insecure_channel(server.address) as channel:
        yield channel


@pytest.mark.parametrize(
    ("service", "method", "request_fields", "answer_fields"),
    [
        ("inference.GRPCInferenceService", "ModelReady", {"name": "m"}, {"ready": True}),
        ("grpc.health.v1.Health", "Check", {}, {"status": 1}),
    ],
)
def test_a_client_calls_what_the_server_describes(channel, service, method, request_fields, answer_fields):
    database = ProtoReflectionDescriptorDatabase(channel)
    assert service in database.get_services()
    described = DescriptorPool(database).FindServiceByName(service).methods_by_name[method]
    request, answer = GetMessageClass(described.input_type), GetMessageClass(described.output_type)
    call = channel.unary_unary(
        f"/{service}/{method}",
        request_serializer=request.SerializeToString,
        response_deserializer=answer.FromString,
    )
    got = call(request(**request_fields), timeout=30)
    assert {name: getattr(got, name) for name in answer_fields} == answer_fields


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_both_versions_of_the_protocol_list_every_service(channel, version):
    call = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="no.such.Symbol"),
    ]
    services, unknown = call(iter(requests), timeout=30)
    assert [service.name for service in services.list_services_response.service] == [
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
        "inference.GRPCInferenceService",
    ]
    assert unknown.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
