"""PyTorch backend: TorchScript modules, one for all instances on a device."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from genserve.backends.backend import ModelSource, Placement
from genserve.backends.batches import Batches
from genserve.backends.model_file import model_file
from genserve.backends.parameters import integer_parameter
from genserve.backends.per_device import PerDevice
from genserve.backends.torch_module import TorchModule, torch_library
from genserve.config.model_config import ModelConfig
from genserve.inference import Inference

__all__ = ["PyTorchBackend", "TorchVersion", "open_module", "set_threads"]

logger = logging.getLogger(__name__)


class TorchVersion:
    """What the instances of a version share.

    Attributes:
        batches: around the runs.
        modules: one on each device.
    """

    def __init__(self, source: ModelSource) -> None:
        config = source.config
        self.batches = Batches(config)
        self.modules = PerDevice(self._open)
        self._config = config
        self._path = model_file(
            source.folder, filename=config.default_model_filename, default="model.pt", model=config.name
        )

    def _open(self, placement: Placement) -> TorchModule:
        return open_module(self._path, config=self._config, placement=placement)


def open_module(path: Path, *, config: ModelConfig, placement: Placement) -> TorchModule:
    """Load a module onto the device of a placement.

    Raises:
        MissingDependency: PyTorch is not installed.
        RepositoryError: the file cannot be loaded, or does not fit the config.
    """
    set_threads(config.parameters)
    return TorchModule(path, config=config, device=_device(placement, model=config.name))


def _device(placement: Placement, *, model: str) -> str | None:
    if placement.kind == "MODEL":
        return None
    if placement.kind == "GPU" and torch_library().cuda.is_available():
        return f"cuda:{placement.device_id}"
    if placement.kind == "GPU":
        logger.warning(
            "model %s: %s runs on the CPU: this PyTorch was built without CUDA, or sees no GPU",
            model,
            placement.name,
        )
    return "cpu"


class PyTorchBackend:
    """`Backend` of `backend: "pytorch"` and `platform: "pytorch_libtorch"`."""

    @classmethod
    def auto_complete(cls, message: Any, *, path: Path, version: int, default_max_batch_size: int) -> None:
        """See `Backend.auto_complete`. TorchScript does not say the types and shapes of its tensors."""

    @classmethod
    def load(cls, source: ModelSource) -> TorchVersion:
        """See `Backend.load`. A module is loaded as the first instance on its device starts."""
        return TorchVersion(source)

    def __init__(self, source: ModelSource, shared: TorchVersion, placement: Placement) -> None:
        self._batches = shared.batches
        self._module = shared.modules.of(placement)

    def execute(self, batch: Sequence[Inference]) -> None:
        """See `Backend.execute`."""
        self._batches.execute(batch, run=self._module.run)

    def close(self) -> None:
        """See `Backend.close`. The module ends with the last one who holds it."""


def set_threads(parameters: Mapping[str, str]) -> None:
    """Set how many threads torch uses, in the whole process, by the parameters of Triton's backend."""
    intra = integer_parameter(parameters, "INTRA_OP_THREAD_COUNT", default=0)
    inter = integer_parameter(parameters, "INTER_OP_THREAD_COUNT", default=0)
    torch = torch_library()
    if intra > 0:
        torch.set_num_threads(intra)
    if inter > 0 and inter != torch.get_num_interop_threads():
        try:
            torch.set_num_interop_threads(inter)
        except RuntimeError as error:
            logger.warning("INTER_OP_THREAD_COUNT comes too late, torch has begun to work: %s", error)
