"""TensorFlow backend: SavedModels, one for all instances."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from genserve.backends.backend import ModelSource, model_file
from genserve.backends.libraries import import_tensorflow
from genserve.backends.network_backend import NetworkBackend, NetworkVersion, run_error
from genserve.config.model_config import ModelConfig
from genserve.errors import RepositoryError, Status
from genserve.tensor import DataType, Tensor

logger = logging.getLogger(__name__)

DEFAULT_SIGNATURE = "serving_default"


class SavedModel:
    """A signature of a SavedModel; a `Network`."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        """Load it.

        Raises:
            MissingDependency: TensorFlow is not installed.
            RepositoryError: the folder cannot be loaded, or its signature does not match the config.
        """
        self._tensorflow = import_tensorflow()
        name = config.parameters.get("TF_SIGNATURE_DEF", DEFAULT_SIGNATURE)
        try:
            self._model = self._tensorflow.saved_model.load(str(path))     # owns the variables
            self._signature = self._model.signatures[name]
        except KeyError as error:
            raise RepositoryError(
                f"unable to load model '{config.name}', there is no signature '{name}'",
                remedy=f"the model has the signatures {', '.join(self._model.signatures)}",
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
            InferenceError: TensorFlow fails; see `run_error`.
        """
        convert = self._tensorflow.convert_to_tensor
        try:
            results = self._signature(**{name: convert(tensor.array) for name, tensor in inputs.items()})
        except Exception as error:  # TensorFlow's exceptions share no base class
            raise run_error(f"TensorFlow execute failure: {error}", inputs) from error
        return {name: _from_tensorflow(name, results[name].numpy()) for name in outputs}


class TensorFlowBackend(NetworkBackend):
    """`Backend` of `backend: "tensorflow"` and `platform: "tensorflow_savedmodel"`."""

    default_file = "model.savedmodel"

    @classmethod
    def load(cls, source: ModelSource) -> NetworkVersion:
        """See `Backend.load`. TensorFlow places the model itself: all instances share one."""
        accelerators = source.config.message.optimization.execution_accelerators
        for accelerator in accelerators.gpu_execution_accelerator:
            logger.warning(
                "model %s runs without the accelerator %s, which TensorFlow no longer supports at load",
                source.name,
                accelerator.name,
            )
        path = model_file(
            source.folder,
            filename=source.config.default_model_filename,
            default=cls.default_file,
            model=source.name,
        )
        model = SavedModel(path, source.config)
        return NetworkVersion(lambda _: model, config=source.config)

    @classmethod
    def check_files(cls, folder: Path, config: ModelConfig) -> None:
        """See `Backend`; looks for the graph, without TensorFlow."""
        path = folder / config.default_model_filename
        if path.is_dir() and not any((path / f"saved_model.{end}").is_file() for end in ("pb", "pbtxt")):
            raise RepositoryError(
                f"unable to load model '{config.name}': there is no saved_model.pb in {path.name}",
                remedy="copy the whole folder that `tf.saved_model.save` wrote",
            )


def _check_names(kind: str, names: Sequence[str], known: Mapping[str, Any]) -> None:
    for name in names:
        if name not in known:
            raise RepositoryError(
                f"unexpected inference {kind} '{name}', allowed {kind}s are: {', '.join(sorted(known))}"
            )


def _from_tensorflow(name: str, array: Any) -> Tensor:
    array = np.asarray(array)
    if array.dtype.kind in "OSU":
        return Tensor(name, array.astype(object), data_type=DataType.BYTES)
    return Tensor(name, array)
