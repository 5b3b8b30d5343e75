"""Supported fields: the fields of Triton's schema that have an effect here; what replaces other fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from genserve.config.diagnostics import Diagnostic, Severity
from genserve.config.schema import enum_name
from genserve.repository.rules.facts import ConfigFacts
from genserve.repository.text_stages import Role

# The supported fields of each message; other messages are validated by the rules alone.
_SUPPORTED = {
    "": {
        "name", "platform", "backend", "version_policy", "max_batch_size", "input", "output", "batch_input",
        "batch_output", "optimization", "dynamic_batching", "sequence_batching", "ensemble_scheduling",
        "instance_group", "default_model_filename", "metric_tags", "parameters", "model_warmup",
        "model_transaction_policy", "response_cache", "model_metrics",
    },
    "input": {
        "name", "data_type", "dims", "reshape", "allow_ragged_batch", "optional",
        "is_shape_tensor", "is_non_linear_format_io",  # rejected by rules
    },
    "optimization": {"graph", "execution_accelerators", "input_pinned_memory", "output_pinned_memory"},
    "sequence_batching": {
        "direct", "oldest", "max_sequence_idle_microseconds", "control_input", "state", "iterative_sequence",
    },
    "sequence_batching.state": {
        "input_name", "output_name", "data_type", "dims", "initial_state", "use_same_buffer_for_input_output",
    },
    "ensemble_scheduling": {"step", "max_inflight_requests"},
    "ensemble_scheduling.step": {"model_name", "model_version", "input_map", "output_map"},
    "instance_group": {"name", "kind", "count", "gpus", "rate_limiter", "profile"},  # rules reject profile
}  # fmt: skip

# The effects that replace the other fields.
_INSTEAD = {
    "runtime": "the backend's own runtime is used",
    "cc_model_filenames": "`default_model_filename` is loaded on every device",
    "model_operations": "no libraries of operators are loaded",
    "input.format": "dimensions are taken in the order of `dims`",
    "optimization.priority": "all models have the same priority",
    "optimization.cuda": "no CUDA graphs are captured",
    "optimization.gather_kernel_buffer_threshold": "the backend decides how inputs are gathered",
    "optimization.eager_batching": "inputs are gathered when the model runs",
    "sequence_batching.state.use_growable_memory": "memory is reserved at load, and used as tokens arrive",
    "ensemble_scheduling.step.model_namespace": "models are found by name alone; Triton, too, overwrites it "
    "with its own value",
    "instance_group.secondary_devices": "the instances run on their first device only",
    "instance_group.passive": "the instances take requests like any other",
    "instance_group.host_policy": "threads and memory are placed by the operating system",
    "model_repository_agents": "agents do not process the files",
}
_ERRORS = ("model_repository_agents",)      # an agent may change the model


# The fields of `_SUPPORTED` that the engine of a text model ignores, by role.
_ONE_INSTANCE = {
    "instance_group.count": "one engine runs the model as one instance; `max_batch_size` of the logits stage "
    "limits the concurrent sequences",
    "instance_group.rate_limiter": "the engine acquires no resources",
}
_ON_THE_CPU = {"instance_group.kind": "it runs on the CPU", "instance_group.gpus": "it runs on the CPU"}
_ITSELF_ALONE = "it affects requests to the stage itself, not to its ensemble"
_IN_THE_ENGINE = "the decoding loop runs in the engine of its ensemble, a coroutine for each sequence"
_COMPUTED = "the engine gives the graph token ids and their positions only"
_BATCHING = "sequences join and leave the batch of the engine at each step"
_NO_FILE = "the files of the stages are loaded"
_AS_IT_IS = "tensors have the shapes of `dims`"
_LOGITS = _ONE_INSTANCE | {
    "input.reshape": "the graph is given ids [batch, tokens]",
    "input.allow_ragged_batch": "rows of different lengths are padded",
    "batch_input": _COMPUTED,
    "batch_output": _COMPUTED,
    "dynamic_batching": _BATCHING,
    "sequence_batching.direct": _BATCHING,
    "sequence_batching.oldest.max_candidate_sequences": "`max_batch_size` limits the concurrent sequences",
    "sequence_batching.oldest.preferred_batch_size": _BATCHING,
    "sequence_batching.oldest.max_queue_delay_microseconds": _BATCHING,
    "sequence_batching.oldest.preserve_ordering": _BATCHING,
    "sequence_batching.max_sequence_idle_microseconds": "each request is one sequence",
    "sequence_batching.control_input": _COMPUTED,
    "sequence_batching.state.initial_state.data_file": "the KV cache of a sequence begins empty",
    "response_cache": "answers are not cached; prefixes of prompts are, in the KV cache",
}
_IN_ROLE: Mapping[Role, Mapping[str, str]] = {
    Role.ENSEMBLE: {
        "default_model_filename": _NO_FILE,
        "batch_input": _NO_FILE,
        "batch_output": _NO_FILE,
        "input.allow_ragged_batch": "each request is one sequence",
        "response_cache": "answers are not cached; prefixes of prompts are, in the KV cache",
    },
    Role.TOKENIZER: dict.fromkeys(
        ("dynamic_batching", "sequence_batching", "response_cache", "model_warmup", *_ONE_INSTANCE),
        _ITSELF_ALONE,
    )
    | _ON_THE_CPU
    | dict.fromkeys(("batch_input", "batch_output", "input.allow_ragged_batch"), "its input is text only")
    | dict.fromkeys(("optimization.graph", "optimization.execution_accelerators"), "there is no graph"),
    Role.LOGITS: _LOGITS
    | {
        "optimization.graph": "ONNX Runtime optimises the graph as far as it can",
        "optimization.execution_accelerators": "the graph runs on the kernels of its device only",
    },
    Role.LOGITS_WITHOUT_CACHE: _LOGITS,
    Role.DECODER: dict.fromkeys(
        (
            "dynamic_batching", "sequence_batching", "response_cache", "model_warmup", "batch_input",
            "batch_output", "optimization.graph", "optimization.execution_accelerators", *_ONE_INSTANCE,
        ),
        _IN_THE_ENGINE,
    )
    | _ON_THE_CPU
    | dict.fromkeys(("input.reshape", "input.allow_ragged_batch", "output.reshape"), _AS_IT_IS),
}  # fmt: skip
# A logits stage's graph would get other inputs than its config states.
_ERRORS_IN_LOGITS = (
    "batch_input", "sequence_batching.control_input", "sequence_batching.state.initial_state.data_file",
)  # fmt: skip
# Values that are in effect anyway.
_AS_IT_HAPPENS = {
    "instance_group.count": ("1",),
    "instance_group.kind": ("KIND_AUTO", "KIND_CPU", "KIND_MODEL"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsupportedField:
    """A field that is written and has no effect."""

    path: str               # as in `SourceMap`
    severity: Severity
    message: str


def check_fields(facts: ConfigFacts) -> Iterator[Diagnostic]:
    """Warn of each field without effect; reject the one that may change the model."""
    for field in unsupported_fields(facts.message):
        yield facts.parsed.diagnostic(field.severity, field.path, field.message, remedy="leave it out")


def reason_without_effect(name: str, *, role: Role | None = None) -> str:
    """Return why a field has no effect, or none in a role of a text model; empty: it has one.

    Args:
        name: its name in the schema, such as `instance_group.count`.
        role: the model's role in a text model; None: it has none.
    """
    if role is not None:
        return _IN_ROLE[role].get(name, "")
    schema, _, field = name.rpartition(".")
    supported = _SUPPORTED.get(schema)
    return "" if supported is None or field in supported else _INSTEAD.get(name, "it has no effect")


def unsupported_fields(message: Any) -> Iterator[UnsupportedField]:
    """Yield the fields of an `inference.ModelConfig` without effect, also the fields of a newer schema."""
    for _, name, path in _written(message):
        if instead := reason_without_effect(name):
            yield _unsupported(name, path=path, instead=instead, is_error=name in _ERRORS)


def unsupported_in_role(message: Any, role: Role) -> Iterator[UnsupportedField]:
    """Yield the fields of an `inference.ModelConfig` without effect in this role in a text model."""
    is_logits = role in (Role.LOGITS, Role.LOGITS_WITHOUT_CACHE)
    for owner, name, path in _written(message):
        instead = reason_without_effect(name, role=role)
        if not instead:
            continue
        meant = _AS_IT_HAPPENS.get(name, ())
        if name == "sequence_batching.oldest.max_candidate_sequences":
            meant = (str(message.max_batch_size),)      # as `genserve export` writes it
        if _text(owner, name) not in meant:
            is_error = is_logits and name in _ERRORS_IN_LOGITS
            yield _unsupported(name, path=path, instead=instead, is_error=is_error, where=f" in a {role}")


def _written(message: Any, *, schema: str = "", path: str = "") -> list[tuple[Any, str, str]]:
    """Return the message, the name in the schema and the path of each written field, at any depth."""
    found: list[tuple[Any, str, str]] = []
    for field, value in message.ListFields():
        name, written = f"{schema}.{field.name}".lstrip("."), f"{path}{field.name}"
        found.append((message, name, written))
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            members = [value] if isinstance(value, Message) else value
            for index, member in enumerate(members):
                found += _written(member, schema=name, path=f"{written}[{index}].")
    return found


def _text(owner: Any, name: str) -> str:
    field = owner.DESCRIPTOR.fields_by_name[name.rpartition(".")[2]]
    return enum_name(owner, field.name) if field.enum_type else str(getattr(owner, field.name))


def _unsupported(name: str, *, path: str, instead: str, is_error: bool, where: str = "") -> UnsupportedField:
    return UnsupportedField(
        path=path,
        severity=Severity.ERROR if is_error else Severity.WARNING,
        message=f"{name.rpartition('.')[2]} is ignored{where}: {instead}",
    )
