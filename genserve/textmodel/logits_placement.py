"""Logits placement: on which device a logits stage runs."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from genserve.backends.backend import Placement
from genserve.backends.libraries import import_onnxruntime, import_torch
from genserve.config.model_config import ModelConfig
from genserve.config.normalise import normalise, num_gpus
from genserve.config.schema import model_config
from genserve.errors import RepositoryError
from genserve.repository.index import ModelEntry
from genserve.repository.instances import group_placements
from genserve.repository.model_validation import accept
from genserve.textmodel.logits_config import read_parity

__all__ = ["logits_placement"]


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Obstacle:
    """Why a stage cannot run on a GPU that is there."""

    reason: str
    remedy: str


def logits_placement(entry: ModelEntry, *, strict_placement: bool = False) -> Placement:
    """Choose the device by the instance groups of a config that has no error: the first of the first group.

    A stage that no GPU can run, or for which something is not installed, runs on the CPU.

    Raises:
        RepositoryError: with `strict_placement`, the config wants a GPU in vain.
        MissingDependency: ONNX Runtime is not installed, or torch, for a GPU.
    """
    assert entry.config is not None  # or it would have an error
    message = type(entry.parsed.message)()
    message.CopyFrom(entry.parsed.message)
    accept(
        normalise(message, model_folder=entry.path, gpus=num_gpus(), strict_placement=strict_placement)
    )
    config = model_config(message, name=entry.name)
    first = next(group_placements(config.instance_groups[0]))
    obstacle = _obstacle(config, entry) if first.kind == "GPU" else None
    if obstacle is None:
        return first
    text = f"model {entry.name} cannot run on a GPU: {obstacle.reason}"
    wanted = any(group.kind == "KIND_GPU" for group in entry.config.instance_groups)
    if wanted and strict_placement:
        raise RepositoryError(text, remedy=obstacle.remedy)
    level = logging.WARNING if wanted else logging.INFO
    logger.log(level, "%s; it runs on the CPU (%s)", text, obstacle.remedy)
    return replace(first, kind="CPU", device_id=0)


def _obstacle(config: ModelConfig, entry: ModelEntry) -> _Obstacle | None:
    if config.backend != "onnxruntime":
        return _obstacle_of_torch()
    states = config.sequence_batching.states if config.sequence_batching else ()
    if not any(state.same_buffer for state in states):
        return _obstacle_of_onnx()  # all caches but those in place stay in the memory of the host
    cache_types = {state.data_type for state in states}
    precision = read_parity(entry.latest_version()).get("precision", "fp16")
    if cache_types != {"TYPE_FP16"} or precision != "fp16":
        return _Obstacle(
            reason=f"it is in {precision} with a KV cache of {', '.join(sorted(cache_types))}, and CUDA has "
            "the operators of exported graphs in fp16 alone",
            remedy="export it with `genserve export --precision fp16`",
        )
    # A cache in place is memory that torch takes on the GPU.
    return _obstacle_of_onnx() or _obstacle_of_torch()


def _obstacle_of_onnx() -> _Obstacle | None:
    if "CUDAExecutionProvider" not in import_onnxruntime().get_available_providers():
        return _Obstacle(
            reason="this ONNX Runtime is the one for CPUs",
            remedy="`pip uninstall onnxruntime`, then `pip install 'genserve[gpu]'`",
        )
    return None


def _obstacle_of_torch() -> _Obstacle | None:
    torch = import_torch()  # only here, where a GPU is: it takes seconds
    if torch.cuda.is_available():
        return None
    return _Obstacle(
        reason=f"torch {torch.__version__} finds no CUDA",
        remedy="install the torch that PyPI has, not the one of the index for CPUs, and a driver",
    )
