"""Inference service: the methods of `inference.GRPCInferenceService`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from genserve.errors import GenserveError, InferenceError, Status
from genserve.inference import Parameter
from genserve.repository.load_errors import stopping
from genserve.repository.model_versions import ModelVersion
from genserve.request_context import RequestContext, current_request
from genserve.server.access.access_control import HEALTH, INFERENCE, METADATA, Rights
from genserve.server.access.key_ring import CURRENT_KEY
from genserve.server.http.offload import COST_PER_OBJECT_BYTE, offload_if_large
from genserve.server.kserve.grpc.administration import Administration
from genserve.server.kserve.grpc.infer_messages import GrpcRequest, read_request, write_response
from genserve.server.kserve.grpc.infer_stream import InferStream
from genserve.server.kserve.grpc.rpc_method import (
    MalformedMessage,
    abort,
    abort_malformed,
    begin_request,
    log_call,
    requires,
    rpc_method,
)
from genserve.server.kserve.model_metadata import (
    EXTENSIONS,
    find_for_statistics,
    model_metadata,
    statistics_json,
)
from genserve.server.kserve.running_inference import RunningInference
from genserve.server.kserve.state import KServeState
from genserve.server.kserve.triton_parsing import forwarded_headers, read_version
from genserve.server.services import Services
from genserve.tracing import Trace
from genserve.version import __version__

# The methods have the protocol's names, which are not Python's.
# ruff: noqa: N802
_GRPC_ERROR = ("triton_grpc_error", "true")     # metadata of a stream that ends at the first error


class InferenceService(Administration):
    """KServe v2 and Triton's extensions over the models of one server; runs on its event loop."""

    def __init__(self, services: Services, state: KServeState) -> None:
        """Construct it on the event loop."""
        super().__init__(services, state)
        self._dispatcher = state.dispatcher()
        self._forwarded = services.settings.grpc_header_forward_pattern

    @rpc_method(HEALTH)
    async def ServerLive(self, request: Any, context: Any) -> Any:
        """Report that the server runs."""
        return service_pb2.ServerLiveResponse(live=True)

    @rpc_method(HEALTH)
    async def ServerReady(self, request: Any, context: Any) -> Any:
        """Report whether the server is ready."""
        return service_pb2.ServerReadyResponse(ready=await self._services.is_ready())

    @rpc_method(HEALTH)
    async def ModelReady(self, request: Any, context: Any) -> Any:
        """Report whether a model is ready; false for unknown models."""
        version = read_version(request.version)
        ready = await self._services.readiness.of_model(request.name, version)
        return service_pb2.ModelReadyResponse(ready=ready)

    @rpc_method(METADATA)
    async def ServerMetadata(self, request: Any, context: Any) -> Any:
        """Return the server's name, version and extensions."""
        name = self._services.settings.server_id
        return service_pb2.ServerMetadataResponse(name=name, version=__version__, extensions=EXTENSIONS)

    @rpc_method(METADATA)
    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        """Return the inputs, outputs and versions of a model."""
        model = self._find(request.name, request.version)
        versions = [model.version] if request.version else self._models.versions(model.name)
        return service_pb2.ModelMetadataResponse(**model_metadata(model.config, versions=versions))

    @rpc_method(Rights(part="model-config"))
    async def ModelConfig(self, request: Any, context: Any) -> Any:
        """Return the complete config of a model."""
        config = self._find(request.name, request.version).config.message
        response = service_pb2.ModelConfigResponse()
        response.config.MergeFromString(config.SerializeToString())  # which may be of another generated class
        return response

    @rpc_method(Rights(part="statistics"))
    async def ModelStatistics(self, request: Any, context: Any) -> Any:
        """Return the inference statistics of a version, of a model or, without a name, of all."""
        found = find_for_statistics(self._models, request.name, read_version(request.version))
        return service_pb2.ModelStatisticsResponse(**statistics_json(found))

    @rpc_method(INFERENCE)
    async def ModelInfer(self, request: Any, context: Any) -> Any:
        """Run a model with one response; cancelled when the client disconnects."""
        trace = self._sampled(request)
        if trace is None:
            return await self._infer(request, context)
        context.add_done_callback(lambda _context: _close(trace))
        try:
            return await self._infer(request, context, trace=trace)
        finally:
            trace.record("GRPC_SEND_START")

    @requires(INFERENCE)
    async def ModelStreamInfer(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        """Run a stream of requests to any models; cancelled when the client disconnects."""
        stream = InferStream(
            lambda request: self._submit_of_stream(request, context),
            begin=partial(
                begin_request, context=context, client=context.peer(), spans=self._services.request_spans
            ),
            log=self._end_of_stream,
            ends_at_error=_GRPC_ERROR in (context.invocation_metadata() or ()),
        )
        self._services.num_grpc_calls += 1
        try:
            async for message in stream.answers(request_iterator):
                yield message
        except MalformedMessage as error:
            await abort_malformed(context, error, method="ModelStreamInfer")
        except GenserveError as error:
            await abort(context, error)
        finally:
            self._services.num_grpc_calls -= 1

    def _end_of_stream(self, logged: RequestContext, code: grpc.StatusCode) -> None:
        """Log a request of a stream that has ended."""
        self._services.keys.end(logged)
        logged.end_uses()
        log_call(logged, code, method="ModelStreamInfer")

    async def _infer(self, request: Any, context: Any, *, trace: Trace | None = None) -> Any:
        parsed, running = await self._submit(request, context, streams=False, trace=trace)
        with running:
            response = await running.single()
        if response.error is not None:
            raise response.error
        return await write_response(response, request=parsed, inference=running.inference)

    async def _submit_of_stream(self, message: Any, context: Any) -> tuple[GrpcRequest, RunningInference]:
        trace = self._sampled(message)
        try:
            return await self._submit(message, context, streams=True, trace=trace)
        except BaseException:
            if trace is not None:
                trace.close()
            raise

    def _sampled(self, message: Any) -> Trace | None:
        """Return the trace of a request that has just arrived; None: it is not traced."""
        trace = self._state.trace_settings.sample(message.model_name)
        if trace is not None:
            trace.record("GRPC_WAITREAD_START")  # gRPC has read it before this call
            trace.record("GRPC_WAITREAD_END")
        return trace

    async def _submit(
        self, message: Any, context: Any, *, streams: bool, trace: Trace | None
    ) -> tuple[GrpcRequest, RunningInference]:
        self._services.keys.admit(current_request(), CURRENT_KEY.get())
        if self._services.draining:
            raise stopping()
        await self._services.use_model(message.model_name)
        model = self._find(message.model_name, message.model_version)
        if model.config.decoupled and not streams:
            raise InferenceError(
                "ModelInfer RPC doesn't support models with decoupled transaction policy",
                status=Status.UNSUPPORTED,
                remedy="call ModelStreamInfer, or POST /v2/models/NAME/generate_stream over HTTP",
            )
        request = await offload_if_large(
            _parse_cost(message),
            read_request,
            message,
            model=model,
            shared_memory=self._state.shared_memory,
            headers=self._headers(context),
        )
        if trace is not None:
            request = replace(request, inference=replace(request.inference, cause=trace.root))
        return request, RunningInference(request.inference, server=self._models, dispatcher=self._dispatcher)

    def _find(self, name: str, version: str) -> ModelVersion:
        return self._models.find(name, read_version(version))

    def _headers(self, context: Any) -> Mapping[str, Parameter]:
        if not self._forwarded:
            return {}
        metadata = context.invocation_metadata() or ()
        texts = ((name, value) for name, value in metadata if isinstance(value, str))
        return forwarded_headers(texts, self._forwarded)


def _close(trace: Trace) -> None:
    trace.record("GRPC_SEND_END")
    trace.close()


def _parse_cost(message: Any) -> int:
    """Return the cost of parsing a `ModelInferRequest`; numbers in raw form cost nothing."""
    one_by_one = any(spec.datatype == "BYTES" or spec.HasField("contents") for spec in message.inputs)
    return message.ByteSize() * COST_PER_OBJECT_BYTE if one_by_one else 0
