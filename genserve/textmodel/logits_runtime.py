"""Logits runtime: which class runs a logits stage, and whether it runs on a GPU, by its config."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from genserve.backends.backend import Placement, bytes_parameter, integer_parameter
from genserve.backends.encoder import RunFunction
from genserve.backends.libraries import INSTALL_GPU_BUILD, import_onnxruntime, import_torch
from genserve.backends.onnxruntime import open_graph
from genserve.backends.pytorch import open_module, set_threads
from genserve.batching.model_instance import group_placements
from genserve.config.model_config import ModelConfig
from genserve.engine.logits_model import LogitsModel, LogitsSizes
from genserve.textmodel.logits_config import (
    CacheKind,
    LengthLimit,
    LogitsNames,
    cache_kind,
    context_length,
    logits_files,
    num_pipeline_stages,
    read_parity,
)
from genserve.textmodel.runtimes.cached_logits import CacheSizes, check_max_model_len
from genserve.textmodel.runtimes.growing_logits import GrowingLogits
from genserve.textmodel.runtimes.kv_cache_memory import DeviceMemory, HostMemory, LogitsMemory
from genserve.textmodel.runtimes.onnx_logits import OnnxLogits
from genserve.textmodel.runtimes.pipeline_logits import PipelineLogits
from genserve.textmodel.runtimes.torchscript_logits import TorchLogits
from genserve.textmodel.runtimes.uncached_logits import UncachedLogits

logger = logging.getLogger(__name__)

ON_CPU = Placement(name="cpu", kind="CPU")


class LogitsFigures(LogitsSizes, Protocol):
    """The figures of a logits model that validate requests, or are shown to users."""

    @property
    def context_length(self) -> int:
        """The tokens of a sequence that the model itself takes; `max_length` may be less."""

    @property
    def length_limit(self) -> LengthLimit:
        """Why `max_length` is not more."""

    @property
    def kv_cache_bytes(self) -> int:
        """Largest size of the KV cache in bytes; 0: the model has no cache."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """The metadata that its export wrote into the file, such as `genserve.precision`."""


class LoadedLogits(LogitsModel, LogitsFigures, Protocol):
    """A logits model with its figures."""

    def close(self) -> None:
        """End its threads, if it has any; no forward follows."""


def load_logits(
    config: ModelConfig,
    folder: Path,
    *,
    placements: Sequence[Placement] = (ON_CPU,),
    max_model_len: int | None = None,
) -> LoadedLogits:
    """Load a logits stage onto the devices of its placements.

    Args:
        config: the stage's config, without errors.
        folder: the folder of the version.
        placements: the devices, in order; only a pipeline uses more than the first one.
        max_model_len: the tokens of a sequence; None: as many as model, config and KV cache allow.

    Raises:
        RepositoryError: the config is not a logits stage's, or the graph's file cannot be loaded or does not
            fit the config.
        MissingDependency: the runtime that its config names is not installed.
    """
    LogitsNames.of(config)      # before anything is started that only a loaded stage would close
    paths, placement = logits_files(config, folder), placements[0]
    path = paths[0]
    match cache_kind(config):
        case CacheKind.NONE:
            return _load_uncached(path, config, placement, max_model_len=max_model_len)
        case CacheKind.GROWING:
            return _load_growing(path, config, placement, max_model_len=max_model_len)
    sizes = _sizes(config, max_model_len)
    num_threads = integer_parameter(config.parameters, "intra_op_thread_count", default=0)
    if len(paths) > 1:
        memories = [_memory(place) for place in _spread(placements, num_stages=len(paths))]
        return PipelineLogits(paths, num_threads=num_threads, memories=memories, **sizes)
    memory = _memory(placement)
    if config.backend == "pytorch":
        set_threads(config.parameters)
        return TorchLogits(path, memory=memory, **sizes)
    return OnnxLogits(path, num_threads=num_threads, memory=memory, **sizes)


def engine_placements(config: ModelConfig) -> list[Placement]:
    """Return where the engine of a logits stage runs, by its resolved config.

    It runs on the first device; a pipeline runs on one device for each stage, or on fewer, which the stages
    share.
    """
    devices = [place for group in config.instance_groups for place in group_placements(group)]
    return devices[: num_pipeline_stages(config)]


def _spread(placements: Sequence[Placement], *, num_stages: int) -> list[Placement]:
    """Return the device of each stage; neighbours share a device if there are fewer devices than stages."""
    return [placements[stage * len(placements) // num_stages] for stage in range(num_stages)]


def _sizes(config: ModelConfig, max_model_len: int | None) -> CacheSizes:
    return CacheSizes(
        max_num_seqs=max(1, config.max_batch_size),
        max_length=context_length(config),
        kv_cache_bytes=bytes_parameter(config.parameters, "kv_cache_bytes"),
        max_model_len=max_model_len,
    )


def _memory(placement: Placement) -> LogitsMemory:
    return DeviceMemory(f"cuda:{placement.device_id}") if placement.kind == "GPU" else HostMemory()


def _load_growing(
    path: Path, config: ModelConfig, placement: Placement, *, max_model_len: int | None
) -> LoadedLogits:
    logger.warning(
        "model %s copies its KV cache at each step, which is slower than a graph of a family that "
        "`genserve export` builds",
        config.name,
    )
    sizes = _sizes(config, max_model_len)
    return GrowingLogits(
        path, parameters=config.parameters, providers=_memory(placement).providers, **sizes
    )


def _load_uncached(
    path: Path, config: ModelConfig, placement: Placement, *, max_model_len: int | None
) -> LoadedLogits:
    run: RunFunction
    if config.backend == "pytorch":
        run = open_module(path, config=config, placement=placement).run
    else:
        run = open_graph(path, config=config, placement=placement).run
    max_length = longest = context_length(config)
    if max_model_len is not None:
        # Such a graph does not say how many tokens it takes; its config does.
        check_max_model_len(max_model_len, max_length=longest, context_length=longest, path=path)
        max_length = max_model_len
    logger.warning(
        "model %s has no KV cache: each token costs a run of the whole sequence, of at most %d tokens "
        "(max_sequence_length); `genserve export` of its checkpoint makes one with a cache",
        config.name,
        max_length,
    )
    return UncachedLogits(run, config, max_length=max_length, context_length=longest)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuObstacle:
    """Why a logits stage cannot run on a GPU of this machine."""

    reason: str
    remedy: str


def gpu_obstacle(config: ModelConfig, folder: Path) -> GpuObstacle | None:
    """Return why a logits stage cannot run on a GPU; None: it can. Imports torch where that is needed.

    Args:
        config: the stage's config, without errors.
        folder: the folder of the version.

    Raises:
        MissingDependency: the runtime of the stage is not installed, or torch.
    """
    if config.backend != "onnxruntime":
        return _torch_obstacle()
    if cache_kind(config) is not CacheKind.IN_PLACE:
        return _onnxruntime_obstacle()  # the cache stays in the memory of the host
    states = config.sequence_batching.states if config.sequence_batching else ()
    cache_types = {state.data_type for state in states}
    precision = read_parity(folder).get("precision", "fp16")
    if cache_types != {"TYPE_FP16"} or precision != "fp16":
        return GpuObstacle(
            reason=f"it is in {precision} with a KV cache of {', '.join(sorted(cache_types))}, and CUDA has "
            "the operators of exported graphs in fp16 alone",
            remedy="export it with `genserve export --precision fp16`",
        )
    # A cache in place is memory that torch allocates on the GPU.
    return _onnxruntime_obstacle() or _torch_obstacle()


def _onnxruntime_obstacle() -> GpuObstacle | None:
    if "CUDAExecutionProvider" not in import_onnxruntime().get_available_providers():
        return GpuObstacle(
            reason="the installed ONNX Runtime is the build for CPUs",
            remedy=INSTALL_GPU_BUILD,
        )
    return None


def _torch_obstacle() -> GpuObstacle | None:
    torch = import_torch()     # takes seconds, so only on machines with a GPU
    if torch.cuda.is_available():
        return None
    return GpuObstacle(
        reason=f"torch {torch.__version__} finds no CUDA",
        remedy="install torch from PyPI, not from the index for CPUs, and a driver",
    )
