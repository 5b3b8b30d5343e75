"""Tensor rules: valid inputs, outputs, batch tensors and warmup samples of a config."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

from genserve.config.backends import BUILT_IN, version_folders
from genserve.config.diagnostics import Diagnostic
from genserve.config.model_config import ModelConfig
from genserve.config.schema import enum_name
from genserve.errors import suggestion
from genserve.repository.rules.facts import ConfigFacts
from genserve.tensor import compatible, shape_text

_MAX_DIMS = 63  # numpy has 64, and one is the batch


def check_tensors(facts: ConfigFacts) -> Iterator[Diagnostic]:
    """Reject invalid inputs and outputs; warn of equal names and missing labels."""
    for kind in ("input", "output"):
        names: set[str] = set()
        for index, tensor in enumerate(getattr(facts.message, kind)):
            path = f"{kind}[{index}]"
            yield from _tensor(facts, tensor, kind=kind, path=path)
            if tensor.name and tensor.name in names:
                yield facts.warning(
                    f"{path}.name",
                    f"there is more than one {kind} {tensor.name!r}",
                    remedy="give each its own name",
                )
            names.add(tensor.name)


def _tensor(facts: ConfigFacts, tensor: Any, *, kind: str, path: str) -> Iterator[Diagnostic]:
    start, end = f"model {kind} '{tensor.name}'", f"for {facts.name}"
    if not tensor.name:
        yield facts.error(path, f"model {kind} must specify 'name' {end}", remedy='add `name: "..."`')
    missing = list(_missing(facts, tensor, start=start, path=path))
    if missing and (facts.is_completed or not may_be_completed(facts.config, facts.folder)):
        yield from missing
    if not all(map(_is_size, tensor.dims)):
        yield facts.error(
            f"{path}.dims",
            f"{start} dimension must be integer >= 1, or -1 to indicate a variable-size dimension {end}",
            remedy="write a size above 0, or -1 for any size",
        )
    if len(tensor.dims) > _MAX_DIMS:
        message = f"{start} has {len(tensor.dims)} dimensions {end}"
        yield facts.error(f"{path}.dims", message, remedy=f"write at most {_MAX_DIMS}")
    wrong = _reshape_error(tensor, batches=facts.message.max_batch_size > 0)
    if wrong:
        remedy = "give dims and reshape the same number of elements, and -1 in the same order"
        yield facts.error(f"{path}.reshape", f"{start} {wrong} {end}", remedy=remedy)
    yield from _for_tensorrt(facts, tensor, path=path)
    if kind == "input":
        yield from _image_format(facts, tensor, path=path)
    else:
        yield from _labels(facts, tensor, path=path)


def _missing(facts: ConfigFacts, tensor: Any, *, start: str, path: str) -> Iterator[Diagnostic]:
    if not tensor.data_type:
        yield facts.error(
            f"{path}.data_type",
            f"{start} must specify 'data_type' for {facts.name}",
            remedy="write `data_type: TYPE_INT64`, or another type",
        )
    if not tensor.dims:
        message = f"{start} must specify 'dims' for {facts.name}"
        yield facts.error(path, message, remedy="write `dims: [ -1 ]` for any length")


def may_be_completed(config: ModelConfig, folder: Path) -> bool:
    """Whether the code of a model, or a third-party backend, may complete the tensors of its config."""
    if config.backend != "python":
        return config.platform != "ensemble" and config.backend not in BUILT_IN
    name = config.default_model_filename or "model.py"
    files = (version / name for version in version_folders(folder).values())
    return any(
        "auto_complete_config" in file.read_text(encoding="utf-8", errors="replace")
        for file in files
        if file.is_file()
    )


def _for_tensorrt(facts: ConfigFacts, tensor: Any, *, path: str) -> Iterator[Diagnostic]:
    if tensor.is_shape_tensor:
        yield facts.error(
            f"{path}.is_shape_tensor",
            f"shape tensors are only supported for TensorRT platform for {facts.name}",
            remedy="leave it out, and give the model a plain tensor",
        )
    if tensor.is_non_linear_format_io:
        yield facts.error(
            f"{path}.is_non_linear_format_io",
            f"Non-linear IO format is only supported for the TensorRT platform for {facts.name}",
            remedy="leave it out: tensors are row-major",
        )


def _image_format(facts: ConfigFacts, tensor: Any, *, path: str) -> Iterator[Diagnostic]:
    if enum_name(tensor, "format") != "FORMAT_NONE" and len(tensor.dims) != 3:
        yield facts.error(
            f"{path}.format",
            f"model input NHWC/NCHW require 3 dims for {facts.name}",
            remedy="leave `format` out: it has no effect here",
        )


def _labels(facts: ConfigFacts, tensor: Any, *, path: str) -> Iterator[Diagnostic]:
    file = facts.folder / tensor.label_filename
    if tensor.label_filename and not file.is_file():
        # Triton rejects the model; here only the labels are missing.
        yield facts.warning(
            f"{path}.label_filename",
            f"failed to open text file for read {file}: No such file or directory",
            remedy="put the labels into the model's folder, one per line, or leave the field out",
        )


def _is_size(dim: int) -> bool:
    return dim >= 1 or dim == -1


def _reshape_error(tensor: Any, *, batches: bool) -> str:
    """Return the error of a tensor's reshape, in Triton's words; empty: none."""
    if not tensor.HasField("reshape"):
        return ""
    dims, shape = list(tensor.dims), list(tensor.reshape.shape)
    if not shape and not batches:
        return "cannot have empty reshape for non-batching model as scalar tensors are not supported"
    if not all(map(_is_size, shape)):
        return "reshape dimensions must be integer >= 1, or -1 to indicate a variable-size dimension"
    if (-1 in dims) == (-1 in shape) and dims.count(-1) != shape.count(-1):
        return "has different number of variable-size dimensions for dims and reshape"
    return "" if _runs(dims) == _runs(shape) else "has different size for dims and reshape"


def _runs(dims: Sequence[int]) -> list[int]:
    """Return the number of elements between the dimensions -1."""
    runs: list[list[int]] = [[]]
    for dim in dims:
        if dim == -1:
            runs.append([])
        else:
            runs[-1].append(dim)
    return [prod(run) for run in runs]


def check_batch_tensors(facts: ConfigFacts) -> Iterator[Diagnostic]:
    """Reject invalid `batch_input` and `batch_output`."""
    outputs = [tensor.name for tensor in facts.message.output]
    for index, batch_input in enumerate(facts.message.batch_input):
        path = f"batch_input[{index}]"
        yield from _sources(facts, batch_input, kind="input", path=path)
        if enum_name(batch_input, "data_type") not in ("TYPE_INT32", "TYPE_FP32"):
            yield facts.error(
                f"{path}.data_type",
                f"batch input data type must be TYPE_INT32 or TYPE_FP32 for {facts.name}",
                remedy="write `data_type: TYPE_FP32`",
            )
    for index, batch_output in enumerate(facts.message.batch_output):
        path = f"batch_output[{index}]"
        yield from _sources(facts, batch_output, kind="output", path=path)
        for name in batch_output.target_name:
            if name not in outputs:
                yield facts.error(
                    f"{path}.target_name",
                    f"unknown target output name '{name}' for {facts.name}",
                    remedy=suggestion(name, known=outputs),
                )


def _sources(facts: ConfigFacts, batch_tensor: Any, *, kind: str, path: str) -> Iterator[Diagnostic]:
    inputs = [tensor.name for tensor in facts.message.input]
    if len(batch_tensor.source_input) != 1:
        yield facts.error(
            path,
            f"batch {kind} kind '{enum_name(batch_tensor, 'kind')}' expects 1 source input, "
            f"got {len(batch_tensor.source_input)} for {facts.name}",
            remedy='write `source_input: "..."` once',
        )
    for name in batch_tensor.source_input:
        if name not in inputs:
            yield facts.error(
                f"{path}.source_input",
                f"unknown source input name '{name}' for {facts.name}",
                remedy=suggestion(name, known=inputs),
            )


def check_warmups(facts: ConfigFacts) -> Iterator[Diagnostic]:
    """Reject the samples of `model_warmup` that do not fit the inputs of the model."""
    if facts.message.platform == "ensemble":
        return      # `check_ensemble_fields` rejects all of them
    tensors = {tensor.name: tensor for tensor in facts.message.input}
    for index, sample in enumerate(facts.message.model_warmup):
        path = f"model_warmup[{index}]"
        yield from _warmup_batch_size(facts, sample, path=path)
        for name, value in sorted(sample.inputs.items()):
            yield from _warmup_input(facts, value, name=name, path=f"{path}.inputs")
            if name in tensors and value.dims and tensors[name].dims and tensors[name].data_type:
                yield from _agrees(facts, value, tensors[name], path=f"{path}.inputs")
        yield from _missing_inputs(facts, sample, tensors=tensors, path=path)


def _warmup_batch_size(facts: ConfigFacts, sample: Any, *, path: str) -> Iterator[Diagnostic]:
    largest = max(1, facts.message.max_batch_size)
    if not sample.batch_size:
        yield facts.warning(
            path,
            f"warmup sample '{sample.name}' has no batch_size, and is skipped",
            remedy="add `batch_size: 1`",
        )
    elif sample.batch_size > largest:
        yield facts.error(
            f"{path}.batch_size",
            f"failed to run warmup sample '{sample.name}': batch size {sample.batch_size} for "
            f"'{facts.name}_0', max allowed is {largest}",
            remedy=f"write a size from 1 to {largest}",
        )


def _warmup_input(facts: ConfigFacts, value: Any, *, name: str, path: str) -> Iterator[Diagnostic]:
    if any(dim < 0 for dim in value.dims):
        yield facts.error(
            path,
            f"warmup setting expects all variable-size dimensions are specified for input '{name}'",
            remedy="write a typical size",
            key=name,
        )
    if value.WhichOneof("input_data_type") is None:
        yield facts.error(
            path,
            f"warmup setting expects input '{name}' to have input_data_type set",
            remedy="add `zero_data: true`, `random_data: true` or `input_data_file`",
            key=name,
        )
    file = facts.folder / "warmup" / value.input_data_file
    if value.input_data_file and not file.is_file():
        yield facts.error(
            path,
            f"failed to open text file for read {file}: No such file or directory",
            remedy="put the file there: elements in row-major order, each text after its length",
            key=name,
        )


def _agrees(facts: ConfigFacts, value: Any, tensor: Any, *, path: str) -> Iterator[Diagnostic]:
    if value.data_type != tensor.data_type:
        found, expected = (enum_name(each, "data_type").removeprefix("TYPE_") for each in (value, tensor))
        yield facts.error(
            path,
            f"inference input '{tensor.name}' data-type is '{found}', but model '{facts.name}' "
            f"expects '{expected}'",
            remedy=f"write `data_type: TYPE_{expected}`",
            key=tensor.name,
        )
    if not compatible(value.dims, tensor.dims):
        yield facts.error(
            path,
            f"unexpected shape for input '{tensor.name}' for model '{facts.name}'. "
            f"Expected {shape_text(tensor.dims)}, got {shape_text(value.dims)}.",
            remedy="write the dims of the input, without the batch dimension",
            key=tensor.name,
        )


def _missing_inputs(
    facts: ConfigFacts, sample: Any, *, tensors: dict[str, Any], path: str
) -> Iterator[Diagnostic]:
    for name, tensor in tensors.items():
        if name not in sample.inputs and not tensor.optional:
            yield facts.error(
                path,
                f"missing required input(s) ['{name}']",
                remedy=f'add `inputs {{ key: "{name}" value: {{ ... }} }}` to the sample {sample.name!r}',
            )
