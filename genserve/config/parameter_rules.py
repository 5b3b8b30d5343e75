"""Parameter rules: which `parameters` each backend reads, and their types."""

from __future__ import annotations

import re
from collections.abc import Iterator

from genserve.config.diagnostics import Diagnostic, ValidationContext
from genserve.errors import suggestion

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

_NUMBER, _POSITIVE, _SWITCH, _TEXT = "integral number", "number above 0", "boolean value", "text"
_BYTES = "number of bytes above 0"
_METHOD = "method of speculation"
# genserve's own, for a logits stage.
_LOGITS = {
    "max_sequence_length": _POSITIVE,     # tokens of a sequence, prompt and answer
    "kv_cache_bytes": _BYTES,             # memory of the KV cache
    "prefix_cache": _SWITCH,              # whether sequences share the blocks of a common prefix
    "pipeline_stages": _POSITIVE,         # graphs that the layers are cut into
    "speculation": _METHOD,               # how tokens are drafted
    "draft_model": _TEXT,                 # the ensemble that drafts the tokens
}
_ONNXRUNTIME = _LOGITS | {
    "intra_op_thread_count": _NUMBER,
    "inter_op_thread_count": _NUMBER,
    "execution_mode": _NUMBER,
    "enable_mem_arena": _NUMBER,
    "enable_mem_pattern": _NUMBER,
    "memory.enable_memory_arena_shrinkage": _TEXT,
    "session.use_device_allocator_for_initializers": _NUMBER,
}
_PYTORCH = _LOGITS | {
    "DISABLE_OPTIMIZED_EXECUTION": _SWITCH,
    "INFERENCE_MODE": _SWITCH,
    "DISABLE_CUDNN": _SWITCH,
    "ENABLE_WEIGHT_SHARING": _SWITCH,
    "ENABLE_CACHE_CLEANING": _SWITCH,
    "INTER_OP_THREAD_COUNT": _NUMBER,
    "INTRA_OP_THREAD_COUNT": _NUMBER,
}
_TENSORFLOW = {
    "TF_GRAPH_TAG": _TEXT,
    "TF_SIGNATURE_DEF": _TEXT,
    "TF_NUM_INTRA_THREADS": _NUMBER,
    "TF_NUM_INTER_THREADS": _NUMBER,
    "TF_USE_PER_SESSION_THREADS": _NUMBER,
    "MAX_SESSION_SHARE_COUNT": _NUMBER,
}
# No other parameter of these backends has an effect; a model of another backend may read its own.
PARAMETERS_OF_BACKENDS: dict[str, dict[str, str]] = {
    "onnxruntime": _ONNXRUNTIME,
    "pytorch": _PYTORCH,
    "tensorflow": _TENSORFLOW,
    "tokenizer": {},
}
# The valid values of a Python model's parameters.
_PYTHON = {"EXECUTION": ("process",), "FORCE_CPU_ONLY_INPUT_TENSORS": ("yes", "no")}
# Parameters of any model that Triton reads and genserve ignores.
_IGNORED = {
    "TRITON_BATCH_STRATEGY_PATH": "`dynamic_batching` decides how requests are batched",
    "MAX_BATCH_VOLUME_BYTES": "only `max_batch_size` limits a batch",
}
# The same for Triton's PyTorch backend.
_IGNORED_IN_PYTORCH = {
    "ENABLE_NVFUSER": "torch no longer has NVFuser",
    "ENABLE_TENSOR_FUSER": "torch decides what it fuses",
    "ENABLE_JIT_EXECUTOR": "torch has one such setting for all models",
    "ENABLE_JIT_PROFILING": "torch has one such setting for all models",
    "NUM_THREADS": "set INTRA_OP_THREAD_COUNT",
    "NUM_INTEROP_THREADS": "set INTER_OP_THREAD_COUNT",
    "TORCH_COMPILE_OPTIONAL_PARAMETERS": "TorchScript is compiled already",
}
# The parameters of logits stages; in any other model they are a mistake.
LOGITS_PARAMETERS = frozenset(_LOGITS)


def byte_size(text: str) -> int | None:
    """Return the bytes of a text such as `2GiB`, `1.5 GB` or `1048576`; None: the text is not an amount."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    return None if match is None or unit is None else int(float(match[1]) * unit)


def validate_parameters(config: ValidationContext) -> Iterator[Diagnostic]:
    """Yield the unknown, ignored and invalid parameters."""
    backend = config.message.backend
    for name, parameter in sorted(config.message.parameters.items()):
        value = parameter.string_value
        ignored = _IGNORED | (_IGNORED_IN_PYTORCH if backend == "pytorch" else {})
        if name in ignored:
            yield _warning(config, name, f"is ignored: {ignored[name]}", remedy="leave it out")
        elif backend == "python":
            yield from _python(config, name, value)
        elif backend in PARAMETERS_OF_BACKENDS and name not in PARAMETERS_OF_BACKENDS[backend]:
            known = PARAMETERS_OF_BACKENDS[backend]
            remedy = suggestion(name, known=known) if known else "leave it out"
            yield _warning(config, name, "is unknown, and has no effect", remedy=remedy)
        elif backend in PARAMETERS_OF_BACKENDS:
            yield from _typed(config, name, value, kind=PARAMETERS_OF_BACKENDS[backend][name])


def _python(config: ValidationContext, name: str, value: str) -> Iterator[Diagnostic]:
    if name == "EXECUTION_ENV_PATH":
        yield _warning(
            config,
            name,
            "is ignored: the model runs in genserve's environment",
            remedy="install its packages there, with pip",
        )
    elif name in _PYTHON and value not in _PYTHON[name]:
        yield config.error(
            "parameters",
            f"parameter {name!r} is {value!r}",
            remedy=f"write {' or '.join(map(repr, _PYTHON[name]))}, or leave it out",
            key=name,
        )


def _typed(config: ValidationContext, name: str, value: str, *, kind: str) -> Iterator[Diagnostic]:
    is_right = {
        _NUMBER: value.strip().lstrip("-").isdecimal(),
        _POSITIVE: value.isdecimal() and int(value) > 0,
        _SWITCH: value.lower() in ("true", "false", "1", "0"),
        _BYTES: bool(byte_size(value)),
        _METHOD: value in ("prompt_lookup", "none"),
        _TEXT: True,
    }
    if not is_right[kind]:
        remedies = {
            _SWITCH: 'write "true" or "false"',
            _BYTES: 'write an amount such as "2GiB"',
            _METHOD: 'write "prompt_lookup" or "none"',
        }
        remedy = remedies.get(kind, "write an integer, in quotes")
        message = f"failed to convert {name} '{value}' to {kind}"
        yield config.error("parameters", message, remedy=remedy, key=name)


def _warning(config: ValidationContext, name: str, message: str, *, remedy: str) -> Diagnostic:
    return config.warning("parameters", f"parameter {name!r} {message}", remedy=remedy, key=name)
