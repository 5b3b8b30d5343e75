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
        "name", "platform", "backend", "max_batch_size", "default_model_filename", "parameters",
        "version_policy", "input", "output", "model_transaction_policy", "sequence_batching",
        "ensemble_scheduling",
    },
    "input": {"name", "data_type", "dims", "optional"},
    "output": {"name", "data_type", "dims"},
    "model_transaction_policy": {"decoupled"},
    "sequence_batching": {"iterative_sequence", "oldest", "state"},
    "sequence_batching.oldest": {"max_candidate_sequences"},
    "sequence_batching.state": {
        "input_name", "output_name", "data_type", "dims", "use_same_buffer_for_input_output",
    },
    "ensemble_scheduling": {"step"},
    "ensemble_scheduling.step": {"model_name", "model_version", "input_map", "output_map"},
}

# What happens instead. Serving goes on without these ...
_WARNINGS = {
    "runtime": "the backend's own runtime is used",
    "optimization": "ONNX Runtime's own optimizations hold",
    "dynamic_batching": "the logits stage batches by itself, at each step",
    "instance_group": "each model has one instance, on the CPU",
    "cc_model_filenames": "`default_model_filename` is loaded on every device",
    "metric_tags": "metrics are labelled with the model alone",
    "model_warmup": "the first request is the first to run",
    "response_cache": "every answer is computed anew",
    "model_metrics": "`/metrics` has genserve's own histograms",
    "input.format": "dimensions are taken in the order of `dims`",
    "input.allow_ragged_batch": "requests of any lengths share a batch anyway",
    "output.label_filename": "answers have no labels",
    "sequence_batching.direct": "a sequence takes any free slot, the oldest first",
    "sequence_batching.max_sequence_idle_microseconds": "a sequence ends with its request",
    "sequence_batching.oldest.preferred_batch_size": "each step takes all sequences that run",
    "sequence_batching.oldest.max_queue_delay_microseconds": "a step never waits",
    "sequence_batching.oldest.preserve_ordering": "each answer is sent as soon as it is there",
    "sequence_batching.state.use_growable_memory": "memory is reserved at load, and taken as tokens come",
    "ensemble_scheduling.max_inflight_requests": "`genserve serve --max-queue` is the limit",
}
# ... and would be wrong without these.
_ERRORS = {
    "batch_input": "the model would not get these inputs",
    "batch_output": "the model's outputs would not be scattered",
    "model_operations": "the libraries of operators would not be loaded",
    "model_repository_agents": "the agents would not see the files",
    "input.reshape": "the model would get another shape",
    "input.is_shape_tensor": "the model would get a tensor for a shape",
    "input.is_non_linear_format_io": "the model would get another memory format",
    "output.reshape": "the answer would have another shape",
    "output.is_shape_tensor": "the answer would be read as a plain tensor",
    "output.is_non_linear_format_io": "the answer would be in another memory format",
    "sequence_batching.control_input": "the model would not be told where a sequence begins and ends",
    "sequence_batching.state.initial_state": "the state begins empty",
    "ensemble_scheduling.step.model_namespace": "models are found by name alone",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Unhonoured:
    """A field that is written and not honoured."""

    path: str               # as `Places` takes it
    severity: Severity
    message: str


def unhonoured_fields(proto: Any) -> Iterator[Unhonoured]:
    """Yield what an `inference.ModelConfig` asks for in vain; a field of a newer schema is among it.

    A field that says what happens anyway (one instance on the CPU, no response cache) is honoured.
    """
    yield from _walk(proto, schema="", path="")


def _walk(proto: Any, *, schema: str, path: str) -> Iterator[Unhonoured]:
    for field, value in proto.ListFields():
        name = f"{schema}.{field.name}".lstrip(".")
        if field.name not in _HONOURED[schema]:
            if not _is_what_happens_anyway(name, value):
                yield _unhonoured(name, path=f"{path}{field.name}")
        elif name in _HONOURED:
            messages = [value] if isinstance(value, Message) else value
            for index, message in enumerate(messages):
                yield from _walk(message, schema=name, path=f"{path}{field.name}[{index}].")


def _is_what_happens_anyway(name: str, value: Any) -> bool:
    if name == "response_cache":
        return not value.enable
    if name == "instance_group":
        kinds = {"KIND_AUTO", "KIND_CPU"}
        return all(group.count <= 1 and group.Kind.Name(group.kind) in kinds for group in value)
    return False


def _unhonoured(name: str, *, path: str) -> Unhonoured:
    short = name.rpartition(".")[2]
    if name in _ERRORS:
        return Unhonoured(
            path=path, severity=Severity.ERROR, message=f"{short} is not honoured: {_ERRORS[name]}"
        )
    instead = _WARNINGS.get(name, "it has no effect")
    return Unhonoured(path=path, severity=Severity.WARNING, message=f"{short} is not honoured: {instead}")
