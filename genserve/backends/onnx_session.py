"""ONNX session: opens graphs in ONNX Runtime, with session options and execution providers by the config."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from genserve.backends.backend import Placement, boolean_parameter, integer_parameter
from genserve.errors import GenserveError, MissingDependency, RepositoryError, Status
from genserve.kernels import instruction_set, library_path

__all__ = [
    "SPIN_US",
    "Provider",
    "ProviderChoice",
    "choose_providers",
    "num_cores",
    "onnxruntime_module",
    "open_for_inspection",
    "open_session",
    "preload_cuda",
    "register_kernels",
    "runtime_message",
]


logger = logging.getLogger(__name__)

# After a run ONNX Runtime's workers spin in wait of the next one. By default that burns 36 ms of a
# core, which the event loop needs; with 200 us it is 1 to 3 ms, and the step takes no longer.
SPIN_US = 200

_RUNTIME_ERROR = re.compile(r"\[ONNXRuntimeError\] : (?P<code>\d+) : \w+ : (?P<text>.*)", re.DOTALL)
_GRAPH_LEVELS = {-1: "ORT_ENABLE_BASIC", 0: "ORT_ENABLE_ALL", 1: "ORT_ENABLE_EXTENDED", 2: "ORT_DISABLE_ALL"}
_NO_OPTIMIZATION, _FATAL = 2, 4     # of `_GRAPH_LEVELS`; of ONNX Runtime's log levels
_OF_CUDA = ("CUDAExecutionProvider", "TensorrtExecutionProvider")
_ALLOCATOR_KEY = "session.use_device_allocator_for_initializers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """An execution provider of ONNX Runtime."""

    name: str                       # "CUDAExecutionProvider"
    options: Mapping[str, str]


def onnxruntime_module() -> Any:
    """Import ONNX Runtime.

    Raises:
        MissingDependency: it is not installed.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingDependency(
            "serving an ONNX model needs ONNX Runtime",
            remedy="pip install 'genserve[cpu]', or 'genserve[gpu]' on a machine with a GPU, never both",
        ) from error
    _warn_of_two()
    return onnxruntime


def register_kernels(options: Any) -> None:
    """Let a session's options know the operators of `genserve.kernels`, which run on the CPU.

    Raises:
        GenserveError: there are no kernels for this machine, or this ONNX Runtime does not take them.
    """
    path = library_path()
    try:
        options.register_custom_ops_library(str(path))
    except Exception as error:  # onnxruntime's exceptions share no base class
        raise GenserveError(
            f"ONNX Runtime does not take the kernels {path}: {runtime_message(error)}",
            remedy="build them again (python genserve/kernels/build.py), or upgrade onnxruntime",
        ) from error
    _log_instruction_set(instruction_set())


@cache
def _log_instruction_set(name: str) -> None:
    """Tell, once, which kernels run."""
    logger.info("kernels: %s", name)


@cache
def _warn_of_two() -> None:
    """Tell, once, that both packages are there: each has written over the other's files."""
    packages = ("onnxruntime", "onnxruntime-gpu")
    if all(any(distributions(name=package)) for package in packages):
        logger.warning(
            "both %s are installed, into the same folder: which of them runs is chance "
            "(`pip uninstall %s`, then `pip install 'genserve[cpu]'` or `'genserve[gpu]'`)",
            " and ".join(packages),
            " ".join(packages),
        )


def preload_cuda(providers: Sequence[Provider]) -> None:
    """Load the libraries of CUDA that pip has installed, if one of the providers needs them.

    ONNX Runtime itself looks for them only where the system has its libraries.
    """
    if any(provider.name in _OF_CUDA for provider in providers):
        onnxruntime_module().preload_dlls()


def open_session(
    path: Path, *, parameters: Mapping[str, str], graph_level: int, providers: Sequence[Provider]
) -> Any:
    """Load a graph.

    Args:
        path: the .onnx file, or a folder with a model.onnx in it.
        parameters: of the config: `intra_op_thread_count`, `inter_op_thread_count`, `execution_mode`,
            `enable_mem_arena`, `enable_mem_pattern`, `session.use_device_allocator_for_initializers`.
        graph_level: `optimization.graph.level`: -1 basic, 0 all, 1 extended, 2 none.
        providers: in the order of preference.

    Returns:
        An `onnxruntime.InferenceSession`; several threads may run it at a time.

    Raises:
        MissingDependency: ONNX Runtime is not installed.
        RepositoryError: the file cannot be loaded, or a parameter makes no sense.
    """
    options = _session_options(onnxruntime_module(), parameters, graph_level=graph_level)
    preload_cuda(providers)
    return _open(path, options, providers)


def open_for_inspection(path: Path) -> Any:
    """Load a graph on the CPU to see what it is, not to run it.

    Nothing is optimised or rearranged, and of weights that lie beside the graph only the places are read.

    Args:
        path: the .onnx file, or a folder with a model.onnx in it.

    Raises:
        MissingDependency: ONNX Runtime is not installed.
        RepositoryError: the file cannot be loaded.
    """
    options = _session_options(onnxruntime_module(), {}, graph_level=_NO_OPTIMIZATION)
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.intra_op_num_threads = 1
    options.log_severity_level = _FATAL
    with suppress(GenserveError):   # without kernels, the graphs that have no need of them can be looked at
        register_kernels(options)
    return _open(path, options, [Provider(name="CPUExecutionProvider", options={})])


def _open(path: Path, options: Any, providers: Sequence[Provider]) -> Any:
    file = path / "model.onnx" if path.is_dir() else path
    try:
        return onnxruntime_module().InferenceSession(
            str(file), options, providers=[(provider.name, dict(provider.options)) for provider in providers]
        )
    except Exception as error:  # onnxruntime's exceptions share no base class
        raise RepositoryError(
            runtime_message(error),
            status=Status.INTERNAL,
            remedy=f"is {file} a whole ONNX model, with its weights beside it?",
        ) from error


def num_cores() -> int:
    """Return how many cores this process may use; where the system does not tell, how many there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def runtime_message(error: Exception) -> str:
    """Return what ONNX Runtime says, in the words of Triton's backend: `onnx runtime error 2: ...`."""
    match = _RUNTIME_ERROR.match(str(error))
    return f"onnx runtime error {match['code']}: {match['text']}" if match else f"onnx runtime error: {error}"


def _session_options(onnxruntime: Any, parameters: Mapping[str, str], *, graph_level: int) -> Any:
    options = onnxruntime.SessionOptions()
    level = _GRAPH_LEVELS.get(graph_level, "ORT_ENABLE_ALL")
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.execution_mode = _execution_mode(onnxruntime, parameters)
    intra = integer_parameter(parameters, "intra_op_thread_count", default=0)
    inter = integer_parameter(parameters, "inter_op_thread_count", default=0)
    # Not ONNX Runtime's own default: it counts the machine's cores, not those of this container.
    options.intra_op_num_threads = intra if intra > 0 else num_cores()
    options.inter_op_num_threads = max(inter, 0)
    options.enable_cpu_mem_arena = boolean_parameter(parameters, "enable_mem_arena", default=True)
    options.enable_mem_pattern = boolean_parameter(parameters, "enable_mem_pattern", default=True)
    options.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_US))
    if _ALLOCATOR_KEY in parameters:
        options.add_session_config_entry(_ALLOCATOR_KEY, parameters[_ALLOCATOR_KEY])
    return options


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
                remedy="0 runs the operators one after the other, 1 the branches of the graph in parallel",
            )


_TENSORRT = "TensorrtExecutionProvider"
_CUDA = "CUDAExecutionProvider"
_OPENVINO = "OpenVINOExecutionProvider"
_GPU_ACCELERATORS = {"tensorrt": _TENSORRT, "cuda": _CUDA}
_CPU_ACCELERATORS = {"openvino": _OPENVINO}
_CPU = Provider(name="CPUExecutionProvider", options={})

# What Triton's config calls these options of TensorRT; the others begin with `trt_` there too.
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
_HOW_TO_GET = {
    _TENSORRT: "it needs `pip install 'genserve[gpu]'` and NVIDIA's TensorRT libraries",
    _CUDA: "it comes with `pip install 'genserve[gpu]'`, in place of 'genserve[cpu]'",
    _OPENVINO: "it comes with `pip install onnxruntime-openvino`, in place of onnxruntime",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderChoice:
    """What runs an instance, and what was asked for in vain."""

    providers: tuple[Provider, ...]
    warnings: tuple[str, ...]


def choose_providers(
    accelerators: Any, placement: Placement, *, parameters: Mapping[str, str], available: Collection[str]
) -> ProviderChoice:
    """Choose the providers of an instance, in the order of preference; the CPU is always the last.

    Args:
        accelerators: `optimization.execution_accelerators` of the config's message.
        placement: of the instance; those of the GPU count only on a GPU.
        parameters: of the config; `cudnn_conv_algo_search`, `gpu_mem_limit`, `arena_extend_strategy` and
            `do_copy_in_default_stream` are CUDA's.
        available: what this ONNX Runtime was built with.

    Raises:
        RepositoryError: an accelerator or a value that does not exist; in Triton's words.
    """
    wanted = _for_gpu(accelerators, placement, parameters) if placement.kind == "GPU" else []
    warnings = []
    if placement.kind != "GPU":
        warnings = [
            f"{accelerator.name} accelerates on a GPU; {placement.name} runs on the CPU"
            for accelerator in accelerators.gpu_execution_accelerator
        ]
    for accelerator in accelerators.cpu_execution_accelerator:
        name = _provider_name(accelerator.name, among=_CPU_ACCELERATORS)
        wanted.append(Provider(name=name, options={"device_type": "CPU", **accelerator.parameters}))
    warnings += [
        f"{placement.name} runs without {provider.name}, which this ONNX Runtime does not have; "
        f"{_HOW_TO_GET[provider.name]}"
        for provider in wanted
        if provider.name not in available
    ]
    used = [provider for provider in wanted if provider.name in available]
    return ProviderChoice(providers=(*used, _CPU), warnings=tuple(warnings))


def _for_gpu(accelerators: Any, placement: Placement, parameters: Mapping[str, str]) -> list[Provider]:
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
            remedy=f"known here: {', '.join(among)}",
        )
    return among[accelerator]


def _tensorrt_options(parameters: Mapping[str, str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for key, value in parameters.items():
        if key == "precision_mode":
            if value not in _TENSORRT_PRECISIONS:
                raise RepositoryError(
                    f"unsupported precision mode '{value}' is requested",
                    remedy=f"write one of {', '.join(_TENSORRT_PRECISIONS)}",
                )
            options |= _TENSORRT_PRECISIONS[value]
        elif key in _TENSORRT_OPTIONS or key.startswith("trt_"):
            options[_TENSORRT_OPTIONS.get(key, key)] = value
        else:
            raise RepositoryError(
                f"unknown parameter '{key}' is provided for TensorRT Execution Accelerator",
                remedy="Triton's onnxruntime backend lists them in its README",
            )
    return options


# The parameters of a model that are CUDA's, and what their numbers mean to ONNX Runtime.
_CUDA_PARAMETERS: Mapping[str, Mapping[str, str]] = {
    "cudnn_conv_algo_search": {"0": "EXHAUSTIVE", "1": "HEURISTIC", "2": "DEFAULT"},
    "arena_extend_strategy": {"0": "kNextPowerOfTwo", "1": "kSameAsRequested"},
    "gpu_mem_limit": {},
    "do_copy_in_default_stream": {},
}


def _cuda_options(parameters: Mapping[str, str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for key, names in _CUDA_PARAMETERS.items():
        if key not in parameters:
            continue
        value = parameters[key]
        if names and value not in names:
            raise RepositoryError(
                f"unsupported {key} value '{value}' is requested", remedy=f"write one of {', '.join(names)}"
            )
        options[key] = names.get(value, value)
    return options
