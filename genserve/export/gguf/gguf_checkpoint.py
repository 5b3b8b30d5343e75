"""GGUF checkpoint: reads a GGUF file as the config, tensors and tokenizer of a Hugging Face folder."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
from numpy.typing import NDArray

from genserve.errors import ExportError
from genserve.export.checkpoints.checkpoint import Checkpoint, StoredRows
from genserve.export.checkpoints.grouped_weight import FP4_CODES, FP4_ZERO, GroupedWeight, half_powers
from genserve.export.checkpoints.rows import Rows
from genserve.export.decoder_weights import TensorSource, tensor_sources
from genserve.export.families import FAMILIES
from genserve.export.families.exportable import EXPERTS, LATENT, RECURRENT, refusal
from genserve.export.families.family import Family
from genserve.export.gguf.architectures import GGUF_ARCHITECTURES, GgufArchitecture, GgufHeader, common_config
from genserve.export.gguf.gguf_file import GgufFile, GgufTensor
from genserve.export.gguf.gguf_tokenizer import tokenizer_files
from genserve.kernels.blocks import BLOCK_FORMATS
from genserve.sampling.logits_array import FloatArray

logger = logging.getLogger(__name__)

# Metadata of features that are not supported, by the beginning of the keys after the architecture.
_UNSUPPORTED = {
    "expert_count": EXPERTS,
    "ssm.": RECURRENT,
    "wkv.": RECURRENT,
    "shortconv.": RECURRENT,
    "attention.kv_lora_rank": LATENT,
}
_FLOATS = {"F64", "F32", "F16", "BF16"}
# Parts of the names of tensors that a file has as stacks.
_STACKED = re.compile(r"\.norms\.\{n\}|\.\{[en]\}")
_EXPERTS = re.compile(r"\.(block_sparse_moe|mixer)\.experts\.")
_OF_ROUTERS = {"mlp.router": "ffn_gate_inp", "mlp.choice": "exp_probs_b"}     # by role
# The names of the parts of an MLP where the converter takes a tensor apart, by role.
_OF_MLPS = {
    f"mlp.{shared}{part}": f"ffn_{part}{'_shexp' if shared else ''}"
    for shared in ("", "shared.")
    for part in ("gate", "up", "down")
}
_OF_EXPERTS = {f"mlp.experts.{{e}}.{part}": f"ffn_{part}_exps" for part in ("gate", "up", "down")}
# The tensors that are no modules and have no names in the package gguf, by role.
_OF_VECTORS = {
    "mixer.rate": "ssm_a", "mixer.step_bias": "ssm_dt.bias", "mixer.skip": "ssm_d",
    "mlp.router_norm.weight": "ffn_gate_inp.scale", "mlp.expert_scales": "ffn_down_exps.scale",
}
# Ends of the names of tensors that have one row in a folder, and perhaps none in a file.
_ONE_ROW = (".shared_expert_gate.weight", ".moe_statics.e_score_correction_bias")
# Tensors from which the config is made.
_ROTARY = ("rope_freqs.", "rope_factors_long.", "rope_factors_short.")


def open_gguf(path: Path) -> GgufFile:
    """Open a GGUF file, or the first of several; raises ExportError if it is broken."""
    try:
        return GgufFile.open(path)
    except (ValueError, OSError) as error:
        raise ExportError(
            f"{path} is not a readable GGUF file: {error}", remedy="download it again"
        ) from error


def read_gguf(path: Path, *, source: str) -> Checkpoint:
    """Open a GGUF file, or the first of several, of one of `GGUF_ARCHITECTURES`.

    `source` is its name in messages.

    Raises:
        ExportError: the file is broken or incomplete, or its architecture or tokenizer is not supported.
    """
    file = open_gguf(path)
    name = str(file.metadata.get("general.architecture"))
    header = GgufHeader(architecture=name, metadata=file.metadata, tensors=dict(_unpacked(file.tensors)))
    _reject_unknown(header, source=source)
    translation = GGUF_ARCHITECTURES[name]
    try:
        header = replace(
            header, tensors=dict(_with_attention_apart(header, FAMILIES[translation.architecture]))
        )
        config = common_config(header) | translation.config(header)
        config.setdefault("architectures", [translation.architecture])
        constants = translation.tensors(header)
        tensors = dict(_tensors(header, translation, config=config))
    except KeyError as error:
        raise ExportError(f"{path} lacks {error}", remedy="download the file again") from error
    except (ArithmeticError, AttributeError, IndexError, TypeError, ValueError) as error:
        raise ExportError(
            f"{path} has metadata that describe no model of its architecture {name!r}: {error}",
            remedy="download the file again",
        ) from error
    formats = {tensor.kind.name for tensor in file.tensors.values()} - _FLOATS
    if formats:
        logger.info(
            "%s: weights in %s are dequantized; an export in int8 or int4 quantizes them a second time",
            source, ", ".join(sorted(formats)),
        )

    def load(name: str, rows: slice) -> FloatArray:
        return constants[name].copy() if name in constants else tensors[name].read(rows)

    return Checkpoint(
        source=source,
        config=config,
        tensor_names=frozenset({*tensors, *constants}),
        load=load,
        shape=lambda name: constants[name].shape if name in constants else tensors[name].shape,
        load_stored=lambda name: tensors[name].stored() if name in tensors else None,
        is_quantized=any(tensor.stored() is not None for tensor in tensors.values()),
        tokenizer_files=tokenizer_files(file.metadata, source=source),
        num_bytes=sum(tensor.blocks.nbytes for tensor in file.tensors.values()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    """A tensor as a Hugging Face folder has it."""

    tensor: GgufTensor
    order: NDArray[np.int64] | None = None  # of the rows; None: as in the file
    transposed: bool = False
    columns: NDArray[np.int64] | None = None    # which column each one in the file is; None: the same
    is_difference: bool = False             # a norm that stores the difference from 1 in a folder
    is_rate: bool = False                   # the negative exponential of what a folder has

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.tensor.shape[::-1] if self.transposed else self.tensor.shape
        return shape if self.order is None else (len(self.order), *shape[1:])

    def read(self, rows: slice) -> FloatArray:
        if self.transposed:
            return self.tensor.read().T[rows]
        values = (self.tensor if self._is_all(rows) else self.tensor.rows(self._index(rows))).read()
        if self.is_difference:  # llama.cpp's converter adds 1
            values -= np.float32(1)
        if self.is_rate:
            values = np.log(-values)
        return values if self.columns is None else values[:, np.argsort(self.columns)]

    def stored(self) -> StoredRows | None:
        """Return the rows as the file has them, if the kernels execute their format."""
        kind, shape = self.tensor.kind.name, self.tensor.shape
        if len(shape) != 2 or self.transposed:
            return None
        if kind == "MXFP4":
            stored = _of_mxfp4(self.tensor)
        elif kind in BLOCK_FORMATS:
            rows = Rows.of(self.tensor.blocks.reshape(shape[0], -1))
            stored = StoredRows(kind=kind, rows=rows, inputs=shape[1])
        else:
            return None
        if stored is not None and self.order is not None:
            stored = replace(stored, rows=stored.rows.taken(self.order))
        if stored is not None and self.columns is not None:
            stored = replace(stored, order=self.columns.astype(np.int32))
        return stored

    def _is_all(self, rows: slice) -> bool:
        return self.order is None and rows == slice(None)

    def _index(self, rows: slice) -> slice | NDArray[np.int64]:
        return rows if self.order is None else self.order[rows]


def _of_mxfp4(tensor: GgufTensor) -> StoredRows | None:
    """Return a weight in MXFP4 in the blocks that hold its numbers: an exponent (E8M0), and 32 codes (E2M1).

    The first 16 codes are the low halves of the bytes behind the exponent.
    """
    outputs, inputs = tensor.shape
    blocks = tensor.blocks.reshape(outputs, inputs // 32, -1)

    def codes(start: int, stop: int) -> NDArray[np.uint8]:
        packed = blocks[start:stop, :, 1:]
        places = np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=2)
        found: NDArray[np.uint8] = FP4_CODES[places].reshape(stop - start, inputs)
        return found

    return GroupedWeight(
        shape=(outputs, inputs),
        bits=5,
        groups=np.arange(inputs) // 32,
        codes=codes,
        scales=lambda start, stop: half_powers(blocks[start:stop, :, 0]),
        zeros=lambda start, stop: np.full((stop - start, inputs // 32), FP4_ZERO),
    ).stored()


def _reject_unknown(header: GgufHeader, *, source: str) -> None:
    name = header.architecture
    if name in GGUF_ARCHITECTURES:
        return
    for key, reason in _UNSUPPORTED.items():
        if any(found.startswith(f"{name}.{key}") and value != 0 for found, value in header.metadata.items()):
            raise refusal(source, architecture=name, reason=reason, model_type=name)
    raise ExportError(
        f"{source} has the architecture {name!r}, which is not supported in GGUF files",
        remedy=f"known: {', '.join(sorted(GGUF_ARCHITECTURES))}; or export from the original checkpoint "
        "folder (config.json and safetensors)",
    )


def _tensors(
    header: GgufHeader, translation: GgufArchitecture, *, config: Mapping[str, Any]
) -> Iterator[tuple[str, _Tensor]]:
    """Yield each tensor by its name in a Hugging Face folder; one without such a name keeps its own."""
    names, whole, differences = module_names(
        header.architecture,
        config["architectures"][0],
        num_layers=header["block_count"],
        has_two_norms=header.has("attn_norm_2.weight"),
    )
    for own_name, tensor in header.tensors.items():
        if own_name.startswith(_ROTARY) or ".nextn." in own_name:
            continue
        module, _, part = own_name.rpartition(".")
        name = names.get(own_name) or names.get(module, module)
        if module not in whole and own_name not in names:
            name = f"{name}.{part}"
        tensor = replace(tensor, shape=_folder_shape(own_name, tensor.shape))
        if name.endswith(_ONE_ROW):
            tensor = replace(tensor, shape=(1, math.prod(tensor.shape)))
        if (parts := translation.parts.get(module.rpartition(".")[2])) is not None:
            for own, rows in parts.items():
                in_layer = f"model.layers.{module.split('.')[1]}.{own}.{part}"
                yield in_layer, _Tensor(tensor=tensor, order=rows(config))
            continue
        entry = next((place for place in ("{n}", "{e}") if place in name), None)
        if entry is not None:   # a norm for each head, or a weight for each expert
            for index in range(tensor.shape[0]):
                row = replace(tensor.rows(slice(index, index + 1)), shape=tensor.shape[1:])
                yield name.replace(entry, str(index)), _Tensor(tensor=row)
            continue
        yield name, _Tensor(
            tensor=tensor,
            order=translation.row_order(name, config),
            columns=translation.column_order(name, config),
            transposed=name.endswith(translation.transposed),
            is_rate=own_name.endswith(".ssm_a"),
            is_difference=names.get(module) in differences and part == "weight",
        )


def _unpacked(tensors: Mapping[str, GgufTensor]) -> Iterator[tuple[str, GgufTensor]]:
    """Yield the tensors, of gates and values of experts that are one tensor each half."""
    for name, tensor in tensors.items():
        if ".ffn_gate_up_exps." not in name:
            yield name, tensor
            continue
        count, both, *inputs = tensor.shape
        halves = tensor.blocks.reshape(count, 2, -1, tensor.blocks.shape[-1])
        for index, part in enumerate(("gate", "up")):
            shape = (count, both // 2, *inputs)
            yield name.replace("gate_up", part), replace(tensor, shape=shape, blocks=halves[:, index])


def _with_attention_apart(header: GgufHeader, family: Family) -> Iterator[tuple[str, GgufTensor]]:
    """Yield the tensors, of queries, keys and values apart, which the converter's `--fuse-qkv` joins."""
    sources = tensor_sources(family.names, num_layers=1)
    query, key = (sources.get(f"layers.0.attention.{part}") for part in ("query", "key"))
    are_apart = query is not None and key is not None and query.names != key.names     # in a folder
    for name, tensor in header.tensors.items():
        layer, _, part = name.rpartition(".attn_qkv.")
        output = header.tensors.get(f"{layer}.attn_output.weight")
        if not are_apart or output is None:     # linear attention of Qwen 3.5 has none
            yield name, tensor
            continue
        count = header["attention.head_count"]
        counts = (count, header.get("attention.head_count_kv", count))
        number = int(layer.removeprefix("blk."))
        heads, kv_heads = (count[number] if isinstance(count, list) else count for count in counts)
        size = kv_heads * output.shape[-1] // heads
        first = tensor.shape[0] - 2 * size     # behind the queries, and the gates of some families
        parts = {"q": slice(first), "k": slice(first, first + size), "v": slice(first + size, None)}
        for own, rows in parts.items():
            yield f"{layer}.attn_{own}.{part}", tensor.rows(rows)


def _folder_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in a folder of a tensor that has another one in a file."""
    if name.endswith((".ssm_conv1d.weight", ".shortconv.conv.weight")):
        return (shape[0], 1, *shape[1:])
    if name.endswith((".attn_k_b.weight", ".attn_v_b.weight")):     # heads apart
        return (math.prod(shape[:-1]), shape[-1])
    is_vector = name.endswith((".ssm_a", ".ssm_d", ".ssm_norm.weight"))
    return (math.prod(shape),) if is_vector else shape


def _modules(source: TensorSource) -> list[str]:
    """Return the modules that a file may have of a source: of a stack, those of its parts, or the whole."""
    if source.kind != "stack":
        return list(source.names)
    own, stack = source.names
    return [own, stack.removesuffix(".weight")] if stack.endswith(".weight") else [own]


def _as_in_old_files(name: str, family: Family) -> str:
    """Return the name that a module had in a folder before transformers changed it."""
    for old, new in family.renamed.items():
        name = name.replace(new, old)
    return name


def module_names(
    file_architecture: str, architecture: str, *, num_layers: int, has_two_norms: bool = False
) -> tuple[dict[str, str], set[str], set[str]]:
    """Return the modules' names in a folder by those in a file.

    Args:
        file_architecture: the `general.architecture` of a file.
        architecture: the one in config.json; that of Llama has two.
        num_layers: how many layers the file has.
        has_two_norms: the layers of this Falcon have a norm of attention and one of the MLP.

    Returns:
        The names; those in the file that are a single tensor in a folder, without .weight or .bias; and the
        norms that store differences.
    """
    family = FAMILIES[architecture]
    [number] = [number for number, name in MODEL_ARCH_NAMES.items() if name == file_architecture]
    known = get_tensor_name_map(number, num_layers)
    names: dict[str, str] = {}
    whole: set[str] = set()
    differences: set[str] = set()
    for role, source in tensor_sources(family.names, num_layers=num_layers).items():
        _, layer, part = role.split(".", 2) if role.startswith("layers.") else ("", "", role)
        # A file has experts apart from each other, as stacks of gates, values and outputs.
        for name in _modules(source):
            # llama.cpp knows the names of some architectures only without their prefix.
            stacked = _EXPERTS.sub(".mlp.experts.", _STACKED.sub("", name))
            spellings = (stacked, stacked.removeprefix(family.prefix), _as_in_old_files(name, family))
            own_name = next(filter(None, map(known.get_name, spellings)), None)
            if part in _OF_ROUTERS:
                own_name = f"blk.{layer}.{_OF_ROUTERS[part]}"
            if part in _OF_MLPS:
                names.setdefault(f"blk.{layer}.{_OF_MLPS[part]}", name)
            if part in _OF_VECTORS:
                names[f"blk.{layer}.{_OF_VECTORS[part]}"] = name
                continue
            if part in _OF_EXPERTS:
                names.setdefault(f"blk.{layer}.{_OF_EXPERTS[part]}", name)
            # The name of one of two norms is that of the only norm too.
            is_other = file_architecture == "falcon" and has_two_norms == name.endswith(".input_layernorm")
            bare = known.get_name(f"{name}.weight")     # a norm of Falcon H1 has no .weight in a file
            if bare is not None:
                names[bare] = f"{name}.weight"
            elif own_name is not None and not is_other:
                names[own_name] = name
                if source.kind == "tensor":
                    whole.add(own_name)
            if source.kind == "difference":
                differences.add(name)
    return names, whole, differences

