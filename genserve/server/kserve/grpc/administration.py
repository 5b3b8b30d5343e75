"""Administration: the methods about the repository, shared memory, traces and the log."""

from __future__ import annotations

from typing import Any

from tritonclient.grpc import service_pb2, service_pb2_grpc

from genserve.errors import InferenceError
from genserve.log import LOG_FORMATS
from genserve.redaction import redacted_text
from genserve.repository.served_models import ServedModels
from genserve.server.access.access_control import Rights
from genserve.server.http.offload import run_for_long
from genserve.server.kserve.grpc.rpc_method import rpc_method
from genserve.server.kserve.model_metadata import reject_repository, require_ready_model
from genserve.server.kserve.shared_memory import cuda_unsupported, reject_cuda_region
from genserve.server.kserve.state import KServeState
from genserve.server.services import Services

# The methods have the protocol's names, which are not Python's.
# ruff: noqa: N802

_LOG_CHOICES = {bool: "bool_param", int: "uint32_param", str: "string_param"}
_LOG_WORDS = {bool: "boolean", int: "int32", str: "string"}


def _has_settings(request: Any) -> bool:
    return bool(request.settings)


class Administration(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]  # generated
    """The rarely called methods of `inference.GRPCInferenceService`."""

    def __init__(self, services: Services, state: KServeState) -> None:
        self._services = services
        self._state = state
        self._models: ServedModels = services.repository

    @rpc_method(Rights(part="model-repository"))
    async def RepositoryIndex(self, request: Any, context: Any) -> Any:
        """List all versions of all models, or only those that are ready."""
        reject_repository(request.repository_name)
        response = service_pb2.RepositoryIndexResponse()
        for line in self._models.index(ready_only=request.ready):
            version = "" if line.version is None else str(line.version)
            reason = redacted_text(line.reason)
            response.models.add(name=line.name, version=version, state=line.state or "", reason=reason)
        return response

    @rpc_method(Rights(part="model-repository", controls=True))
    async def RepositoryModelLoad(self, request: Any, context: Any) -> Any:
        """Load a model; the response is sent when it is loaded."""
        reject_repository(request.repository_name)
        config, files = "", {}
        for name, parameter in request.parameters.items():
            if name == "config":
                config = _load_parameter(name, parameter, "string_param")
            elif name.startswith("file:"):
                files[name.removeprefix("file:")] = _load_parameter(name, parameter, "bytes_param")
            else:
                raise InferenceError(f"unrecognized load parameter '{name}'.")
        await run_for_long(
            self._models.load,
            request.model_name,
            config=config,
            files=files or None,
            allow_code=self._services.settings.allow_uploaded_code,
        )
        return service_pb2.RepositoryModelLoadResponse()

    @rpc_method(Rights(part="model-repository", controls=True))
    async def RepositoryModelUnload(self, request: Any, context: Any) -> Any:
        """Start to unload a model."""
        reject_repository(request.repository_name)
        dependents = False
        if parameter := request.parameters.get("unload_dependents"):
            if parameter.WhichOneof("parameter_choice") != "bool_param":
                text = "invalid value type for 'unload_dependents' parameter, expected bool_param."
                raise InferenceError(text)
            dependents = parameter.bool_param
        await run_for_long(self._models.unload, request.model_name, dependents=dependents)
        return service_pb2.RepositoryModelUnloadResponse()

    @rpc_method(Rights(part="shared-memory"))
    async def SystemSharedMemoryStatus(self, request: Any, context: Any) -> Any:
        """Return the registered regions, or one of them."""
        response = service_pb2.SystemSharedMemoryStatusResponse()
        for region in self._state.shared_memory.regions(request.name):
            entry = response.regions[region.name]
            entry.name, entry.key = region.name, region.key
            entry.offset, entry.byte_size = region.offset, region.byte_size
        return response

    @rpc_method(Rights(part="shared-memory", controls=True))
    async def SystemSharedMemoryRegister(self, request: Any, context: Any) -> Any:
        """Register a region of system shared memory."""
        self._state.shared_memory.register(
            request.name, key=request.key, offset=request.offset, byte_size=request.byte_size
        )
        return service_pb2.SystemSharedMemoryRegisterResponse()

    @rpc_method(Rights(part="shared-memory", controls=True))
    async def SystemSharedMemoryUnregister(self, request: Any, context: Any) -> Any:
        """Unregister a region, or all."""
        self._state.shared_memory.unregister(request.name)
        return service_pb2.SystemSharedMemoryUnregisterResponse()

    @rpc_method(Rights(part="shared-memory"))
    async def CudaSharedMemoryStatus(self, request: Any, context: Any) -> Any:
        """Return no regions: this server does not support CUDA shared memory."""
        reject_cuda_region(request.name)
        return service_pb2.CudaSharedMemoryStatusResponse()

    @rpc_method(Rights(part="shared-memory", controls=True))
    async def CudaSharedMemoryRegister(self, request: Any, context: Any) -> Any:
        """Reject a region of CUDA shared memory."""
        self._state.shared_memory.require_enabled()
        raise cuda_unsupported(request.name)

    @rpc_method(Rights(part="shared-memory", controls=True))
    async def CudaSharedMemoryUnregister(self, request: Any, context: Any) -> Any:
        """Unregister regions of CUDA shared memory, of which there are none."""
        self._state.shared_memory.require_enabled()
        return service_pb2.CudaSharedMemoryUnregisterResponse()

    @rpc_method(Rights(part="trace"), controls=_has_settings)
    async def TraceSetting(self, request: Any, context: Any) -> Any:
        """Change trace settings of the server or of one model, and return all."""
        if request.model_name:
            require_ready_model(self._models, request.model_name)
        changes = {name: _trace_value(name, setting) for name, setting in request.settings.items()}
        values = self._state.trace_settings.update(changes, model=request.model_name)
        response = service_pb2.TraceSettingResponse()
        for name, value in values.items():
            response.settings[name].value.extend([value] if isinstance(value, str) else value)
        return response

    @rpc_method(Rights(part="logging"), controls=_has_settings)
    async def LogSettings(self, request: Any, context: Any) -> Any:
        """Change log settings, and return all."""
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
        # Over HTTP, Triton has another message and another status.
        raise InferenceError(
            f"invalid argument for log_format, got: {value}", remedy=f"one of: {', '.join(LOG_FORMATS)}"
        )
    return value
