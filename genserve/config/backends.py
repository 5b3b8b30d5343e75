"""Backends: which exist, which one runs a model, and the settings of `--backend-config`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from genserve.errors import GenserveError, RepositoryError

logger = logging.getLogger(__name__)

ENTRY_POINTS = "genserve.backends"
DEFAULT_MAX_BATCH_SIZE = 4      # Triton's
_MAX_DIGITS = 19                # digits of an int64

_DIRECTORY = "backend-directory"
_BATCH = "default-max-batch-size"
_PIPES = "tensors go to a model's process through a pipe, and within the server by pointer"
_POOLS = "each session has its own threads, as many as `intra_op_thread_count` in the model's parameters"


def version_folders(model_folder: Path) -> dict[int, Path]:
    """Return the folders named by a number without leading zeros, ascending by version."""
    try:
        folders = [path for path in model_folder.iterdir() if path.is_dir()]
    except OSError:     # removed meanwhile, or not readable
        return {}
    versions = {int(path.name): path for path in folders if _is_version(path.name)}
    return dict(sorted(versions.items()))


def _is_version(name: str) -> bool:
    is_number = name.isascii() and name.isdigit() and not name.startswith("0")
    return is_number and len(name) <= _MAX_DIGITS and int(name) < 2**63     # int64 in Triton's schema


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFormat:
    """A kind of model file that a backend loads."""

    platform: str = ""      # Triton's older name of backend and format together
    file_name: str          # in the folder of a version, unless `default_model_filename` names another


class ParameterType(StrEnum):
    """What the text of a model's parameter stands for; the value describes it in errors."""

    NUMBER = "integral number"
    POSITIVE = "number above 0"
    SWITCH = "boolean value"
    BYTES = "number of bytes above 0"
    METHOD = "method of speculation"
    POOLING = "kind of pooling"
    TEXT = "text"


# genserve's own, for the logits stage of a text model; in any other model they are a mistake.
LOGITS_PARAMETERS: Mapping[str, ParameterType] = {
    "max_sequence_length": ParameterType.POSITIVE,  # tokens of a sequence, prompt and answer
    "kv_cache_bytes": ParameterType.BYTES,          # memory of the KV cache
    "prefix_cache": ParameterType.SWITCH,           # whether sequences share the blocks of a common prefix
    "pipeline_stages": ParameterType.POSITIVE,      # graphs that the layers are cut into
    "speculation": ParameterType.METHOD,            # how tokens are drafted
    "draft_model": ParameterType.TEXT,              # the ensemble that drafts the tokens
    "verify_on_load": ParameterType.SWITCH,         # whether a load that changes recorded answers is refused
    "max_loaded_adapters": ParameterType.POSITIVE,  # adapters in memory
}
# genserve's own, for the encoder of an embedding or a reranking model.
ENCODER_PARAMETERS: Mapping[str, ParameterType] = {
    "pooling": ParameterType.POOLING,   # from hidden states to a vector; makes the model an encoder
    "normalize": ParameterType.SWITCH,  # whether a vector is scaled to the length 1
    "sigmoid": ParameterType.SWITCH,    # whether a score is mapped to numbers from 0 to 1
}
# The settings of `--backend-config` for all backends.
_SETTINGS_OF_ALL: Mapping[str, str | None] = {
    _DIRECTORY: None,
    _BATCH: None,
    "triton-backend-memory-tracker": "statistics do not include the memory of models",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltInBackend:
    """A backend that comes with genserve.

    Attributes:
        implementation: "module:class" of its `Backend`, imported when a model needs it; empty: the engine of
            a text model runs its models.
        formats: the kinds of its model files; empty: the backend finds the file itself.
        further_files: the files that it needs beside the model file.
        is_data: whether its files are data, and not code, so that clients may upload them.
        parameters: the `parameters` of a model that it reads; others have no effect. None: the model reads
            its own.
        settings: its settings of `--backend-config`. None: supported. A text: ignored, since the setting
            changes memory and threads but no answer; the text says what happens instead.
    """

    implementation: str
    formats: tuple[ModelFormat, ...] = ()
    further_files: tuple[str, ...] = ()
    is_data: bool = False
    parameters: Mapping[str, ParameterType] | None = field(default_factory=dict)
    settings: Mapping[str, str | None] = field(default_factory=dict)


# In the order in which Triton looks for their files.
BUILT_IN = {
    "tensorflow": BuiltInBackend(
        implementation="genserve.backends.tensorflow:TensorFlowBackend",
        formats=(
            ModelFormat(platform="tensorflow_savedmodel", file_name="model.savedmodel"),
            ModelFormat(platform="tensorflow_graphdef", file_name="model.graphdef"),
        ),
        parameters={
            "TF_GRAPH_TAG": ParameterType.TEXT,
            "TF_SIGNATURE_DEF": ParameterType.TEXT,
            "TF_NUM_INTRA_THREADS": ParameterType.NUMBER,
            "TF_NUM_INTER_THREADS": ParameterType.NUMBER,
            "TF_USE_PER_SESSION_THREADS": ParameterType.NUMBER,
            "MAX_SESSION_SHARE_COUNT": ParameterType.NUMBER,
        },
        settings={
            _BATCH: "configs of TensorFlow models are not completed from their files",
            "allow-soft-placement": "TensorFlow places operators by its own default",
            "gpu-memory-fraction": "TensorFlow takes memory as it needs it",
        },
    ),
    "onnxruntime": BuiltInBackend(
        implementation="genserve.backends.onnxruntime:OnnxRuntimeBackend",
        formats=(ModelFormat(platform="onnxruntime_onnx", file_name="model.onnx"),),
        is_data=True,
        parameters={
            **LOGITS_PARAMETERS,
            **ENCODER_PARAMETERS,
            "intra_op_thread_count": ParameterType.NUMBER,
            "inter_op_thread_count": ParameterType.NUMBER,
            "execution_mode": ParameterType.NUMBER,
            "enable_mem_arena": ParameterType.NUMBER,
            "enable_mem_pattern": ParameterType.NUMBER,
            "memory.enable_memory_arena_shrinkage": ParameterType.TEXT,
            "session.use_device_allocator_for_initializers": ParameterType.NUMBER,
        },
        settings={
            _BATCH: None,
            "enable-global-threadpool": _POOLS,
            "intra_op_thread_count": _POOLS,
            "inter_op_thread_count": _POOLS,
        },
    ),
    "pytorch": BuiltInBackend(
        implementation="genserve.backends.pytorch:PyTorchBackend",
        formats=(
            ModelFormat(platform="pytorch_libtorch", file_name="model.pt"),
            ModelFormat(platform="libtorch", file_name="model.pt"),
        ),
        parameters={
            **LOGITS_PARAMETERS,
            "DISABLE_OPTIMIZED_EXECUTION": ParameterType.SWITCH,
            "INFERENCE_MODE": ParameterType.SWITCH,
            "DISABLE_CUDNN": ParameterType.SWITCH,
            "ENABLE_WEIGHT_SHARING": ParameterType.SWITCH,
            "ENABLE_CACHE_CLEANING": ParameterType.SWITCH,
            "INTER_OP_THREAD_COUNT": ParameterType.NUMBER,
            "INTRA_OP_THREAD_COUNT": ParameterType.NUMBER,
        },
    ),
    "python": BuiltInBackend(
        implementation="genserve.backends.python.python_backend:PythonBackend",
        formats=(ModelFormat(file_name="model.py"),),
        parameters=None,
        settings={  # and those of every backend that is a model.py
            "shm-default-byte-size": _PIPES,
            "shm-growth-byte-size": _PIPES,
            "shm-region-prefix-name": _PIPES,
            "shm_message_queue_size": _PIPES,
            "stub-timeout-seconds": "the server waits for a model's process until it exits",
            "thread-pool-size": "a BLS call waits on the thread that makes it",
        },
    ),
    "tokenizer": BuiltInBackend(
        implementation="genserve.backends.tokenizer_backend:TokenizerBackend",
        formats=(ModelFormat(file_name="tokenizer.json"),),
        further_files=("tokenizer_config.json",),
        is_data=True,
        parameters={
            "max_length": ParameterType.POSITIVE,       # tokens of a text
            "prompts": ParameterType.TEXT,              # what is written before texts: JSON, by their use
            "default_prompt_name": ParameterType.TEXT,  # that of requests which name none
        },
    ),
    "adapter": BuiltInBackend(
        implementation="",
        formats=(ModelFormat(file_name="adapter_model.safetensors"),),      # PEFT's
        further_files=("adapter_config.json",),
        is_data=True,
        parameters={"base_model": ParameterType.TEXT},      # the ensemble whose adapter it is
    ),
    "fil": BuiltInBackend(
        implementation="genserve.backends.fil:FilBackend",
        parameters={
            "model_type": ParameterType.TEXT,
            "is_classifier": ParameterType.SWITCH,
            "output_class": ParameterType.SWITCH,
            "predict_proba": ParameterType.SWITCH,
            "threshold": ParameterType.TEXT,
            "xgboost_allow_unknown_field": ParameterType.SWITCH,
            "cpu_nthread": ParameterType.NUMBER,
            # These change the time on a GPU, and no answer.
            "algo": ParameterType.TEXT,
            "layout": ParameterType.TEXT,
            "storage_type": ParameterType.TEXT,
            "blocks_per_sm": ParameterType.NUMBER,
            "chunk_size": ParameterType.NUMBER,
            "threads_per_tree": ParameterType.NUMBER,
            "transfer_threshold": ParameterType.NUMBER,
            "use_experimental_optimizations": ParameterType.SWITCH,
        },
    ),
}


def known_backends(folders: Iterable[Path] = ()) -> tuple[str, ...]:
    """Return the names that `backend` may have.

    Args:
        folders: folders with backends written in Python: `<folder>/<name>/model.py`.
    """
    in_folders = (file.parent.name for folder in folders for file in folder.glob("*/model.py"))
    return tuple(dict.fromkeys((*BUILT_IN, *_installed_backends(tuple(sys.path)), *sorted(in_folders))))


@cache
def _installed_backends(_path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names that packages on `sys.path` register; to read the metadata of all takes 10 ms."""
    return tuple(sorted(entry.name for entry in entry_points(group=ENTRY_POINTS)))


def deduce_backend(message: Any, model_folder: Path) -> None:
    """Fill in `backend`, `platform` and `default_model_filename` as far as they follow from each other.

    A backend that is not named follows from the platform, else from the model's file name, else from the
    files of the first version, else from the end of the model's name: `m.python`.

    Args:
        message: the `inference.ModelConfig`, changed in place.
        model_folder: its name is the model's.

    Raises:
        RepositoryError: the backend cannot be deduced. The message is Triton's.
    """
    if message.platform == "ensemble":
        return
    files = _files(model_folder)
    if not message.backend:
        message.backend = _backend(message, files=files)
    if not (message.backend or message.platform or message.default_model_filename):
        message.backend = _suffix(model_folder.name)
        message.default_model_filename = f"model.{message.backend}"
    built_in = BUILT_IN.get(message.backend)
    if built_in is not None and built_in.formats:
        form = _format(message, built_in.formats, files=files)
        message.platform = message.platform or form.platform
        message.default_model_filename = message.default_model_filename or form.file_name


def _files(model_folder: Path) -> set[str]:
    """Return the names in the folder of the lowest version."""
    folders = version_folders(model_folder)
    try:
        return {path.name for path in folders[min(folders)].iterdir()} if folders else set()
    except OSError:     # removed meanwhile, or not readable
        return set()


def _backend(message: Any, *, files: set[str]) -> str:
    is_unnamed = not message.platform and not message.default_model_filename
    for name, backend in BUILT_IN.items():
        for form in backend.formats:
            if _is_named(form, message) or (is_unnamed and form.file_name in files):
                return name
    return ""


def _format(message: Any, formats: tuple[ModelFormat, ...], *, files: set[str]) -> ModelFormat:
    named = [form for form in formats if _is_named(form, message)]
    found = [form for form in formats if form.file_name in files]
    return [*named, *found, *formats][0]


def _is_named(form: ModelFormat, message: Any) -> bool:
    if message.platform:
        return bool(message.platform == form.platform)
    return bool(message.default_model_filename == form.file_name)


def _suffix(model: str) -> str:
    _, dot, suffix = model.partition(".")
    if not dot:
        raise RepositoryError(
            f"Invalid model name: Could not determine backend for model '{model}' with no backend in model "
            "configuration. Expected model name of the form 'model.<backend_name>'.",
            remedy='add `backend: "python"`, "onnxruntime", "pytorch", "tensorflow" or "tokenizer", or '
            '`platform: "ensemble"`; or name the file of the model 1/model.py or 1/model.onnx',
        )
    return suffix


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendConfig:
    """The settings of backends from the command line.

    Attributes:
        backend_directory: the folder with backends written in Python.
        default_max_batch_size: `max_batch_size` of an ONNX model whose graph can batch and whose config does
            not set it; 0: such a model does not batch.
    """

    backend_directory: Path | None = None
    default_max_batch_size: int = DEFAULT_MAX_BATCH_SIZE

    @classmethod
    def parse(cls, words: Iterable[str], *, backend_directory: Path | None = None) -> BackendConfig:
        """Read the values of `--backend-config`.

        Settings of Triton that are ignored here are logged as warnings.

        Args:
            words: each "BACKEND,SETTING=VALUE", or "SETTING=VALUE" for all backends.
            backend_directory: the value of `--backend-directory`.

        Raises:
            GenserveError: an unknown backend or setting, or an invalid value.
        """
        settings = [_split(word) for word in words]
        for backend, name, value in settings:
            if (backend, name) == ("", _DIRECTORY):
                if backend_directory not in (None, Path(value)):
                    raise GenserveError(
                        f"--backend-directory is {backend_directory}, but --backend-config sets {value}",
                        remedy="give --backend-directory alone",
                    )
                backend_directory = Path(value)
        batch_sizes = {"": DEFAULT_MAX_BATCH_SIZE}
        for backend, name, value in settings:
            instead = _instead(backend, name, directory=backend_directory)
            if instead is not None:
                of = f"{backend},{name}" if backend else name
                logger.warning("--backend-config=%s=%s is ignored: %s", of, value, instead)
            elif name == _BATCH:
                batch_sizes[backend] = _batch_size(value)
        return cls(
            backend_directory=backend_directory,
            default_max_batch_size=batch_sizes.get("onnxruntime", batch_sizes[""]),
        )


def _split(word: str) -> tuple[str, str, str]:
    """Return backend, setting and value; an empty backend means all of them."""
    key, _, value = word.partition("=")
    backend, comma, name = key.rpartition(",")
    if not name or not value or (comma and not backend):
        raise GenserveError(
            f"--backend-config={word} is not BACKEND,SETTING=VALUE or SETTING=VALUE",
            remedy="write for example --backend-config=onnxruntime,default-max-batch-size=8",
        )
    return backend, name, value


def _instead(backend: str, name: str, *, directory: Path | None) -> str | None:
    """Return what happens instead of a setting; None: it is supported."""
    backends = known_backends([directory] if directory else [])
    if backend and backend not in backends:
        raise GenserveError(
            f"--backend-config names an unknown backend '{backend}'",
            remedy=f"known backends: {', '.join(backends)}",
        )
    is_python_based = backend not in BUILT_IN and directory is not None and (directory / backend).is_dir()
    built_in = BUILT_IN.get("python" if is_python_based else backend)
    known = _SETTINGS_OF_ALL if not backend else built_in.settings if built_in else {}
    if name not in known:
        whose = f"of the backend '{backend}'" if backend else "for all backends"
        raise GenserveError(
            f"--backend-config sets '{name}', which is not a setting {whose}",
            remedy=f"settings {whose}: {', '.join(known) or 'none'}",
        )
    return known[name]


def _batch_size(value: str) -> int:
    if not value.isdecimal() or int(value) >= 2**31:
        raise GenserveError(
            f"--backend-config sets {_BATCH} to '{value}', which is not a batch size",
            remedy="write an integer; 0: models without `max_batch_size` do not batch",
        )
    return int(value)
