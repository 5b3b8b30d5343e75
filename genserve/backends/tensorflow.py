"""TensorFlow backend: SavedModels, one for all instances."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from genserve.backends.backend import ModelSource, Placement, model_file
from genserve.backends.batch_runner import BatchRunner
from genserve.backends.libraries import importing
from genserve.config.model_config import ModelConfig
from genserve.errors import InferenceError, MissingDependency, RepositoryError, Status
from genserve.inference import Inference
from genserve.tensor import DataType, Tensor

__all__ = ["SavedModel", "TensorFlowBackend"]

logger = logging.getLogger(__name__)

DEFAULT_SIGNATURE = "serving_default"


class SavedModel:
    """A signature of a SavedModel. Several threads may run it at a time.

    Attributes:
        batches: around the runs.
    """

    def __init__(self, path: Path, config: ModelConfig) -> None:
        """Load it.

        Raises:
            MissingDependency: TensorFlow is not installed.
            RepositoryError: the folder cannot be loaded, or its signature does not fit the config.
        """
        self.batches = BatchRunner(config)
        self._tensorflow = _tensorflow()
        name = config.parameters.get("TF_SIGNATURE_DEF", DEFAULT_SIGNATURE)
        try:
            self._model = self._tensorflow.saved_model.load(str(path))     # keeps the variables alive
            self._signature = self._model.signatures[name]
        except KeyError as error:
            raise RepositoryError(
                f"unable to load model '{config.name}', there is no signature '{name}'",
                remedy=f"signatures of the model: {', '.join(self._model.signatures)}",
            ) from error
        except Exception as error:  # TensorFlow's exceptions share no base class
            raise RepositoryError(
                f"unable to load model '{config.name}': {error}", status=Status.INTERNAL
            ) from error
        _, inputs = self._signature.structured_input_signature
        _check_names("input", [spec.name for spec in config.inputs], inputs)
        _check_names("output", [spec.name for spec in config.outputs], self._signature.structured_outputs)

    def run(self, inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> dict[str, Tensor]:
        """Run it.

        Raises:
            InferenceError: TensorFlow fails.
        """
        convert = self._tensorflow.convert_to_tensor
        try:
            results = self._signature(**{name: convert(tensor.array) for name, tensor in inputs.items()})
        except Exception as error:  # TensorFlow's exceptions share no base class
            raise InferenceError(f"TensorFlow execute failure: {error}", status=Status.INTERNAL) from error
        return {name: _from_tensorflow(name, results[name].numpy()) for name in outputs}


class TensorFlowBackend:
    """`Backend` of `backend: "tensorflow"` and `platform: "tensorflow_savedmodel"`."""

    @classmethod
    def auto_complete(cls, message: Any, *, path: Path, version: int, default_max_batch_size: int) -> None:
        """See `Backend.auto_complete`. Not done: inputs and outputs are to be written."""

    @classmethod
    def load(cls, source: ModelSource) -> SavedModel:
        """See `Backend.load`."""
        accelerators = source.config.message.optimization.execution_accelerators
        for accelerator in accelerators.gpu_execution_accelerator:
            logger.warning(
                "model %s runs without the accelerator %s: TensorFlow does not take it at load any more",
                source.name,
                accelerator.name,
            )
        path = model_file(
            source.folder,
            filename=source.config.default_model_filename,
            default="model.savedmodel",
            model=source.name,
        )
        return SavedModel(path, source.config)

    def __init__(self, source: ModelSource, shared: SavedModel, placement: Placement) -> None:
        self._model = shared

    def execute(self, batch: Sequence[Inference]) -> None:
        """See `Backend.execute`."""
        self._model.batches.execute(batch, run=self._model.run)

    def close(self) -> None:
        """See `Backend.close`. The model ends with the last one who holds it."""


def _tensorflow() -> Any:
    try:
        with importing("tensorflow"):
            import tensorflow
    except ImportError as error:
        raise MissingDependency(
            "serving a SavedModel needs TensorFlow", remedy="pip install 'genserve[tensorflow]'"
        ) from error
    return tensorflow


def _check_names(what: str, names: Sequence[str], known: Mapping[str, Any]) -> None:
    for name in names:
        if name not in known:
            raise RepositoryError(
                f"unexpected inference {what} '{name}', allowed {what}s are: {', '.join(sorted(known))}"
            )


def _from_tensorflow(name: str, array: Any) -> Tensor:
    array = np.asarray(array)
    if array.dtype.kind in "OSU":
        return Tensor(name, array.astype(object), data_type=DataType.BYTES)
    return Tensor(name, array)
