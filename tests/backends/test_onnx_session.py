"""Which ONNX Runtime is there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from google.protobuf import text_format

from genserve.backends import libraries, onnx_session
from genserve.backends.backend import Placement
from genserve.backends.libraries import import_onnxruntime
from genserve.backends.onnx_session import choose_providers, register_kernels
from genserve.config.schema import new_model_config
from genserve.errors import GenserveError, MissingDependency, RepositoryError
from genserve.machine import num_cores


@pytest.mark.parametrize(
    ("configured", "threads"),
    [("3", 3), ("5,2", 5), ("0", num_cores()), ("many", num_cores()), ("", num_cores())],
)
def test_omp_num_threads_is_the_default_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, configured: str, threads: int
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", configured)
    assert onnx_session.session_options().intra_op_num_threads == threads
    assert onnx_session.session_options(num_threads=4).intra_op_num_threads == 4


def test_two_builds_in_one_folder_are_an_error_with_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("onnxruntime", "onnxruntime_gpu"):
        info = tmp_path / f"{package}-1.31.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {package.replace('_', '-')}\nVersion: 1.31.1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    libraries._require_one_build.cache_clear()
    with pytest.raises(MissingDependency, match="both onnxruntime and onnxruntime-gpu") as caught:
        import_onnxruntime()
    assert "pip uninstall --yes onnxruntime && pip install" in caught.value.remedy


def test_without_a_package_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingDependency) as caught:
        import_onnxruntime()
    assert caught.value.remedy == "pip install onnxruntime"


def test_kernels_that_cannot_be_loaded_are_an_error_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = tmp_path / "libgenserve_avx2.so"
    half.write_bytes(b"\x7fELF")
    monkeypatch.setattr(onnx_session, "library_path", lambda: half)
    with pytest.raises(GenserveError, match=r"cannot load the kernels .*build them again"):
        register_kernels(import_onnxruntime().SessionOptions())


ALL = tuple(f"{name}ExecutionProvider" for name in ("Tensorrt", "CUDA", "OpenVINO", "CPU"))
CPU = Placement(name="m_0", kind="CPU")
GPU = Placement(name="m_0_gpu1", kind="GPU", device_id=1)
TENSORRT = """gpu_execution_accelerator {
  name: "tensorrt"
  parameters { key: "precision_mode" value: "FP16" }
  parameters { key: "max_workspace_size_bytes" value: "1073741824" }
  parameters { key: "trt_engine_cache_enable" value: "1" }
}"""
OPENVINO = 'cpu_execution_accelerator { name: "openvino" }'


def chosen(text="", *, placement=GPU, parameters=None, available=ALL):
    message = text_format.Parse(
        f"optimization {{ execution_accelerators {{ {text} }} }}", new_model_config()
    )
    return choose_providers(
        message.optimization.execution_accelerators,
        placement,
        parameters=parameters or {},
        available=available,
    )


def options(choice):
    return {
        provider.name.removesuffix("ExecutionProvider"): dict(provider.options)
        for provider in choice.providers
    }


def test_an_instance_on_the_cpu_uses_the_cpu():
    choice = chosen(placement=CPU)
    assert options(choice) == {"CPU": {}}
    assert choice.warnings == ()


def test_an_instance_on_a_gpu_uses_its_device_and_the_cpu_for_the_rest():
    assert options(chosen()) == {"CUDA": {"device_id": "1"}, "CPU": {}}


def test_tensorrt_comes_first_with_its_options_by_onnx_runtimes_names():
    choice = chosen(TENSORRT)
    assert list(options(choice)) == ["Tensorrt", "CUDA", "CPU"]
    assert options(choice)["Tensorrt"] == {
        "trt_fp16_enable": "1",
        "trt_max_workspace_size": "1073741824",
        "trt_engine_cache_enable": "1",
        "device_id": "1",
    }


def test_cuda_takes_options_of_the_accelerator_and_of_the_model():
    text = """gpu_execution_accelerator { name: "cuda"
        parameters { key: "do_copy_in_default_stream" value: "0" } }"""
    parameters = {"cudnn_conv_algo_search": "1", "arena_extend_strategy": "1", "gpu_mem_limit": "4096"}
    assert options(chosen(text, parameters=parameters))["CUDA"] == {
        "cudnn_conv_algo_search": "HEURISTIC",
        "arena_extend_strategy": "kSameAsRequested",
        "gpu_mem_limit": "4096",
        "do_copy_in_default_stream": "0",
        "device_id": "1",
    }


def test_openvino_is_for_the_cpu():
    assert list(options(chosen(OPENVINO, placement=CPU))) == ["OpenVINO", "CPU"]


def test_missing_providers_are_named_with_a_remedy():
    choice = chosen(TENSORRT, available=("CPUExecutionProvider",))
    assert options(choice) == {"CPU": {}}
    tensorrt, cuda = choice.warnings
    assert tensorrt.startswith("m_0_gpu1 runs without TensorrtExecutionProvider")
    assert "pip install 'genserve[gpu]'" in cuda


@pytest.mark.parametrize(
    ("text", "parameters", "message"),
    [
        (
            'gpu_execution_accelerator { name: "auto_mixed_precision" }',
            {},
            "unknown Execution Accelerator 'auto_mixed_precision' is requested",
        ),
        (
            TENSORRT.replace("FP16", "FP8"),
            {},
            "unsupported precision mode 'FP8' is requested",
        ),
        (
            TENSORRT.replace("trt_engine_cache_enable", "cache"),
            {},
            "unknown parameter 'cache' is provided for TensorRT Execution Accelerator",
        ),
        (
            "",
            {"cudnn_conv_algo_search": "3"},
            "unsupported cudnn_conv_algo_search value '3' is requested",
        ),
    ],
)
def test_unknown_accelerators_and_values_are_rejected_in_tritons_words(text, parameters, message):
    with pytest.raises(RepositoryError) as raised:
        chosen(text, parameters=parameters)
    assert raised.value.message == message
