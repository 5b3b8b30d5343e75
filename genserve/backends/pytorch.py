"""PyTorch backend: TorchScript modules, loaded once per device and run on tensors by name."""

from __future__ import annotations

import logging
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from genserve.backends.backend import Placement, boolean_parameter, integer_parameter
from genserve.backends.libraries import import_torch
from genserve.backends.network_backend import NetworkBackend, run_error
from genserve.config.model_config import ModelConfig
from genserve.errors import InferenceError, RepositoryError, Status
from genserve.tensor import DataType, Tensor, decode_strings, string_tensor

logger = logging.getLogger(__name__)

_RECORDS = ("data.pkl", "constants.pkl", "version")     # of an archive, with the folder `code`
_WEIGHTS = "data.pkl"                                   # also written by torch.save of a state_dict


class PyTorchBackend(NetworkBackend):
    """`Backend` of `backend: "pytorch"` and `platform: "pytorch_libtorch"`."""

    default_file = "model.pt"

    @classmethod
    def open_network(cls, path: Path, config: ModelConfig, placement: Placement) -> TorchModule:
        """See `NetworkBackend.open_network`."""
        return open_module(path, config=config, placement=placement)

    @classmethod
    def check_files(cls, folder: Path, config: ModelConfig) -> None:
        """See `Backend`; opens the file as an archive, without torch."""
        name = config.default_model_filename
        remedy = f"save {name} with torch.jit.save of a scripted or traced module"
        try:
            with zipfile.ZipFile(folder / name) as archive:
                names = [name.partition("/")[2] for name in archive.namelist()]
        except Exception as error:  # BadZipFile, NotImplementedError, UnicodeDecodeError, struct.error, ...
            message = f"{name} is not a TorchScript archive, or is incomplete: {error}"
            raise _unloadable(config, message, remedy) from None
        missing = [record for record in _RECORDS if record not in names]
        if not any(record.startswith("code/") for record in names):
            missing.append("code")
        if missing:
            problem = "holds weights without code" if _WEIGHTS in names else f"has no {', '.join(missing)}"
            raise _unloadable(config, f"{name} is not a TorchScript archive: it {problem}", remedy)


def _unloadable(config: ModelConfig, message: str, remedy: str) -> RepositoryError:
    return RepositoryError(
        f"failed to load model '{config.name}': {message}", status=Status.INTERNAL, remedy=remedy
    )


def open_module(path: Path, *, config: ModelConfig, placement: Placement) -> TorchModule:
    """Load a module onto the device of a placement.

    Raises:
        MissingDependency: PyTorch is not installed.
        RepositoryError: the file cannot be loaded, or does not match the config.
    """
    set_threads(config.parameters)
    return TorchModule(path, config=config, device=_device(placement, model=config.name))


def _device(placement: Placement, *, model: str) -> str | None:
    if placement.kind == "MODEL":
        return None
    if placement.kind == "GPU" and import_torch().cuda.is_available():
        return f"cuda:{placement.device_id}"
    if placement.kind == "GPU":
        logger.warning(
            "model %s: %s runs on the CPU, because PyTorch was built without CUDA or finds no GPU",
            model,
            placement.name,
        )
    return "cpu"


def set_threads(parameters: Mapping[str, str]) -> None:
    """Set the number of threads of torch, for the whole process, by the parameters of Triton's backend."""
    intra = integer_parameter(parameters, "INTRA_OP_THREAD_COUNT", default=0)
    inter = integer_parameter(parameters, "INTER_OP_THREAD_COUNT", default=0)
    torch = import_torch()
    if intra > 0:
        torch.set_num_threads(intra)
    if inter > 0 and inter != torch.get_num_interop_threads():
        try:
            torch.set_num_interop_threads(inter)
        except RuntimeError as error:
            logger.warning(
                "INTER_OP_THREAD_COUNT is ignored, because torch has already started its threads: %s", error
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Modes:
    """How torch runs a module, by the parameters of its config."""

    inference: bool
    optimized: bool
    cudnn: bool
    cache_cleaning: bool

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> _Modes:
        return cls(
            inference=boolean_parameter(parameters, "INFERENCE_MODE", default=True),
            optimized=not boolean_parameter(parameters, "DISABLE_OPTIMIZED_EXECUTION", default=False),
            cudnn=not boolean_parameter(parameters, "DISABLE_CUDNN", default=False),
            cache_cleaning=boolean_parameter(parameters, "ENABLE_CACHE_CLEANING", default=False),
        )


class TorchModule:
    """A TorchScript module on one device; a `Network`."""

    def __init__(self, path: Path, *, config: ModelConfig, device: str | None) -> None:
        """Load it.

        Args:
            path: the file.
            config: the model's config.
            device: "cpu", "cuda:0"; None: the module places its weights and inputs itself.

        Raises:
            RepositoryError: the file cannot be loaded, or does not match the config; in Triton's words.
        """
        self._torch = torch = import_torch()
        self._modes = _Modes.of(config.parameters)
        self._device = device or "cpu"
        self._module = _load(path, torch, device=device, model=config.name)
        arguments = _arguments(self._module)
        self._takes_dict = [kind for _, kind in arguments] == ["DictType"]
        self._arguments = (
            {} if self._takes_dict else _argument_indexes(config, [name for name, _ in arguments])
        )
        self._outputs = _output_indexes(config)
        _check_strings(config)
        # In-place operators must not write into the memory of a request.
        self._copies_inputs = any(kind.endswith("_") for kind in _operations(self._module.inlined_graph))
        self._weight_pointers = {
            tensor.untyped_storage().data_ptr()
            for tensor in (*self._module.parameters(), *self._module.buffers())
        }
        self._data_types = _data_types(torch)

    def run(self, inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> dict[str, Tensor]:
        """Run it. Inputs are not copied; outputs are views of torch's memory.

        Raises:
            InferenceError: the module fails, see `run_error`, or does not return such an output; in Triton's
                words.
        """
        with ExitStack() as stack:
            self._enter_modes(stack)
            try:
                results = self._call({name: self._to_torch(tensor) for name, tensor in inputs.items()})
            except InferenceError:
                raise
            except Exception as error:  # the module may raise anything
                raise run_error(f"PyTorch execute failure: {error}", inputs) from error
            if self._modes.cache_cleaning and self._device != "cpu":
                self._torch.cuda.empty_cache()
            return {name: self._from_torch(name, self._result(name, results)) for name in outputs}

    def _enter_modes(self, stack: ExitStack) -> None:
        torch, modes = self._torch, self._modes
        stack.enter_context(torch.inference_mode() if modes.inference else torch.no_grad())
        if not modes.optimized:
            stack.enter_context(torch.jit.optimized_execution(modes.optimized))
        if not modes.cudnn:
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))

    def _call(self, inputs: Mapping[str, Any]) -> Sequence[Any]:
        if self._takes_dict:
            result = self._module(dict(inputs))
        else:
            order = sorted(inputs, key=self._arguments.__getitem__)
            result = self._module(*(inputs[name] for name in order))
        if isinstance(result, tuple):
            return result
        several = isinstance(result, list) and result and not isinstance(result[0], str)
        return result if several else (result,)

    def _to_torch(self, tensor: Tensor) -> Any:
        if tensor.data_type is DataType.BYTES:
            return decode_strings(tensor)
        torch, data = self._torch, tensor.data
        # Not `from_numpy`, which warns about read-only memory such as the body of a request.
        value = data if isinstance(data, torch.Tensor) else torch.from_dlpack(data)
        if tensor.data_type is DataType.BF16 and isinstance(data, np.ndarray):
            value = value.view(torch.bfloat16)
        if self._device != "cpu":
            return value.to(self._device)
        return value.clone() if self._copies_inputs else value

    def _result(self, name: str, results: Sequence[Any]) -> Any:
        index = self._outputs[name]
        if index >= len(results):
            raise InferenceError(
                f"The output {name} in the model configuration refers to an output index which doesn't "
                f"exist. This model has {len(results)} outputs"
            )
        return results[index]

    def _from_torch(self, name: str, value: Any) -> Tensor:
        if isinstance(value, list) and all(isinstance(element, str) for element in value):
            return string_tensor(name, value, shape=(len(value),))
        if not isinstance(value, self._torch.Tensor):
            raise InferenceError(f"output '{name}' must be of type Tensor or List[str].")
        if value.dim() == 0:
            raise InferenceError(
                f"output '{name}' is a scalar which is not supported.",
                remedy="return a tensor with at least one dimension",
            )
        value = value.detach().contiguous()
        if value.untyped_storage().data_ptr() in self._weight_pointers:
            value = value.clone()       # the next run may change it before the response is sent
        data_type = self._data_types.get(value.dtype)
        if data_type is None:
            raise InferenceError(f"output '{name}' has dtype {value.dtype}, which KServe does not support")
        in_numpy = value.device.type == "cpu" and data_type is not DataType.BF16
        return Tensor(name, value.numpy() if in_numpy else value, data_type=data_type)


def _load(path: Path, torch: ModuleType, *, device: str | None, model: str) -> Any:
    try:
        with warnings.catch_warnings():
            # torch recommends torch.export, which is up to the author of the model.
            warnings.simplefilter("ignore", DeprecationWarning)
            return torch.jit.load(str(path), map_location=device).eval()
    except Exception as error:  # RuntimeError, ValueError, errors of pickle
        raise RepositoryError(
            f"failed to load model '{model}': {error}",
            status=Status.INTERNAL,
            remedy=f"write {path.name} with torch.jit.save of a scripted or traced module",
        ) from error


def _arguments(module: Any) -> list[tuple[str, str]]:
    """Return the name and the type of each argument of `forward`."""
    arguments = [(argument.name, argument.type) for argument in module.forward.schema.arguments]
    arguments = [(name, type_) for name, type_ in arguments if type_.kind() != "ClassType"]     # self
    for _, type_ in arguments:
        allowed = ("TensorType", "ListType") if len(arguments) > 1 else ("TensorType", "ListType", "DictType")
        if type_.kind() not in allowed:
            raise RepositoryError(
                f"An input of type '{type_.annotation_str}' was detected in the model. Only a single input "
                "of type Dict(str, Tensor) or input(s) of type Tensor are supported."
            )
    return [(name, type_.kind()) for name, type_ in arguments]


def _check_strings(config: ModelConfig) -> None:
    specs = [(spec, "input") for spec in config.inputs] + [(spec, "output") for spec in config.outputs]
    for spec, kind in specs:
        if spec.data_type == "TYPE_STRING" and len(config.with_batch(spec.model_dims)) > 1:
            raise RepositoryError(
                f"Triton only supports 1 dimensional List of String as {kind} for '{spec.name}' "
                f"for model '{config.name}'",
                remedy="if the model batches, write dims: [ 1 ] reshape: { shape: [ ] }",
            )


def _operations(block: Any) -> Iterator[str]:
    for node in block.nodes():
        yield node.kind()
        for inner in node.blocks():
            yield from _operations(inner)


def _data_types(torch: ModuleType) -> dict[Any, DataType]:
    return {
        torch.bool: DataType.BOOL, torch.uint8: DataType.UINT8, torch.uint16: DataType.UINT16,
        torch.uint32: DataType.UINT32, torch.uint64: DataType.UINT64, torch.int8: DataType.INT8,
        torch.int16: DataType.INT16, torch.int32: DataType.INT32, torch.int64: DataType.INT64,
        torch.float16: DataType.FP16, torch.float32: DataType.FP32, torch.float64: DataType.FP64,
        torch.bfloat16: DataType.BF16,
    }


def _argument_indexes(config: ModelConfig, arguments: Sequence[str]) -> dict[str, int]:
    """Return the argument position of each input, including batch inputs, controls and states.

    Inputs are matched by argument name, else by the `__<index>` at the end of all names, else by their order
    in the config. Controls and states always have the form `<name>__<index>`.

    Args:
        config: the model's config.
        arguments: argument names of `forward`, without `self`.

    Raises:
        RepositoryError: the inputs do not match the arguments, or a state or control has no index; in
            Triton's words where it has any.

    Source: Triton's pytorch_backend, naming convention of inputs.
    """
    computed = [name for batch_input in config.batch_inputs for name in batch_input.target_names]
    names = [*(spec.name for spec in config.inputs), *computed]
    indexes = _indexes(names, known=arguments, kind="input", config=config)
    if config.sequence_batching is not None:
        for control in config.sequence_batching.controls:
            indexes[control.name] = _control_index(control.name)
        for state in config.sequence_batching.states:
            indexes[state.input_name] = _state_index(state.input_name, config)
    _check_arguments(indexes, arguments, config)
    return indexes


def _output_indexes(config: ModelConfig) -> dict[str, int]:
    """Return the result position of each output and state: by `__<index>`, else by the config's order.

    Raises:
        RepositoryError: a state has no index; in Triton's words.
    """
    indexes = _indexes([spec.name for spec in config.outputs], known=(), kind="output", config=config)
    if config.sequence_batching is not None:
        for state in config.sequence_batching.states:
            indexes[state.output_name] = _state_index(state.output_name, config)
    return indexes


def _indexes(names: Sequence[str], *, known: Sequence[str], kind: str, config: ModelConfig) -> dict[str, int]:
    if known and all(name in known for name in names):
        return {name: known.index(name) for name in names}
    indexes = {name: index for name in names if (index := _index(name)) is not None}
    if len(indexes) == len(names):
        return indexes
    if config.sequence_batching is not None and config.sequence_batching.states:
        raise RepositoryError(
            f"PyTorch model '{config.name}' is using sequence batching with state but not all inputs and "
            "outputs follow the <name>__<index> naming convention. "
        )
    if len(names) > 1:
        logger.warning(
            "model %s: its %ss match neither the names of the module nor <name>__<index>; "
            "they are used in the order of config.pbtxt",
            config.name,
            kind,
        )
    return {name: index for index, name in enumerate(names)}


def _index(name: str) -> int | None:
    digits = name.partition("__")[2]
    return int(digits) if digits.isdecimal() else None


def _control_index(name: str) -> int:
    index = _index(name)
    if index is None:
        raise RepositoryError(f"input '{name}' does not follow <name>__<index> naming convention.")
    return index


def _state_index(name: str, config: ModelConfig) -> int:
    index = _index(name)
    if index is None:
        raise RepositoryError(
            f"PyTorch model '{config.name}' is using sequence batching with state but state '{name}' "
            "does not follow the <name>__<index> naming convention. "
        )
    return index


def _check_arguments(indexes: dict[str, int], arguments: Sequence[str], config: ModelConfig) -> None:
    remedy = f"the arguments of `forward` are {', '.join(arguments) or 'nothing'}"
    if len(indexes) != len(arguments):
        raise RepositoryError(
            f"unable to load model '{config.name}', configuration expects {len(indexes)} inputs, "
            f"model provides {len(arguments)}",
            remedy=remedy,
        )
    if sorted(indexes.values()) != list(range(len(arguments))):
        raise RepositoryError(
            f"the inputs of model '{config.name}' have the indexes "
            f"{', '.join(f'{index} ({name})' for name, index in indexes.items())}; "
            f"each index from 0 to {len(arguments) - 1} must occur once",
            remedy=remedy,
        )
