"""Warmup rules: what a config must say of the requests that run before a model is ready."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from genserve.config.fault import Fault
from genserve.config.from_message import enum_name
from genserve.config.judged import JudgedConfig

__all__ = ["warmups"]


def warmups(config: JudgedConfig) -> Iterator[Fault]:
    """Yield what is wrong with `model_warmup`; an ensemble must have none."""
    if config.message.platform == "ensemble":
        return
    tensors = {tensor.name: tensor for tensor in config.message.input}
    for index, sample in enumerate(config.message.model_warmup):
        path = f"model_warmup[{index}]"
        yield from _batch_size(config, sample, path=path)
        for name, value in sorted(sample.inputs.items()):
            yield from _input(config, value, name=name, path=f"{path}.inputs")
            if name in tensors and value.dims and tensors[name].dims and tensors[name].data_type:
                yield from _agrees(config, value, tensors[name], path=f"{path}.inputs")
        yield from _missing(config, sample, tensors=tensors, path=path)


def _batch_size(config: JudgedConfig, sample: Any, *, path: str) -> Iterator[Fault]:
    largest = max(1, config.message.max_batch_size)
    if not sample.batch_size:
        yield config.warning(
            path,
            f"warmup sample '{sample.name}' has no batch_size, and is passed over",
            remedy="add `batch_size: 1`",
        )
    elif sample.batch_size > largest:
        yield config.error(
            f"{path}.batch_size",
            f"failed to run warmup sample '{sample.name}': batch size {sample.batch_size} for "
            f"'{config.name}_0', max allowed is {largest}",
            remedy=f"write a size from 1 to {largest}",
        )


def _input(config: JudgedConfig, value: Any, *, name: str, path: str) -> Iterator[Fault]:
    if any(dim < 0 for dim in value.dims):
        yield config.error(
            path,
            f"warmup setting expects all variable-size dimensions are specified for input '{name}'",
            remedy="write a size that requests often have",
            key=name,
        )
    if value.WhichOneof("input_data_type") is None:
        yield config.error(
            path,
            f"warmup setting expects input '{name}' to have input_data_type set",
            remedy="add `zero_data: true`, `random_data: true` or `input_data_file`",
            key=name,
        )
    file = config.folder / "warmup" / value.input_data_file
    if value.input_data_file and not file.is_file():
        yield config.error(
            path,
            f"failed to open text file for read {file}: No such file or directory",
            remedy="put it there: the elements one after the other, row-major; a text after its length",
            key=name,
        )


def _agrees(config: JudgedConfig, value: Any, tensor: Any, *, path: str) -> Iterator[Fault]:
    if value.data_type != tensor.data_type:
        found, expected = (enum_name(each, "data_type").removeprefix("TYPE_") for each in (value, tensor))
        yield config.error(
            path,
            f"inference input '{tensor.name}' data-type is '{found}', but model '{config.name}' "
            f"expects '{expected}'",
            remedy=f"write `data_type: TYPE_{expected}`",
            key=tensor.name,
        )
    sizes = zip(value.dims, tensor.dims, strict=False)
    if len(value.dims) != len(tensor.dims) or any(b not in (-1, a) and a != -1 for a, b in sizes):
        yield config.error(
            path,
            f"unexpected shape for input '{tensor.name}' for model '{config.name}'. "
            f"Expected {_list(tensor.dims)}, got {_list(value.dims)}.",
            remedy="write the dims of the input, without the batch dimension",
            key=tensor.name,
        )


def _missing(
    config: JudgedConfig, sample: Any, *, tensors: dict[str, Any], path: str
) -> Iterator[Fault]:
    for name, tensor in tensors.items():
        if name not in sample.inputs and not tensor.optional:
            yield config.error(
                path,
                f"missing required input(s) ['{name}']",
                remedy=f'add `inputs {{ key: "{name}" value: {{ ... }} }}` to the sample {sample.name!r}',
            )


def _list(dims: Any) -> str:
    return f"[{','.join(map(str, dims))}]"
