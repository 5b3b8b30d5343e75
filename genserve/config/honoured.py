"""Honoured: which fields of Triton's schema mean something here, and what happens in place of the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from genserve.config.fault import Severity

__all__ = ["Unhonoured", "unhonoured_fields"]

# The honoured fields of each message. A message without a line here is looked into by rules alone.
_HONOURED = {
    "": {
        "name", "platform", "backend", "version_policy", "max_batch_size", "input", "output", "batch_input",
        "batch_output", "optimization", "dynamic_batching", "sequence_batching", "ensemble_scheduling",
        "instance_group", "default_model_filename", "metric_tags", "parameters", "model_warmup",
        "model_transaction_policy", "response_cache",
    },
    "input": {
        "name", "data_type", "dims", "reshape", "allow_ragged_batch", "optional",
        "is_shape_tensor", "is_non_linear_format_io",  # refused by rules
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
    "instance_group": {"name", "kind", "count", "gpus", "rate_limiter", "profile"},  # profile: see rules
}  # fmt: skip

# What happens instead. Serving goes on without these ...
_WARNINGS = {
    "runtime": "the backend's own runtime is used",
    "cc_model_filenames": "`default_model_filename` is loaded on every device",
    "model_operations": "no libraries of operators are loaded",
    "model_metrics": "histograms have genserve's own buckets",
    "input.format": "dimensions are taken in the order of `dims`",
    "optimization.priority": "all models run with one priority",
    "optimization.cuda": "no CUDA graphs are captured",
    "optimization.gather_kernel_buffer_threshold": "inputs are gathered by the backend's own rules",
    "optimization.eager_batching": "inputs are gathered when the model runs",
    "sequence_batching.state.use_growable_memory": "memory is reserved at load, and taken as tokens come",
    "ensemble_scheduling.step.model_namespace": "models are found by name alone; Triton, too, writes its own "
    "value over it",
    "instance_group.secondary_devices": "the instances run on their first device alone",
    "instance_group.passive": "the instances take requests like all others",
    "instance_group.host_policy": "threads and memory are placed by the operating system",
}
# ... and would be wrong without these.
_ERRORS = {
    "model_repository_agents": "the agents would not see the files",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Unhonoured:
    """A field that is written and not honoured."""

    path: str               # as `Places` takes it
    severity: Severity
    message: str


def unhonoured_fields(message: Any) -> Iterator[Unhonoured]:
    """Yield what an `inference.ModelConfig` asks for in vain; a field of a newer schema is among it."""
    yield from _walk(message, schema="", path="")


def _walk(message: Any, *, schema: str, path: str) -> Iterator[Unhonoured]:
    for field, value in message.ListFields():
        name = f"{schema}.{field.name}".lstrip(".")
        if field.name not in _HONOURED[schema]:
            yield _unhonoured(name, path=f"{path}{field.name}")
        elif name in _HONOURED:
            members = [value] if isinstance(value, Message) else value
            for index, member in enumerate(members):
                yield from _walk(member, schema=name, path=f"{path}{field.name}[{index}].")


def _unhonoured(name: str, *, path: str) -> Unhonoured:
    short = name.rpartition(".")[2]
    if name in _ERRORS:
        return Unhonoured(
            path=path, severity=Severity.ERROR, message=f"{short} is not honoured: {_ERRORS[name]}"
        )
    instead = _WARNINGS.get(name, "it has no effect")
    return Unhonoured(path=path, severity=Severity.WARNING, message=f"{short} is not honoured: {instead}")
