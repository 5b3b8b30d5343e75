"""FIL backend: the forests of XGBoost, LightGBM and Treelite, on the CPU.

Configs are those of Triton's backend of this name, whose answers on a CPU are computed by the same library:
https://github.com/triton-inference-server/fil_backend/blob/main/docs/model_config.md
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from genserve.backends.backend import ModelSource, boolean_parameter, integer_parameter, model_file
from genserve.backends.libraries import import_library
from genserve.backends.network_backend import NetworkBackend, NetworkVersion
from genserve.config.model_config import ModelConfig
from genserve.errors import InferenceError, RepositoryError, Status
from genserve.machine import default_threads
from genserve.tensor import Tensor

_INPUT, _OUTPUT = "input__0", "output__0"
_DEFAULT_THRESHOLD = 0.5
_CLASSIFIES = "is_classifier"
_CLASSIFIED = "output_class"    # its name before Triton 25.09


class _ModelType(NamedTuple):
    """A value of the parameter `model_type`.

    Attributes:
        file_name: the file, unless the config names another.
        load: returns the `treelite.Model` for the module, the path, and whether unknown fields are allowed.
    """

    file_name: str
    load: Callable[[Any, str, bool], Any]


_MODEL_TYPES: Mapping[str, _ModelType] = {
    "xgboost": _ModelType(
        "xgboost.model", lambda treelite, path, _: treelite.frontend.load_xgboost_model_legacy_binary(path)
    ),
    "xgboost_json": _ModelType(
        "xgboost.json",
        lambda treelite, path, tolerant: treelite.frontend.load_xgboost_model(
            path, format_choice="json", allow_unknown_field=tolerant
        ),
    ),
    "xgboost_ubj": _ModelType(
        "xgboost.ubj",
        lambda treelite, path, tolerant: treelite.frontend.load_xgboost_model(
            path, format_choice="ubjson", allow_unknown_field=tolerant
        ),
    ),
    "lightgbm": _ModelType(
        "model.txt", lambda treelite, path, _: treelite.frontend.load_lightgbm_model(path)
    ),
    "treelite_checkpoint": _ModelType(
        "checkpoint.tl", lambda treelite, path, _: treelite.Model.deserialize(path)
    ),
}


class Forest:
    """The trees of a version; a `Network`."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        """Load them.

        Args:
            folder: the version's folder.
            config: the model's config.

        Raises:
            MissingDependency: Treelite is not installed.
            RepositoryError: a parameter or a tensor of the config is invalid, or the file cannot be loaded.
        """
        parameters = config.parameters
        self._classifies = _classifies(parameters)
        self._gives_scores = boolean_parameter(parameters, "predict_proba", default=False)
        self._threshold = _threshold(parameters)
        num_threads = integer_parameter(parameters, "cpu_nthread", default=-1)
        # -1 means as many as OpenMP has; Treelite refuses more than that.
        self._num_threads = min(num_threads, default_threads()) if num_threads > 0 else -1
        self._model = _load(folder, config)
        self._predict = import_library("treelite.gtil", **_NEEDS).predict
        self._num_classes = int(self._model.get_header_accessor().get_field("num_class")[0])
        self._width = _width(config, self._model)

    def run(self, inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> dict[str, Tensor]:
        """Return a row of scores, or one class, for each row of features.

        Raises:
            InferenceError: the rows have another number of features than the trees.
        """
        rows = inputs[_INPUT].array
        if rows.ndim != 2 or rows.shape[1] != self._model.num_feature:
            raise InferenceError(
                f"the input '{_INPUT}' has the shape {list(rows.shape)}, but the model expects rows of "
                f"{self._model.num_feature} features"
            )
        scores = self._predict(self._model, rows, nthread=self._num_threads)
        answers = self._answers(scores.reshape(len(rows), -1).astype(np.float32, copy=False))
        return {_OUTPUT: Tensor(_OUTPUT, np.ascontiguousarray(answers))}

    def _answers(self, scores: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the output for the scores of each row: one for each class, or that of the positive class."""
        if not self._classifies:
            return scores
        if self._gives_scores:
            is_pair = self._num_classes == 1 and self._width == 2
            return np.concatenate([1 - scores, scores], axis=1) if is_pair else scores
        found = scores.argmax(axis=1) if self._num_classes > 1 else scores[:, 0] > self._threshold
        return found.astype(np.float32)[:, None]


class FilBackend(NetworkBackend):
    """`Backend` of `backend: "fil"`."""

    @classmethod
    def load(cls, source: ModelSource) -> NetworkVersion:
        """See `Backend.load`. All instances share the trees, wherever they are placed."""
        forest = Forest(source.folder, source.config)
        return NetworkVersion(lambda _: forest, config=source.config)

    @classmethod
    def check_files(cls, folder: Path, config: ModelConfig) -> None:
        """See `Backend`; loads the trees."""
        Forest(folder, config)


_NEEDS = {"needed_for": "serving a forest of trees needs Treelite", "remedy": "pip install 'genserve[fil]'"}


def _load(folder: Path, config: ModelConfig) -> Any:
    """Return the `treelite.Model` of a version; for the errors see `Forest`."""
    name = config.parameters.get("model_type", "xgboost")
    kind = _MODEL_TYPES.get(name)
    if kind is None:
        raise RepositoryError(
            f"{name} not recognized as a valid serialization format.",
            status=Status.UNSUPPORTED,
            remedy=f"set the parameter model_type to {', '.join(_MODEL_TYPES)}",
        )
    path = model_file(
        folder, filename=config.default_model_filename, default=kind.file_name, model=config.name
    )
    treelite = import_library("treelite", **_NEEDS)
    tolerant = boolean_parameter(config.parameters, "xgboost_allow_unknown_field", default=False)
    try:
        return kind.load(treelite, str(path), tolerant)
    except treelite.TreeliteError as error:
        raise RepositoryError(
            f"failed to load model '{config.name}': {' '.join(str(error).split())}",
            status=Status.UNKNOWN,
            remedy=f"check that {path.name} is a complete model of the type {name}",
        ) from None


def _width(config: ModelConfig, model: Any) -> int:
    """Return the numbers of an output row by the config; raises RepositoryError if its tensors are wrong."""
    shapes = {}
    for specs, name in ((config.inputs, _INPUT), (config.outputs, _OUTPUT)):
        if [spec.name for spec in specs] != [name]:
            raise RepositoryError(
                f"unable to load model '{config.name}', its only "
                f"{'input' if name == _INPUT else 'output'} must be '{name}'",
                remedy="write input__0 and output__0 with `data_type: TYPE_FP32`",
            )
        shapes[name] = specs[0].model_dims
    if shapes[_INPUT][-1] not in (-1, model.num_feature):
        raise RepositoryError(
            f"unable to load model '{config.name}', configuration expects {shapes[_INPUT][-1]} features, "
            f"model provides {model.num_feature}",
            remedy=f"write `dims: [ {model.num_feature} ]` for {_INPUT}",
        )
    return int(shapes[_OUTPUT][-1])


def _classifies(parameters: Mapping[str, str]) -> bool:
    """Return whether a model classifies; raises RepositoryError if the config does not say so."""
    for name in (_CLASSIFIED, _CLASSIFIES):
        if name in parameters:
            return boolean_parameter(parameters, name, default=False)
    raise RepositoryError(
        f"the parameter {_CLASSIFIES} is missing",
        remedy=f"set the parameter {_CLASSIFIES} to true for a classifier, and to false for a regressor",
    )


def _threshold(parameters: Mapping[str, str]) -> float:
    """Return the least score of the positive class; raises RepositoryError if it is not a number."""
    text = parameters.get("threshold", "")
    try:
        return float(text) if text else _DEFAULT_THRESHOLD
    except ValueError:
        raise RepositoryError(
            f"failed to convert '{text}' to a number", remedy="set the parameter threshold to one such as 0.5"
        ) from None
