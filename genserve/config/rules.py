"""Rules: what one config.pbtxt must say, by itself, so that its model can be served."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from genserve.config.fault import Fault, Severity, nearest
from genserve.config.honoured import unhonoured_fields
from genserve.config.places import Places

__all__ = ["BACKENDS", "config_faults"]

# The backends there are, each with the parameters that it reads; all are whole numbers above 0.
BACKENDS: dict[str, tuple[str, ...]] = {
    "onnxruntime": ("max_sequence_length", "intra_op_thread_count"),
    "python": (),
    "tokenizer": (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Config:
    """One config.pbtxt as its rules see it."""

    proto: Any
    places: Places
    source: Path

    def fault(
        self, severity: Severity, path: str, message: str, *, remedy: str, key: str | None = None
    ) -> Fault:
        """Make a fault at a field, or at the entry of a map that has this key."""
        place = self.places.of(path) if key is None else self.places.of_key(path, key)
        return Fault(severity=severity, path=self.source, place=place, message=message, remedy=remedy)

    def error(self, path: str, message: str, *, remedy: str, key: str | None = None) -> Fault:
        return self.fault(Severity.ERROR, path, message, remedy=remedy, key=key)

    def warning(self, path: str, message: str, *, remedy: str, key: str | None = None) -> Fault:
        return self.fault(Severity.WARNING, path, message, remedy=remedy, key=key)


def config_faults(proto: Any, *, places: Places, source: Path) -> tuple[Fault, ...]:
    """Return all faults of one config.

    Args:
        proto: the `inference.ModelConfig`.
        places: of the fields of its text.
        source: the file; its folder has the name of the model.
    """
    config = _Config(proto=proto, places=places, source=source)
    rules = (
        _name,
        _backend,
        _batch_size,
        _steps,
        _tensors,
        _parameters,
        _sequences,
        _file_name,
        _unhonoured,
    )
    return tuple(fault for rule in rules for fault in rule(config))


def _name(config: _Config) -> Iterator[Fault]:
    name, folder = config.proto.name, config.source.parent.name
    if name and name != folder:
        yield config.error(
            "name",
            f"the model is named {name!r} and its folder {folder!r}",
            remedy="give both the same name, or leave `name` out",
        )


def _backend(config: _Config) -> Iterator[Fault]:
    platform, backend = config.proto.platform, config.proto.backend
    if platform == "ensemble" or (platform, backend) == ("onnxruntime_onnx", "onnxruntime"):
        return
    if platform:
        yield config.error(
            "platform", f"there is no platform {platform!r}", remedy=_platform_remedy(platform)
        )
    elif not backend:
        yield config.error(
            "",
            "neither `backend` nor `platform` says how to run the model",
            remedy='add `backend: "onnxruntime"`, "python" or "tokenizer", or `platform: "ensemble"`',
        )
    elif backend not in BACKENDS:
        yield config.error(
            "backend", f"there is no backend {backend!r}", remedy=nearest(backend, known=BACKENDS)
        )


def _platform_remedy(platform: str) -> str:
    if platform == "onnxruntime_onnx":  # Triton's older word
        return 'write `backend: "onnxruntime"` in its place'
    return f"{nearest(platform, known=['ensemble'])}; a model that is no ensemble has a `backend`"


def _batch_size(config: _Config) -> Iterator[Fault]:
    if config.proto.max_batch_size < 0:
        yield config.error(
            "max_batch_size",
            f"max_batch_size is {config.proto.max_batch_size}",
            remedy="write 0 for a model that does not batch, or how many requests share a batch",
        )


def _steps(config: _Config) -> Iterator[Fault]:
    if config.proto.platform == "ensemble" and not config.proto.ensemble_scheduling.step:
        yield config.error(
            "platform",
            "the ensemble has no steps",
            remedy="add `ensemble_scheduling { step [ { model_name: ... } ] }`",
        )


def _tensors(config: _Config) -> Iterator[Fault]:
    for kind in ("input", "output"):
        names: set[str] = set()
        for index, tensor in enumerate(getattr(config.proto, kind)):
            path = f"{kind}[{index}]"
            yield from _tensor(config, tensor, kind=kind, path=path)
            if tensor.name in names:
                yield config.error(
                    f"{path}.name",
                    f"there is more than one {kind} {tensor.name!r}",
                    remedy="give each its own name",
                )
            names.add(tensor.name)


def _tensor(config: _Config, tensor: Any, *, kind: str, path: str) -> Iterator[Fault]:
    if not tensor.name:
        yield config.error(path, f"an {kind} has no name", remedy='add `name: "..."`')
    if not tensor.data_type:
        yield config.error(
            f"{path}.data_type",
            f"{kind} {tensor.name!r} has no data type",
            remedy="write `data_type: TYPE_INT64`, or another but TYPE_INVALID",
        )
    if not tensor.dims:
        yield config.error(
            path, f"{kind} {tensor.name!r} has no dims", remedy="write `dims: [ -1 ]` for any length"
        )
    for size in tensor.dims:
        if size == 0 or size < -1:
            yield config.error(
                f"{path}.dims",
                f"{kind} {tensor.name!r} has a dimension {size}",
                remedy="write a size above 0, or -1 for any size",
            )


def _parameters(config: _Config) -> Iterator[Fault]:
    known = BACKENDS.get(config.proto.backend, ())
    for name, parameter in sorted(config.proto.parameters.items()):
        value = parameter.string_value
        if name not in known:
            yield config.warning(
                "parameters",
                f"parameter {name!r} is not known, and has no effect",
                remedy=nearest(name, known=known) if known else "leave it out",
                key=name,
            )
        elif not value.isdecimal() or int(value) < 1:
            yield config.error(
                "parameters",
                f"parameter {name!r} is {value!r}",
                remedy="write a whole number above 0",
                key=name,
            )


def _sequences(config: _Config) -> Iterator[Fault]:
    if not config.proto.HasField("sequence_batching"):
        return
    if config.proto.backend in BACKENDS and config.proto.backend != "onnxruntime":
        yield config.warning(
            "sequence_batching",
            "sequence_batching is not honoured here: sequences are those of the logits stage",
            remedy="leave it out",
        )
    candidates = config.proto.sequence_batching.oldest.max_candidate_sequences
    if candidates not in (0, max(1, config.proto.max_batch_size)):
        yield config.warning(
            "sequence_batching.oldest.max_candidate_sequences",
            f"max_candidate_sequences {candidates} is not honoured: max_batch_size is how many there are",
            remedy="write the same number in both",
        )


def _file_name(config: _Config) -> Iterator[Fault]:
    name = config.proto.default_model_filename
    if name and config.proto.backend != "onnxruntime":
        file = {"python": "model.py", "tokenizer": "tokenizer.json"}.get(config.proto.backend)
        if name != file:
            yield config.error(
                "default_model_filename",
                f"default_model_filename {name!r} is not honoured: "
                + (f"{file} is read" if file else "nothing is read"),
                remedy=f"name the file {file}, and leave the field out" if file else "leave it out",
            )


def _unhonoured(config: _Config) -> Iterator[Fault]:
    for field in unhonoured_fields(config.proto):
        yield config.fault(field.severity, field.path, field.message, remedy="leave it out")
