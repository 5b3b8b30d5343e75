"""ONNX providers: which execution providers of ONNX Runtime an instance is run by."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from genserve.backends.backend import Placement
from genserve.backends.onnx_session import Provider
from genserve.errors import RepositoryError

__all__ = ["ProviderChoice", "choose_providers"]

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
