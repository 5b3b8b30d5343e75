"""Quantized formats: the layouts of quantized weights in Hugging Face folders.

In place of the weight [N, K] of a module, such a folder has other tensors, which show the format:

    AWQ             qweight [K, N / 8] int32, qzeros [groups, N / 8], scales [groups, N]
    GPTQ, AutoRound qweight [K * bits / 32, N] int32, qzeros [groups, N * bits / 32], scales [groups, N], and
                    perhaps g_idx [K], the group of each input
    compressed-tensors
      pack          weight_packed [N, K * bits / 32] int32, weight_scale [N, groups], weight_shape [2], and
                    perhaps weight_zero_point [N * bits / 32, groups] and weight_g_idx [K]
      int           weight [N, K] int8, weight_scale [N, groups], and perhaps weight_zero_point
      MXFP4, NVFP4  weight_packed [N, K / 2] uint8, weight_scale [N, groups], with NVFP4 weight_global_scale
    gpt-oss         NAME_blocks [experts, N, K / 32, 16] uint8, NAME_scales [experts, N, K / 32]
    FP8             weight [N, K], and weight_scale_inv or weight_scale: of all, of each output, or of blocks
    bitsandbytes    weight [N, K] int8, SCB [N]; or weight [N * K / 2, 1] uint8, weight.absmax, and others

Source: the code of AutoAWQ (packing_utils.py), GPTQModel, compressed-tensors (compressors), bitsandbytes
(functional.py), and transformers (integrations/mxfp4.py and finegrained_fp8.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from genserve.errors import ExportError
from genserve.export.checkpoints.checkpoint import Checkpoint, StoredRows
from genserve.export.checkpoints.grouped_weight import FP4_CODES, FP4_ZERO, GroupedWeight, half_powers
from genserve.sampling.logits_array import FloatArray

if TYPE_CHECKING:
    import torch

# Reads a part of a tensor by name, in the type of the file; (): all of it.
TensorReader = Callable[[str, tuple[slice, ...]], "torch.Tensor"]

BITS = (2, 4, 8)        # of a code; others lie across words
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)      # of eight columns in a word
_BLOCKS, _SCALES, _BIASES = "_blocks", "_scales", "_bias"     # of a stack of experts
_UNUSED = (".q_scale", ".k_scale", ".v_scale")      # of quantized queries, keys and values

_COLUMNS = slice(None)


class QuantizedWeight(Protocol):
    """A weight that is quantized in the files of a checkpoint."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight: [N, K], or that of a stack of them."""

    def read(self, start: int, stop: int) -> FloatArray:
        """Return entries of the first dimension as floats."""

    def stored(self) -> StoredRows | None:
        """Return the weight in blocks that the kernels execute; None: no block can hold its numbers."""


@dataclass(frozen=True, slots=True)
class _OtherWeight:
    """A weight whose numbers no block can hold."""

    shape: tuple[int, ...]
    read: Callable[[int, int], FloatArray]

    def stored(self) -> None:
        """See `QuantizedWeight.stored`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outputs:
    """Which outputs of a stack of experts are those of one of its weights."""

    expert: int
    first: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedTensors:
    """Reads the quantized weights of a folder."""

    checkpoint: Checkpoint
    part: TensorReader
    quantization: Mapping[str, Any]

    def weights(self) -> Iterator[tuple[str, QuantizedWeight]]:
        """Yield each quantized weight with its name."""
        readers: Mapping[str, Callable[[str], QuantizedWeight]] = {
            ".qweight": self._awq if self._is_awq() else self._gptq,
            ".weight_packed": self._packed,
            ".weight_scale": partial(self._scaled, scale="weight_scale"),
            ".weight_scale_inv": partial(self._scaled, scale="weight_scale_inv"),
            ".SCB": self._bits_and_bytes_8,
            ".weight.quant_state.bitsandbytes__nf4": self._bits_and_bytes_4,
            ".weight.quant_state.bitsandbytes__fp4": self._bits_and_bytes_4,
        }
        for name in sorted(self.checkpoint.tensor_names):
            if name.endswith(_BLOCKS):
                yield from self._experts(name.removesuffix(_BLOCKS))
            for sign, reader in readers.items():
                module = name.removesuffix(sign)
                is_packed = sign == ".weight_scale" and self._has(f"{module}.weight_packed")
                if module != name and not is_packed:
                    yield f"{module}.weight", reader(module)

    def plain(self, name: str, rows: slice) -> FloatArray:
        """Return rows of a tensor that is not quantized."""
        tensor = self.part(name, () if rows == slice(None) else (rows,))
        self._require(tensor.is_floating_point() and tensor.itemsize > 1, f"{name} has no scales")
        array: FloatArray = tensor.float().numpy()
        return array

    def _is_awq(self) -> bool:
        """Whether words have the columns of AWQ, and not the inputs of GPTQ."""
        packing = self.quantization.get("packing_format")
        return self.quantization.get("quant_method") == "awq" or packing == "auto_round:auto_awq"

    def _awq(self, module: str) -> QuantizedWeight:
        def columns(name: str, start: int, stop: int) -> NDArray[np.uint8]:
            return self._columns(f"{module}.{name}", start, stop, bits=4, places=_AWQ_PLACES)

        inputs, words = self._shape(f"{module}.qweight")
        return self._transposed(module, (words * 8, inputs), bits=4, columns=columns)

    def _gptq(self, module: str) -> QuantizedWeight:
        words, outputs = self._shape(f"{module}.qweight")
        group_of_input = f"{module}.g_idx"
        # Some modules may have other bits than the config states; zero points have as many as codes.
        bits = 32 * self._shape(f"{module}.qzeros")[-1] // max(outputs, 1)
        self._require_known(bits in BITS, f"{module}.qweight has {bits} bits")
        # Version 1 has zero points minus 1, which was subtracted from whole words.
        is_version_2 = self.quantization.get("checkpoint_format") == "gptq_v2"
        ones = 0 if is_version_2 else (2**32 - 1) // (2**bits - 1)

        def columns(name: str, start: int, stop: int) -> NDArray[np.uint8]:
            if name == "qzeros":
                return self._columns(f"{module}.{name}", start, stop, bits=bits, added=ones)
            return _unpacked(self._words(f"{module}.{name}", _COLUMNS, slice(start, stop)).T, bits).T

        shape = outputs, 32 * words // bits
        groups = self._groups(group_of_input)
        return self._transposed(module, shape, bits=bits, columns=columns, groups=groups)

    def _transposed(
        self,
        module: str,
        shape: tuple[int, int],
        *,
        bits: int,
        columns: Callable[[str, int, int], NDArray[np.uint8]],
        groups: NDArray[np.int64] | None = None,
    ) -> QuantizedWeight:
        """Return a weight whose tensors have a column for each output; `columns` reads codes."""
        num_groups, outputs = self._shape(f"{module}.scales")
        self._require(outputs == shape[0], f"{module}.scales has {outputs} outputs, not {shape[0]}")
        words = num_groups, outputs * bits // 32
        self._require(self._shape(f"{module}.qzeros") == words, f"{module}.qzeros is not {words}")
        return self._grouped(
            module,
            shape,
            bits=bits,
            num_groups=num_groups,
            groups=groups,
            codes=lambda start, stop: columns("qweight", start, stop).T,
            scales=lambda start, stop: self._floats(f"{module}.scales", _COLUMNS, slice(start, stop)).T,
            zeros=lambda start, stop: columns("qzeros", start, stop).T.astype(np.int64),
        )

    def _packed(self, module: str) -> QuantizedWeight:
        """Read a packed weight of compressed-tensors."""
        packed = f"{module}.weight_packed"
        outputs, words = self._shape(packed)
        if str(self.part(packed, (slice(0, 1),)).dtype) == "torch.uint8":
            return self._fp4(module, (outputs, 2 * words))
        named = self._numbers(f"{module}.weight_shape")
        shape = outputs, int(named[1])
        bits = next((bits for bits in BITS if math.ceil(shape[1] * bits / 32) == words), None)
        self._require(named[0] == outputs, f"{packed} is no weight {tuple(named)}")
        self._require_known(bits is not None, f"{packed} has {32 * words / shape[1]:.3g} bits")
        assert bits is not None
        zero, point = 1 << (bits - 1), f"{module}.weight_zero_point"
        is_packed = self._has(point) and self._shape(point)[0] == math.ceil(outputs * bits / 32)

        def zeros(start: int, stop: int) -> NDArray[np.int64]:
            if not is_packed:
                return self._by_output(point, outputs, start, stop, missing=0) + zero
            count = 32 // bits
            words = self._words(point, slice(start // count, -(-stop // count)))
            rows = _unpacked(words.T, bits).T
            return rows[start % count :][: stop - start].astype(np.int64)

        return self._of_outputs(
            module, shape, bits=bits, zeros=zeros,
            codes=lambda start, stop: (
                _unpacked(self._words(packed, slice(start, stop)), bits)[:, : shape[1]]
            ),
        )

    def _scaled(self, module: str, *, scale: str) -> QuantizedWeight:
        """Read a weight that has one number in each element, with scales beside it."""
        weight = f"{module}.weight"
        outputs, inputs = self._shape(weight)
        dtype = str(self.part(weight, (slice(0, 1),)).dtype)
        if dtype == "torch.int8":
            point = f"{module}.weight_zero_point"
            return self._of_outputs(
                module, (outputs, inputs), bits=8, codes=partial(self._signed, weight),
                zeros=lambda start, stop: self._by_output(point, outputs, start, stop, missing=0) + 128,
            )
        self._require_known(dtype.startswith("torch.float8"), f"{weight} is {dtype}, and has a {scale}")
        scales = self._floats(f"{module}.{scale}")
        table = scales.reshape(1, 1) if scales.size == 1 else scales.reshape(len(scales), -1)
        wanted = self._block_size()
        rows, columns = (
            np.arange(count) // self._block(count, parts, size, f"{module}.{scale}")
            for count, parts, size in zip((outputs, inputs), table.shape, wanted, strict=True)
        )

        def read(start: int, stop: int) -> FloatArray:
            return self._floats(weight, slice(start, stop)) * table[rows[start:stop]][:, columns]

        return _OtherWeight((outputs, inputs), read)

    def _fp4(self, module: str, shape: tuple[int, int]) -> QuantizedWeight:
        """Read a weight in MXFP4 or NVFP4: E2M1 with a scale per 32 or 16 inputs."""
        scale, whole = f"{module}.weight_scale", f"{module}.weight_global_scale"
        divisor = self._floats(whole).reshape(-1)[0] if self._has(whole) else np.float32(1)

        def scales(start: int, stop: int) -> FloatArray:
            found = self.part(scale, (slice(start, stop),))
            values: FloatArray = found.float().numpy()
            if not found.is_floating_point():
                return half_powers(found.numpy())
            return values / (2 * divisor)

        packed, num_groups = f"{module}.weight_packed", self._shape(scale)[1]
        return self._grouped(
            module, shape, bits=5, num_groups=num_groups, scales=scales,
            codes=lambda start, stop: _fp4_codes(self._numbers(packed, slice(start, stop))),
            zeros=lambda start, stop: np.full((stop - start, num_groups), FP4_ZERO),
        )

    def _experts(self, stack: str) -> Iterator[tuple[str, QuantizedWeight]]:
        """Yield the weights of the experts of gpt-oss in MXFP4, and their biases, apart from each other."""
        experts, outputs, blocks, half = self._shape(f"{stack}{_BLOCKS}")
        self._require(
            half == 16 and self._shape(f"{stack}{_SCALES}") == (experts, outputs, blocks),
            f"{stack}{_SCALES} does not belong to {stack}{_BLOCKS}",
        )
        module, _, last = stack.rpartition(".")
        # The outputs of gates, and of the values that they scale, alternate.
        parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
        for expert in range(experts):
            for first, part in enumerate(parts):
                place = _Outputs(expert=expert, first=first, step=len(parts))
                shape = outputs // len(parts), 32 * blocks
                name = f"{module}.{expert}.{part}"
                yield f"{name}.weight", self._expert(stack, place, shape)
                if self._has(f"{stack}{_BIASES}"):
                    biases = partial(self._of_expert, self._floats, f"{stack}{_BIASES}", place)
                    yield f"{name}.bias", _OtherWeight(shape[:1], biases)

    def _expert(self, stack: str, place: _Outputs, shape: tuple[int, int]) -> QuantizedWeight:
        def numbers(end: str, start: int, stop: int) -> NDArray[np.uint8]:
            return self._of_expert(self._numbers, f"{stack}{end}", place, start, stop)

        num_groups = shape[1] // 32
        return GroupedWeight(
            shape=shape, bits=5, groups=np.arange(shape[1]) // 32,
            codes=lambda start, stop: _fp4_codes(numbers(_BLOCKS, start, stop)).reshape(stop - start, -1),
            scales=lambda start, stop: half_powers(numbers(_SCALES, start, stop)),
            zeros=lambda start, stop: np.full((stop - start, num_groups), FP4_ZERO),
        )

    def _of_expert(
        self, read: Callable[..., NDArray[Any]], name: str, place: _Outputs, start: int, stop: int
    ) -> NDArray[Any]:
        """Return what a stack has of some outputs of an expert."""
        expert, step = slice(place.expert, place.expert + 1), place.step
        rows: NDArray[Any] = read(name, expert, slice(start * step, stop * step))[0]
        return rows[place.first :: step]

    def _bits_and_bytes_8(self, module: str) -> QuantizedWeight:
        weight, layout = f"{module}.weight", f"{module}.weight_format"
        outputs, inputs = self._shape(weight)
        # Old versions may have saved the order in which a GPU reads the weight.
        is_by_row = not self._has(layout) or not self._numbers(layout).any()
        self._require_known(is_by_row, f"{layout} is not 0, which is row by row")
        return self._grouped(
            module, (outputs, inputs), bits=8, num_groups=1, codes=partial(self._signed, weight),
            scales=lambda start, stop: self._floats(f"{module}.SCB", slice(start, stop))[:, None] / 127,
            zeros=lambda start, stop: np.full((stop - start, 1), 128),
        )

    def _bits_and_bytes_4(self, module: str) -> QuantizedWeight:
        """Read a weight whose codes are places in a table, with a scale for each block of the flat weight."""
        weight = f"{module}.weight"
        [name] = (name for name in self.checkpoint.tensor_names if name.startswith(f"{weight}.quant_state."))
        try:
            state = json.loads(self._numbers(name).tobytes())
            (outputs, inputs), block = state["shape"], int(state["blocksize"])
            offset = np.float32(state.get("nested_offset", 0))
            nested = int(state.get("nested_blocksize", 1))
        except (ValueError, LookupError, TypeError) as error:
            raise self._broken(f"{name} is not readable: {error!r}") from error
        table = self._floats(f"{weight}.quant_map")
        absmax, of_absmax = f"{weight}.absmax", f"{weight}.nested_absmax"
        has_all = self._shape(weight)[0] == -(-outputs * inputs // 2)
        num_blocks = -(-outputs * inputs // block)
        self._require(
            has_all and self._shape(absmax) == (num_blocks,), f"{weight} and {absmax} do not belong together"
        )
        if self._has(of_absmax):
            places, factors = self._floats(f"{weight}.nested_quant_map"), self._floats(of_absmax)
            self._require(len(factors) == -(-num_blocks // nested), f"{of_absmax} is for other blocks")

        def scales(blocks: slice) -> FloatArray:
            if not self._has(of_absmax):
                return self._floats(absmax, blocks)
            found: FloatArray = places[self._numbers(absmax, blocks)]
            found *= factors[np.arange(blocks.start, blocks.stop) // nested]
            found += offset
            return found

        def read(start: int, stop: int) -> FloatArray:
            first, last = start * inputs, stop * inputs
            packed = self._numbers(weight, slice(first // 2, -(-last // 2))).reshape(-1)
            codes = np.stack([packed >> 4, packed & 15], axis=1).reshape(-1)[first % 2 :][: last - first]
            blocks = slice(first // block, -(-last // block))
            values: FloatArray = table[codes] * scales(blocks)[np.arange(first, last) // block - blocks.start]
            return values.reshape(stop - start, inputs)

        return _OtherWeight((outputs, inputs), read)

    def _of_outputs(
        self,
        module: str,
        shape: tuple[int, int],
        *,
        bits: int,
        codes: Callable[[int, int], NDArray[np.uint8]],
        zeros: Callable[[int, int], NDArray[np.int64]],
    ) -> QuantizedWeight:
        """Return a weight of compressed-tensors, whose tensors have a row for each output."""
        scale = f"{module}.weight_scale"
        named = self._shape(scale)
        num_groups = named[1] if len(named) == 2 else 1
        self._require(
            math.prod(named) == 1 or named[0] == shape[0], f"{scale} is {named}, and its weight {shape}"
        )
        return self._grouped(
            module, shape, bits=bits, num_groups=num_groups, codes=codes,
            groups=self._groups(f"{module}.weight_g_idx"),
            scales=lambda start, stop: self._by_output(scale, shape[0], start, stop),
            zeros=lambda start, stop: np.broadcast_to(zeros(start, stop), (stop - start, num_groups)),
        )

    def _grouped(
        self,
        module: str,
        shape: tuple[int, int],
        *,
        num_groups: int,
        groups: NDArray[np.int64] | None = None,
        **parts: Any,
    ) -> QuantizedWeight:
        if groups is None:
            wanted = self.quantization.get("group_size") or self.quantization.get("q_group_size") or 0
            size = self._block(shape[1], num_groups, wanted, f"the scales of {module}")
            groups = np.arange(shape[1]) // size
        is_valid = len(groups) == shape[1] and groups.min() >= 0 and groups.max() < num_groups
        self._require(is_valid, f"{module} has inputs of groups without a scale")
        return GroupedWeight(shape=shape, groups=groups, **parts)

    def _block(self, count: int, parts: int, wanted: int, name: str) -> int:
        """Return how many of `count` numbers share a scale: `wanted`, if the config states it, one or all."""
        if wanted > 0 and math.ceil(count / wanted) == parts:
            return wanted
        fits = parts > 0 and count % parts == 0 and (wanted <= 0 or parts in (1, count))
        self._require(fits, f"{name} are {parts} for {count}")
        return count // parts

    def _block_size(self) -> Sequence[int]:
        """Return the outputs and inputs that share a scale of FP8."""
        size: Sequence[int] | None = self.quantization.get("weight_block_size")
        groups = self.quantization.get("config_groups") or {}
        sizes = [(group.get("weights") or {}).get("block_structure") for group in groups.values()]
        return size or next(filter(None, sizes), (128, 128))

    def _signed(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        """Return numbers of type int8, plus 128."""
        return self._numbers(name, slice(start, stop)).view(np.uint8) ^ np.uint8(128)

    def _columns(
        self,
        name: str,
        start: int,
        stop: int,
        *,
        bits: int,
        places: Sequence[int] = (),
        added: int = 0,
    ) -> NDArray[np.uint8]:
        """Return the codes of some columns, of which each word has several; `added` is added to words."""
        count = 32 // bits
        words = self._words(name, _COLUMNS, slice(start // count, -(-stop // count)))
        codes = _unpacked(words + np.uint32(added), bits)
        if places:
            codes = codes.reshape(len(words), -1, count)[:, :, places].reshape(len(words), -1)
        return codes[:, start % count :][:, : stop - start]

    def _by_output(
        self, name: str, outputs: int, start: int, stop: int, *, missing: int | None = None
    ) -> NDArray[Any]:
        """Return [rows, groups] of a tensor that has a row for each output, or one number for all."""
        if missing is not None and not self._has(name):
            return np.full((1, 1), missing)
        is_one = math.prod(self._shape(name)) == 1
        found = self.part(name, () if is_one else (slice(start, stop),))
        values = found.float().numpy() if found.is_floating_point() else found.numpy().astype(np.int64)
        return np.broadcast_to(values.reshape(1, 1), (stop - start, 1)) if is_one else (
            values.reshape(stop - start, -1)
        )

    def _groups(self, name: str) -> NDArray[np.int64] | None:
        """Return the group of each input; None: the folder does not state it, or has -1 or 0 for all."""
        found = self._numbers(name).astype(np.int64) if self._has(name) else None
        return None if found is None or (found <= 0).all() else found

    def _floats(self, name: str, *at: slice) -> FloatArray:
        self._shape(name)
        values: FloatArray = self.part(name, at).float().numpy()
        return values

    def _numbers(self, name: str, *at: slice) -> NDArray[Any]:
        """Return integers in the type of the file."""
        self._shape(name)
        found = self.part(name, at)
        self._require(not found.is_floating_point(), f"{name} has floats")
        values: NDArray[Any] = found.numpy()
        return values

    def _words(self, name: str, *at: slice) -> NDArray[np.uint32]:
        """Return words of 32 bits, which have several codes each."""
        values = self._numbers(name, *at)
        self._require(values.dtype == np.int32, f"{name} is {values.dtype}, not int32")
        return values.view(np.uint32)

    def _has(self, name: str) -> bool:
        return name in self.checkpoint.tensor_names

    def _shape(self, name: str) -> tuple[int, ...]:
        self._require(self._has(name), f"it has no tensor {name!r}")
        return self.checkpoint.shape(name)

    def _require(self, holds: bool, problem: str) -> None:  # noqa: FBT001
        if not holds:
            raise self._broken(problem)

    def _require_known(self, holds: bool, problem: str) -> None:  # noqa: FBT001
        """Reject what other programs may read."""
        if not holds:
            raise ExportError(
                f"the quantized weights of {self.checkpoint.source} are not supported: {problem}",
                remedy="export the checkpoint with float weights from which it was made",
            )

    def _broken(self, problem: str) -> ExportError:
        return ExportError(
            f"the quantized weights of {self.checkpoint.source} are broken: {problem}",
            remedy="download it again, or export the checkpoint with float weights from which it was made",
        )


def _unpacked(words: NDArray[np.uint32], bits: int) -> NDArray[np.uint8]:
    """Return the codes in words [..., n], the lowest bits first: [..., n * 32 / bits]."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = (words[..., np.newaxis] >> shifts) & np.uint32((1 << bits) - 1)
    return codes.astype(np.uint8).reshape(*words.shape[:-1], -1)


def _fp4_codes(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return twice the numbers of E2M1 plus 16, of bytes [..., n] whose low halves are first: [..., 2n]."""
    places = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    return FP4_CODES[places]


def is_part(name: str, modules: set[str], tensor_names: Container[str]) -> bool:
    """Whether a tensor describes the weight of one of these modules or of experts, or is not used."""
    stack = name.removesuffix(_SCALES).removesuffix(_BIASES).removesuffix(_BLOCKS)
    if name.endswith(_UNUSED) or f"{stack}{_BLOCKS}" in tensor_names:
        return True
    return bool(module_of(name, modules))


def module_of(name: str, modules: set[str]) -> str:
    """Return which of these modules has a tensor as a part of its weight; "": none has."""
    module = name
    while module and module not in modules:
        module = module.rpartition(".")[0]
    return "" if name == f"{module}.bias" else module
