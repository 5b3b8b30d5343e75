"""Service: the methods of `inference.GRPCInferenceService`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from functools import wraps
from typing import Any

from tritonclient.grpc import service_pb2, service_pb2_grpc

from genserve.errors import GenserveError, InferenceError, Status
from genserve.inference import Parameter
from genserve.kserve.models import Models, Served
from genserve.kserve.outbox import ResponseOutbox
from genserve.server.grpc.codes import status_code
from genserve.server.grpc.descriptions import model_metadata, model_statistics, server_metadata
from genserve.server.grpc.infer_request import GrpcRequest, read_request
from genserve.server.grpc.infer_response import write_response
from genserve.server.grpc.stream import InferStream
from genserve.server.services import Services

__all__ = ["Service"]

_GRPC_ERROR = ("triton_grpc_error", "true")     # metadata of a stream that shall end at an error
_REMEDY = "genserve-remedy"                     # trailing metadata of an error

# The methods have the protocol's names, which are not Python's.
# ruff: noqa: N802


def _method(answer: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
    @wraps(answer)
    async def method(self: Service, request: Any, context: Any) -> Any:
        try:
            return await answer(self, request, context)
        except GenserveError as error:
            await _abort(context, error)

    return method


class Service(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]  # generated, untyped
    """KServe v2 and Triton's extensions over one server's models; runs on its event loop."""

    def __init__(self, services: Services, *, event_loop: asyncio.AbstractEventLoop) -> None:
        self._services = services
        self._models: Models = services.repository
        self._outbox = ResponseOutbox(event_loop)
        pattern = services.settings.grpc_header_forward_pattern
        self._forwards = re.compile(pattern, re.IGNORECASE).search if pattern else None

    @_method
    async def ServerLive(self, request: Any, context: Any) -> Any:
        """Whether the server runs."""
        return service_pb2.ServerLiveResponse(live=self._models.live)

    @_method
    async def ServerReady(self, request: Any, context: Any) -> Any:
        """Whether every model that was to be loaded answers."""
        return service_pb2.ServerReadyResponse(ready=self._models.ready and not self._services.draining)

    @_method
    async def ModelReady(self, request: Any, context: Any) -> Any:
        """Whether a model answers; false, too, for one that there is not."""
        try:
            served = self._models.served(request.name, request.version)
        except InferenceError as error:
            if error.status is Status.INVALID_ARG:
                raise
            return service_pb2.ModelReadyResponse(ready=False)
        # A Python model may take its time to find out.
        ready = await asyncio.to_thread(self._models.is_ready, served.name, served.version)
        return service_pb2.ModelReadyResponse(ready=ready)

    @_method
    async def ServerMetadata(self, request: Any, context: Any) -> Any:
        """Name, version and extensions."""
        return server_metadata(self._services.settings.server_id)

    @_method
    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        """Inputs, outputs and versions of a model."""
        served = self._models.served(request.name, request.version)
        return model_metadata(served, versions=self._models.versions(served.name))

    @_method
    async def ModelConfig(self, request: Any, context: Any) -> Any:
        """The complete config of a model."""
        message = self._models.served(request.name, request.version).config.message
        response = service_pb2.ModelConfigResponse()
        response.config.MergeFromString(message.SerializeToString())
        return response

    @_method
    async def ModelInfer(self, request: Any, context: Any) -> Any:
        """Run a model that gives one response; cancelled when the client leaves."""
        self._check_open()
        served = self._models.served(request.model_name, request.model_version)
        if served.config.decoupled:
            raise InferenceError(
                "ModelInfer RPC doesn't support models with decoupled transaction policy",
                status=Status.UNSUPPORTED,
                remedy="call ModelStreamInfer, or POST /v2/models/NAME/generate_stream over HTTP",
            )
        asked = self._read(request, served, headers=self._headers(context))
        inference, response = await self._outbox.ask(self._models, asked.inference)
        return write_response(response, inference=inference)

    async def ModelStreamInfer(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        """Run many requests, of any models; cancelled when the client leaves."""
        headers = self._headers(context)
        stream = InferStream(
            self._models,
            self._outbox,
            read=lambda request: self._read_of_stream(request, headers),
            ends_at_error=_GRPC_ERROR in (context.invocation_metadata() or ()),
        )
        try:
            async for message in stream.answers(request_iterator):
                yield message
        except GenserveError as error:
            await _abort(context, error)

    @_method
    async def ModelStatistics(self, request: Any, context: Any) -> Any:
        """What a version, a model or, without a name, every model has done."""
        return service_pb2.ModelStatisticsResponse(
            model_stats=map(model_statistics, self._measured(request.name, request.version))
        )

    @_method
    async def RepositoryIndex(self, request: Any, context: Any) -> Any:
        """Every version of every model, or those that answer."""
        _check_repository(request)
        response = service_pb2.RepositoryIndexResponse()
        for entry in self._models.index():
            if entry.state == "READY" or not request.ready:
                response.models.add(
                    name=entry.name,
                    version="" if entry.version is None else str(entry.version),
                    state=entry.state or "",
                    reason=entry.reason,
                )
        return response

    @_method
    async def RepositoryModelLoad(self, request: Any, context: Any) -> Any:
        """Load a model, and answer when it is loaded."""
        _check_repository(request)
        config, files = "", {}
        for name, parameter in request.parameters.items():
            if name == "config":
                config = _load_parameter(name, parameter, "string_param")
            elif name.startswith("file:"):
                files[name] = _load_parameter(name, parameter, "bytes_param")
            else:
                raise InferenceError(f"unrecognized load parameter '{name}'.")
        await asyncio.to_thread(self._models.load, request.model_name, config=config, files=files or None)
        return service_pb2.RepositoryModelLoadResponse()

    @_method
    async def RepositoryModelUnload(self, request: Any, context: Any) -> Any:
        """Begin to unload a model."""
        _check_repository(request)
        dependents = False
        if "unload_dependents" in request.parameters:
            parameter = request.parameters["unload_dependents"]
            if parameter.WhichOneof("parameter_choice") != "bool_param":
                raise InferenceError(
                    "invalid value type for 'unload_dependents' parameter, expected bool_param."
                )
            dependents = parameter.bool_param
        await asyncio.to_thread(self._models.unload, request.model_name, dependents=dependents)
        return service_pb2.RepositoryModelUnloadResponse()

    def _check_open(self) -> None:
        if self._services.draining:
            raise InferenceError(
                "the server is stopping", status=Status.UNAVAILABLE, remedy="try again on another server"
            )

    def _read(self, message: Any, served: Served, *, headers: Mapping[str, Parameter]) -> GrpcRequest:
        # Without a version the door chooses, even if another one has become the latest meanwhile.
        version = served.version if message.model_version else -1
        return read_request(message, config=served.config, version=version, headers=headers)

    def _read_of_stream(self, message: Any, headers: Mapping[str, Parameter]) -> GrpcRequest:
        self._check_open()
        return self._read(
            message, self._models.served(message.model_name, message.model_version), headers=headers
        )

    def _headers(self, context: Any) -> Mapping[str, Parameter]:
        if self._forwards is None:
            return {}
        metadata = context.invocation_metadata() or ()
        return {name: value for name, value in metadata if isinstance(value, str) and self._forwards(name)}

    def _measured(self, name: str, version: str) -> list[Served]:
        """Return the versions that answer, of one model or of all.

        Raises:
            InferenceError: in the words that statistics have for it.
        """
        if not name:
            names = sorted({entry.name for entry in self._models.index() if entry.state == "READY"})
            return [served for each in names for served in self._measured(each, "")]
        try:
            wanted = [version] if version else [str(number) for number in self._models.versions(name)]
            found = [self._models.served(name, number) for number in wanted]
        except InferenceError as error:
            if error.status is Status.INVALID_ARG:
                raise
            found = []
        if found:
            return found
        if self._models.versions(name):
            raise InferenceError(f"requested model version is not available for model '{name}'")
        raise InferenceError(f"requested model '{name}' is not available")


async def _abort(context: Any, error: GenserveError) -> None:
    if error.remedy:
        remedy = " ".join(error.remedy.split()).encode("ascii", "replace").decode()
        context.set_trailing_metadata(((_REMEDY, remedy),))
    await context.abort(status_code(error), error.message)


def _check_repository(request: Any) -> None:
    if request.repository_name:
        raise InferenceError("'repository_name' specification is not supported", status=Status.UNSUPPORTED)


def _load_parameter(name: str, parameter: Any, choice: str) -> Any:
    if parameter.WhichOneof("parameter_choice") != choice:
        raise InferenceError(f"invalid value type for load parameter '{name}', expected {choice}.")
    return getattr(parameter, choice)
