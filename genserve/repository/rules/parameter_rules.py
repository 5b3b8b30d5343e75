"""Parameter rules: which `parameters` each backend reads, and their types."""

from __future__ import annotations

from collections.abc import Iterator

from genserve.config.backends import BUILT_IN, ParameterType
from genserve.config.diagnostics import Diagnostic
from genserve.config.model_config import POOLINGS
from genserve.errors import suggestion
from genserve.machine import byte_size
from genserve.repository.rules.facts import ConfigFacts

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


def check_parameters(facts: ConfigFacts) -> Iterator[Diagnostic]:
    """Reject the invalid parameters; warn of the unknown and the ignored ones."""
    backend = facts.message.backend
    known = BUILT_IN[backend].parameters if backend in BUILT_IN else None
    for name, parameter in sorted(facts.message.parameters.items()):
        value = parameter.string_value
        ignored = _IGNORED | (_IGNORED_IN_PYTORCH if backend == "pytorch" else {})
        if name in ignored:
            yield _warning(facts, name, f"is ignored: {ignored[name]}", remedy="leave it out")
        elif backend == "python":
            yield from _python(facts, name, value)
        elif known is not None and name not in known:
            remedy = suggestion(name, known=known) if known else "leave it out"
            yield _warning(facts, name, "is unknown, and has no effect", remedy=remedy)
        elif known is not None:
            yield from _typed(facts, name, value, kind=known[name])


def _python(facts: ConfigFacts, name: str, value: str) -> Iterator[Diagnostic]:
    if name == "EXECUTION_ENV_PATH":
        yield _warning(
            facts,
            name,
            "is ignored: the model runs in genserve's environment",
            remedy="install its packages there, with pip",
        )
    elif name in _PYTHON and value not in _PYTHON[name]:
        yield facts.error(
            "parameters",
            f"parameter {name!r} is {value!r}",
            remedy=f"write {' or '.join(map(repr, _PYTHON[name]))}, or leave it out",
            key=name,
        )


def _typed(facts: ConfigFacts, name: str, value: str, *, kind: ParameterType) -> Iterator[Diagnostic]:
    is_right = {
        ParameterType.NUMBER: value.strip().lstrip("-").isdecimal(),
        ParameterType.POSITIVE: value.isdecimal() and int(value) > 0,
        ParameterType.SWITCH: value.lower() in ("true", "false", "1", "0"),
        ParameterType.BYTES: bool(byte_size(value)),
        ParameterType.METHOD: value in ("prompt_lookup", "none"),
        ParameterType.POOLING: value in POOLINGS,
        ParameterType.TEXT: True,
    }
    if not is_right[kind]:
        remedies = {
            ParameterType.SWITCH: 'write "true" or "false"',
            ParameterType.BYTES: 'write an amount such as "2GiB"',
            ParameterType.METHOD: 'write "prompt_lookup" or "none"',
            ParameterType.POOLING: f"write one of {', '.join(POOLINGS)}",
        }
        remedy = remedies.get(kind, "write an integer, in quotes")
        message = f"failed to convert {name} '{value}' to {kind}"
        yield facts.error("parameters", message, remedy=remedy, key=name)


def _warning(facts: ConfigFacts, name: str, message: str, *, remedy: str) -> Diagnostic:
    return facts.warning("parameters", f"parameter {name!r} {message}", remedy=remedy, key=name)
