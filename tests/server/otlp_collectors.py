"""Collectors of OpenTelemetry traces, over gRPC and over HTTP, on free ports of 127.0.0.1."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from tests.support.live_server import wait_until

_Answer = trace_service_pb2.ExportTraceServiceResponse


class Collector:
    """Keeps the spans that it receives: `with GrpcCollector() as collector: ... collector.span("id")`."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []

    def keep(self, request: Any) -> None:
        for group in request.resource_spans:
            self.resources.append(attributes_of(group.resource))
            for scope in group.scope_spans:
                self.spans.extend(scope.spans)

    def span(self, request_id: str) -> Any:
        """The only span of a request, which may come after the response."""

        def found() -> list[Any]:
            return [s for s in self.spans if attributes_of(s)["gen_ai.request.id"] == request_id]

        wait_until(found)
        [span] = found()
        return span

    def __enter__(self) -> Self:
        return self


class GrpcCollector(Collector, trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        super().__init__()
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(self, request: Any, context: Any) -> Any:
        self.keep(request)
        return _Answer()

    def __exit__(self, *_raised: object) -> None:
        self._server.stop(0)


class HttpCollector(Collector):
    def __init__(self) -> None:
        super().__init__()
        keep = self.keep

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert (self.path, self.headers["Content-Type"]) == ("/v1/traces", "application/x-protobuf")
                body = self.rfile.read(int(self.headers["Content-Length"]))
                keep(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
                answer = _Answer().SerializeToString()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def __exit__(self, *_raised: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def attributes_of(owner: Any) -> dict[str, Any]:
    """The attributes of a span or a resource."""
    return {item.key: _value(item.value) for item in owner.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    found = getattr(value, kind)
    return [_value(item) for item in found.values] if kind == "array_value" else found
