"""ONNX session: opens graphs in ONNX Runtime, with session options and execution providers by the config."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from genserve.backends.backend import Placement, boolean_parameter, integer_parameter
from genserve.backends.libraries import INSTALL_GPU_BUILD, import_onnxruntime
from genserve.errors import GenserveError, RepositoryError, Status
from genserve.files import read_regular_file
from genserve.kernels import instruction_set, library_path
from genserve.machine import default_threads

logger = logging.getLogger(__name__)

# After a run ONNX Runtime's workers spin while they wait for the next one. By default that burns 36 ms of a
# core, which the event loop needs; with 200 us it is 1 to 3 ms, and the step takes no longer.
_SPIN_US = 200

_RUNTIME_ERROR = re.compile(r"\[ONNXRuntimeError\] : (?P<code>\d+) : \w+ : (?P<text>.*)", re.DOTALL)
_GRAPH_LEVELS = {-1: "ORT_ENABLE_BASIC", 0: "ORT_ENABLE_ALL", 1: "ORT_ENABLE_EXTENDED", 2: "ORT_DISABLE_ALL"}
_FATAL = 4  # log level of ONNX Runtime
_ALLOCATOR_KEY = "session.use_device_allocator_for_initializers"

_TENSORRT = "TensorrtExecutionProvider"
_CUDA = "CUDAExecutionProvider"
_OPENVINO = "OpenVINOExecutionProvider"


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """An execution provider of ONNX Runtime."""

    name: str                       # "CUDAExecutionProvider"
    options: Mapping[str, str]


CPU_PROVIDER = Provider(name="CPUExecutionProvider", options={})


class ExternalWeights:
    """How this process loads weights in files next to model.onnx.

    Attributes:
        mapped: ONNX Runtime maps them, which takes no memory, but ends the process (SIGBUS) if somebody
            truncates the file of a loaded model. Otherwise they are read into memory.
    """

    mapped: ClassVar[bool] = True


def open_session(
    path: Path, *, parameters: Mapping[str, str], graph_level: int, providers: Sequence[Provider]
) -> Any:
    """Load a graph with the options of its config.

    Args:
        path: the .onnx file, or a folder with a model.onnx.
        parameters: the config's: `intra_op_thread_count`, `inter_op_thread_count`, `execution_mode`,
            `enable_mem_arena`, `enable_mem_pattern`, `session.use_device_allocator_for_initializers`.
        graph_level: `optimization.graph.level`: -1 basic, 0 all, 1 extended, 2 none.
        providers: the execution providers, in order of preference.

    Returns:
        An `onnxruntime.InferenceSession`; several threads may run it at a time.

    Raises:
        MissingDependency: ONNX Runtime is not installed.
        RepositoryError: the file cannot be loaded, or a parameter is invalid.
    """
    onnxruntime = import_onnxruntime()
    intra = integer_parameter(parameters, "intra_op_thread_count", default=0)
    inter = integer_parameter(parameters, "inter_op_thread_count", default=0)
    options = session_options(num_threads=intra if intra > 0 else None)
    level = _GRAPH_LEVELS.get(graph_level, "ORT_ENABLE_ALL")
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.execution_mode = _execution_mode(onnxruntime, parameters)
    options.inter_op_num_threads = max(inter, 0)
    options.enable_cpu_mem_arena = boolean_parameter(parameters, "enable_mem_arena", default=True)
    options.enable_mem_pattern = boolean_parameter(parameters, "enable_mem_pattern", default=True)
    if _ALLOCATOR_KEY in parameters:
        options.add_session_config_entry(_ALLOCATOR_KEY, parameters[_ALLOCATOR_KEY])
    with suppress(GenserveError):   # most graphs have no operators of genserve, and need no kernels
        register_kernels(options)
    return create_session(path, options, providers)


def open_for_inspection(path: Path) -> Any:
    """Load a graph on the CPU to read its signature, not to run it.

    The graph is neither optimized nor repacked, and weights in separate files are not read.

    Args:
        path: the .onnx file, or a folder with a model.onnx.

    Raises:
        MissingDependency: ONNX Runtime is not installed.
        RepositoryError: the file cannot be loaded.
    """
    options = session_options(num_threads=1)
    options.graph_optimization_level = import_onnxruntime().GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.log_severity_level = _FATAL
    with suppress(GenserveError):   # graphs without operators of genserve can be inspected without kernels
        register_kernels(options)
    return create_session(path, options, [CPU_PROVIDER], runs=False)


def session_options(*, num_threads: int | None = None) -> Any:
    """Return `onnxruntime.SessionOptions` for `num_threads`, by default those of `default_threads`.

    Raises:
        MissingDependency: ONNX Runtime is not installed.
    """
    options = import_onnxruntime().SessionOptions()
    # ONNX Runtime's default counts the cores of the machine, not of the container or of its quota.
    options.intra_op_num_threads = num_threads or default_threads()
    options.add_session_config_entry("session.intra_op.spin_duration_us", str(_SPIN_US))
    return options


def create_session(
    path: Path, options: Any, providers: Sequence[Provider], *, runs: bool = True
) -> Any:
    """Load a graph, with CUDA's libraries from pip if a provider needs them.

    Args:
        path: the .onnx file, or a folder with a model.onnx.
        options: the session's options, changed in place.
        providers: the execution providers, in order of preference.
        runs: whether the session will run, and so needs its weights.

    Raises:
        RepositoryError: the file cannot be loaded; the message is that of `runtime_message`.
    """
    onnxruntime = import_onnxruntime()
    if any(provider.name in (_CUDA, _TENSORRT) for provider in providers):
        onnxruntime.preload_dlls()  # ONNX Runtime itself searches the system's folders only
    file = path / "model.onnx" if path.is_dir() else path
    weights = _external_weights(file) if runs and not ExternalWeights.mapped else {}
    if weights:     # ONNX Runtime reads them as it creates the session: they must live until then
        options.add_external_initializers_from_files_in_memory(
            list(weights), list(weights.values()), list(map(len, weights.values()))
        )
    try:
        return onnxruntime.InferenceSession(
            str(file), options, providers=[(provider.name, dict(provider.options)) for provider in providers]
        )
    except Exception as error:  # onnxruntime's exceptions share no base class
        raise RepositoryError(
            runtime_message(error),
            status=Status.INTERNAL,
            remedy=f"check that {file} is a complete ONNX model, with its weights in the same folder",
        ) from error


def _external_weights(file: Path) -> dict[str, bytes]:
    """Return the contents of the files with the weights of a graph, by their names in it.

    Files that ONNX Runtime will reject are left out, so that it reports them.
    """
    import onnx

    try:
        tensors = onnx.load(file, load_external_data=False).graph.initializer
    except Exception:  # protobuf's, OSError: ONNX Runtime reports them
        return {}
    contents: dict[str, bytes] = {}
    folder = file.resolve().parent
    entries = (entry for tensor in tensors for entry in tensor.external_data)
    for location in {entry.value for entry in entries if entry.key == "location"}:
        weights = (folder / location.partition("\0")[0]).resolve()
        with suppress(OSError):
            if weights.is_relative_to(folder):
                contents[location] = read_regular_file(weights, max_bytes=sys.maxsize)
    return contents


def register_kernels(options: Any) -> None:
    """Register the operators of `genserve.kernels`, which run on the CPU, in session options.

    Raises:
        GenserveError: there are no kernels for this machine, or this ONNX Runtime cannot load them.
    """
    path = library_path()
    try:
        options.register_custom_ops_library(str(path))
    except Exception as error:  # onnxruntime's exceptions share no base class
        raise GenserveError(
            f"ONNX Runtime cannot load the kernels {path}: {runtime_message(error)}",
            remedy="build them again (python genserve/kernels/build.py), or upgrade onnxruntime",
        ) from error
    _log_instruction_set(instruction_set())


@cache
def _log_instruction_set(name: str) -> None:
    """Log, once, the instruction set of the kernels."""
    logger.info("kernels: %s", name)


def runtime_message(error: Exception) -> str:
    """Return an error of ONNX Runtime in the words of Triton's backend: `onnx runtime error 2: ...`."""
    match = _RUNTIME_ERROR.match(str(error))
    code, text = (f" {match['code']}", match["text"]) if match else ("", str(error))
    return f"onnx runtime error{code}: {' '.join(text.split())}"


def _execution_mode(onnxruntime: Any, parameters: Mapping[str, str]) -> Any:
    match integer_parameter(parameters, "execution_mode", default=0):
        case 0:
            return onnxruntime.ExecutionMode.ORT_SEQUENTIAL
        case 1:
            return onnxruntime.ExecutionMode.ORT_PARALLEL
        case mode:
            raise RepositoryError(
                "Invalid configuration value provided. Expected values for  execution_mode are 0 or 1 "
                f"but got {mode} .",
                remedy="0 runs the operators sequentially, 1 runs branches of the graph in parallel",
            )


_GPU_ACCELERATORS = {"tensorrt": _TENSORRT, "cuda": _CUDA}
_CPU_ACCELERATORS = {"openvino": _OPENVINO}

# Names in Triton's config that differ from ONNX Runtime's, which begin with `trt_`.
_TENSORRT_OPTIONS = {
    "max_workspace_size_bytes": "trt_max_workspace_size",
    "int8_calibration_table_name": "trt_int8_calibration_table_name",
    "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
}
_TENSORRT_PRECISIONS = {
    "FP32": {},
    "FP16": {"trt_fp16_enable": "1"},
    "BF16": {"trt_bf16_enable": "1"},
    "INT8": {"trt_int8_enable": "1"},
}
# Parameters of the model that are options of CUDA, with the names of their values.
_CUDA_PARAMETERS: Mapping[str, Mapping[str, str]] = {
    "cudnn_conv_algo_search": {"0": "EXHAUSTIVE", "1": "HEURISTIC", "2": "DEFAULT"},
    "arena_extend_strategy": {"0": "kNextPowerOfTwo", "1": "kSameAsRequested"},
    "gpu_mem_limit": {},
    "do_copy_in_default_stream": {},
}
_INSTALLATION = {
    _TENSORRT: f"it needs `{INSTALL_GPU_BUILD}` and NVIDIA's TensorRT libraries",
    _CUDA: f"it comes with `{INSTALL_GPU_BUILD}`",
    _OPENVINO: "it comes with `pip install onnxruntime-openvino`, which replaces onnxruntime",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderChoice:
    """The providers of an instance, and warnings about requested ones that are not used."""

    providers: tuple[Provider, ...]
    warnings: tuple[str, ...]


def choose_providers(
    accelerators: Any, placement: Placement, *, parameters: Mapping[str, str], available: Collection[str]
) -> ProviderChoice:
    """Choose the providers of an instance, in order of preference; the CPU is always last.

    Args:
        accelerators: `optimization.execution_accelerators` of the config's message.
        placement: where the instance runs; GPU accelerators only apply on a GPU.
        parameters: the config's; `cudnn_conv_algo_search`, `gpu_mem_limit`, `arena_extend_strategy` and
            `do_copy_in_default_stream` are options of CUDA.
        available: the providers of the installed ONNX Runtime.

    Raises:
        RepositoryError: an accelerator or a value is unknown; in Triton's words.
    """
    wanted = _gpu_providers(accelerators, placement, parameters) if placement.kind == "GPU" else []
    warnings = []
    if placement.kind != "GPU":
        warnings = [
            f"the accelerator {accelerator.name} needs a GPU, but {placement.name} runs on the CPU"
            for accelerator in accelerators.gpu_execution_accelerator
        ]
    for accelerator in accelerators.cpu_execution_accelerator:
        name = _provider_name(accelerator.name, among=_CPU_ACCELERATORS)
        wanted.append(Provider(name=name, options={"device_type": "CPU", **accelerator.parameters}))
    warnings += [
        f"{placement.name} runs without {provider.name}, which the installed ONNX Runtime does not have; "
        f"{_INSTALLATION[provider.name]}"
        for provider in wanted
        if provider.name not in available
    ]
    used = [provider for provider in wanted if provider.name in available]
    return ProviderChoice(providers=(*used, CPU_PROVIDER), warnings=tuple(warnings))


def _gpu_providers(accelerators: Any, placement: Placement, parameters: Mapping[str, str]) -> list[Provider]:
    device = {"device_id": str(placement.device_id)}
    providers = []
    cuda_options = _cuda_options(parameters)
    for accelerator in accelerators.gpu_execution_accelerator:
        if _provider_name(accelerator.name, among=_GPU_ACCELERATORS) == _TENSORRT:
            options = _tensorrt_options(accelerator.parameters)
            providers.append(Provider(name=_TENSORRT, options=options | device))
        else:
            cuda_options |= accelerator.parameters
    return [*providers, Provider(name=_CUDA, options=cuda_options | device)]


def _provider_name(accelerator: str, *, among: Mapping[str, str]) -> str:
    if accelerator not in among:
        raise RepositoryError(
            f"unknown Execution Accelerator '{accelerator}' is requested",
            remedy=f"use one of {', '.join(among)}",
        )
    return among[accelerator]


def _tensorrt_options(parameters: Mapping[str, str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for key, value in parameters.items():
        if key == "precision_mode":
            if value not in _TENSORRT_PRECISIONS:
                raise RepositoryError(
                    f"unsupported precision mode '{value}' is requested",
                    remedy=f"use one of {', '.join(_TENSORRT_PRECISIONS)}",
                )
            options |= _TENSORRT_PRECISIONS[value]
        elif key in _TENSORRT_OPTIONS or key.startswith("trt_"):
            options[_TENSORRT_OPTIONS.get(key, key)] = value
        else:
            raise RepositoryError(
                f"unknown parameter '{key}' is provided for TensorRT Execution Accelerator",
                remedy="see the README of Triton's onnxruntime backend for the parameters",
            )
    return options


def _cuda_options(parameters: Mapping[str, str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for key, names in _CUDA_PARAMETERS.items():
        if key not in parameters:
            continue
        value = parameters[key]
        if names and value not in names:
            raise RepositoryError(
                f"unsupported {key} value '{value}' is requested", remedy=f"use one of {', '.join(names)}"
            )
        options[key] = names.get(value, value)
    return options
