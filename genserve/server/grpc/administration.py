"""Administration: the methods about the repository, shared memory, traces and the log."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import string
from collections.abc import Callable, Coroutine, Mapping
from functools import wraps
from typing import Any
from urllib.parse import quote, unquote

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from genserve.errors import GenserveError, InferenceError, Overloaded, Status, status_of
from genserve.kserve.served_models import (
    Models,
    cuda_region,
    refuse_cuda_region,
    refuse_repository,
    refuse_unknown_model,
)
from genserve.log import CURRENT_REQUEST, LOG_FORMATS, LoggedRequest
from genserve.redaction import redacted_error, redacted_text
from genserve.server.access_log import is_verbose, log_request
from genserve.server.error_responses import failure
from genserve.server.services import Services

__all__ = ["Administration", "abort", "begin_request", "log_call", "method", "status_code"]


_CODES: Mapping[Status, grpc.StatusCode] = {
    Status.UNKNOWN: grpc.StatusCode.UNKNOWN,
    Status.INTERNAL: grpc.StatusCode.INTERNAL,
    Status.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Status.INVALID_ARG: grpc.StatusCode.INVALID_ARGUMENT,
    Status.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Status.UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
    Status.ALREADY_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    Status.CANCELLED: grpc.StatusCode.CANCELLED,
}

def status_code(error: GenserveError) -> grpc.StatusCode:
    """Return the code that says what kind of failure it is.

    A full queue of a generation model is RESOURCE_EXHAUSTED, gRPC's word for HTTP's 429. UNAVAILABLE is a
    server that stops, a model that loads, and the full queue of any other model, as Triton has it.
    """
    if isinstance(error, Overloaded):
        return grpc.StatusCode.RESOURCE_EXHAUSTED
    return _CODES[status_of(error)]


logger = logging.getLogger(__name__)

# The methods have the protocol's names, which are not Python's.
# ruff: noqa: N802

_REMEDY = "genserve-remedy"     # trailing metadata of an error
_PUSHBACK = "grpc-retry-pushback-ms"    # gRPC's own: clients with a retry policy wait so long
# Bytes on the wire, where gRPC quotes what is not printable; clients take 8 KiB of trailing metadata.
_MAX_DETAILS = 4096
_MAX_REMEDY = 1024
_UNQUOTED = string.punctuation.replace("%", "") + " "
# What changes the server is told at the default level; what is looked at, and inferences, are not.
_NEWS = frozenset({
    "RepositoryModelLoad",
    "RepositoryModelUnload",
    "SystemSharedMemoryRegister",
    "SystemSharedMemoryUnregister",
})
_LOG_CHOICES = {bool: "bool_param", int: "uint32_param", str: "string_param"}
_LOG_WORDS = {bool: "boolean", int: "int32", str: "string"}


async def abort(context: Any, error: GenserveError) -> None:
    """End a call with an error, its remedy in the trailing metadata, and when to come back, if it says so."""
    error = redacted_error(error)
    metadata = []
    if error.remedy:
        remedy = " ".join(error.remedy.split()).encode("ascii", "replace").decode()
        metadata.append((_REMEDY, remedy[:_MAX_REMEDY]))
    if isinstance(error, Overloaded):
        metadata.append((_PUSHBACK, str(math.ceil(error.retry_after_s * 1000))))
    if metadata:
        context.set_trailing_metadata(tuple(metadata))
    await context.abort(status_code(error), _details(error))


def _details(error: GenserveError) -> str:
    """Return the text of an error, cut where the headers of HTTP/2 would have no room for it."""
    encoded = quote(error.message, safe=_UNQUOTED, errors="replace")
    if len(encoded) > _MAX_DETAILS:
        logger.warning("an error of %d characters is cut for gRPC: %s", len(error.message), error.code)
        logger.debug("its text: %s", error.message)     # which may quote the request
        encoded = re.sub("%.?$", "", encoded[:_MAX_DETAILS])
    return unquote(encoded, errors="ignore")


def method(answer: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Make a coroutine function a method of a service, which ends with a code whatever it raises."""

    @wraps(answer)
    async def answer_or_abort(self: Any, request: Any, context: Any) -> Any:
        logged = begin_request(request)
        try:
            response = await answer(self, request, context)
        except asyncio.CancelledError:
            log_call(logged, grpc.StatusCode.CANCELLED, context=context, method=answer.__name__)
            raise
        except Exception as error:
            failed = logged.error = failure(error, doing=answer.__name__)
            log_call(logged, status_code(failed), context=context, method=answer.__name__)
            await abort(context, failed)
        else:
            log_call(logged, grpc.StatusCode.OK, context=context, method=answer.__name__)
            return response

    return answer_or_abort


def begin_request(message: Any) -> LoggedRequest:
    """Return the request that a message is, which the log tells of from here on."""
    names_model = message.DESCRIPTOR.name.startswith("Model")
    model = getattr(message, "model_name", "") or (getattr(message, "name", "") if names_model else "")
    request = LoggedRequest(id=getattr(message, "id", ""), model=model)
    CURRENT_REQUEST.set(request)
    return request


def log_call(request: LoggedRequest, code: grpc.StatusCode, *, context: Any, method: str) -> None:
    """Log a request that has ended; see `log_request`."""
    failed = code not in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED)
    is_news = method in _NEWS
    if failed or is_news or request.answers or is_verbose():
        client = unquote(context.peer()).removeprefix("ipv4:").removeprefix("ipv6:")
        log_request(
            request, client=client, call=f"gRPC {method}", status=code.name, failed=failed, is_news=is_news
        )


class Administration(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]  # generated
    """The part of `inference.GRPCInferenceService` that clients seldom call."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._models: Models = services.repository

    @method
    async def RepositoryIndex(self, request: Any, context: Any) -> Any:
        """Every version of every model, or those that answer."""
        refuse_repository(request.repository_name)
        response = service_pb2.RepositoryIndexResponse()
        for line in self._models.index(ready_only=request.ready):
            version = "" if line.version is None else str(line.version)
            reason = redacted_text(line.reason)
            response.models.add(name=line.name, version=version, state=line.state or "", reason=reason)
        return response

    @method
    async def RepositoryModelLoad(self, request: Any, context: Any) -> Any:
        """Load a model, and answer when it is loaded."""
        refuse_repository(request.repository_name)
        config, files = "", {}
        for name, parameter in request.parameters.items():
            if name == "config":
                config = _load_parameter(name, parameter, "string_param")
            elif name.startswith("file:"):
                files[name.removeprefix("file:")] = _load_parameter(name, parameter, "bytes_param")
            else:
                raise InferenceError(f"unrecognized load parameter '{name}'.")
        await asyncio.to_thread(
            self._models.load,
            request.model_name,
            config=config,
            files=files or None,
            allow_code=self._services.settings.allow_uploaded_code,
        )
        return service_pb2.RepositoryModelLoadResponse()

    @method
    async def RepositoryModelUnload(self, request: Any, context: Any) -> Any:
        """Begin to unload a model."""
        refuse_repository(request.repository_name)
        dependents = False
        if parameter := request.parameters.get("unload_dependents"):
            if parameter.WhichOneof("parameter_choice") != "bool_param":
                text = "invalid value type for 'unload_dependents' parameter, expected bool_param."
                raise InferenceError(text)
            dependents = parameter.bool_param
        await asyncio.to_thread(self._models.unload, request.model_name, dependents=dependents)
        return service_pb2.RepositoryModelUnloadResponse()

    @method
    async def SystemSharedMemoryStatus(self, request: Any, context: Any) -> Any:
        """The regions that are registered, or one of them."""
        response = service_pb2.SystemSharedMemoryStatusResponse()
        for region in self._services.shared_memory.regions(request.name):
            entry = response.regions[region.name]
            entry.name, entry.key = region.name, region.key
            entry.offset, entry.byte_size = region.offset, region.byte_size
        return response

    @method
    async def SystemSharedMemoryRegister(self, request: Any, context: Any) -> Any:
        """Make a region of shared memory known."""
        self._services.shared_memory.register(
            request.name, key=request.key, offset=request.offset, byte_size=request.byte_size
        )
        return service_pb2.SystemSharedMemoryRegisterResponse()

    @method
    async def SystemSharedMemoryUnregister(self, request: Any, context: Any) -> Any:
        """Forget a region, or all."""
        self._services.shared_memory.unregister(request.name)
        return service_pb2.SystemSharedMemoryUnregisterResponse()

    @method
    async def CudaSharedMemoryStatus(self, request: Any, context: Any) -> Any:
        """No region: there are none on this server."""
        refuse_cuda_region(request.name)
        return service_pb2.CudaSharedMemoryStatusResponse()

    @method
    async def CudaSharedMemoryRegister(self, request: Any, context: Any) -> Any:
        """Refused: this server has none."""
        self._services.shared_memory.refuse_if_disabled()
        raise cuda_region(request.name)

    @method
    async def CudaSharedMemoryUnregister(self, request: Any, context: Any) -> Any:
        """Nothing to forget."""
        self._services.shared_memory.refuse_if_disabled()
        return service_pb2.CudaSharedMemoryUnregisterResponse()

    @method
    async def TraceSetting(self, request: Any, context: Any) -> Any:
        """Change settings of traces, of the server or of one model, and return all."""
        if request.model_name:
            refuse_unknown_model(self._models, request.model_name)
        changes = {name: _trace_value(name, setting) for name, setting in request.settings.items()}
        values = self._services.trace_settings.update(changes, model=request.model_name)
        response = service_pb2.TraceSettingResponse()
        for name, value in values.items():
            response.settings[name].value.extend([value] if isinstance(value, str) else value)
        return response

    @method
    async def LogSettings(self, request: Any, context: Any) -> Any:
        """Change settings of the log, and return all."""
        current = self._services.log_settings.values
        changes = {
            name: _log_value(name, setting, type(current[name]))
            for name, setting in request.settings.items()
            if name in current
        }
        response = service_pb2.LogSettingsResponse()
        for name, value in self._services.log_settings.update(changes).items():
            setattr(response.settings[name], _LOG_CHOICES[type(value)], value)
        return response


def _load_parameter(name: str, parameter: Any, choice: str) -> Any:
    if parameter.WhichOneof("parameter_choice") != choice:
        raise InferenceError(f"invalid value type for load parameter '{name}', expected {choice}.")
    return getattr(parameter, choice)


def _trace_value(name: str, setting: Any) -> Any:
    values = list(setting.value)
    if not values:
        return None
    if name == "trace_level":
        return values
    if len(values) > 1:
        raise InferenceError(f"expect only 1 value for '{name}'")
    return values[0]


def _log_value(name: str, setting: Any, kind: type) -> Any:
    if setting.WhichOneof("parameter_choice") != _LOG_CHOICES[kind]:
        raise InferenceError(f"expect {_LOG_WORDS[kind]} for '{name}'")
    value = getattr(setting, _LOG_CHOICES[kind])
    if name == "log_format" and value not in LOG_FORMATS:
        # Over HTTP, Triton has another text and another code.
        raise InferenceError(
            f"invalid argument for log_format, got: {value}", remedy=f"one of: {', '.join(LOG_FORMATS)}"
        )
    return value
