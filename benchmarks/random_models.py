"""Random models: GGUF files with random weights of a real shape, and what genserve makes of them.

    python benchmarks/random_models.py FOLDER [llama|mixture|hybrid ...]
    python benchmarks/serving.py --model-repository FOLDER/hybrid --model hybrid \
        --peer llama-server:PROGRAM:FOLDER/hybrid.gguf --concurrency 1 8
    python benchmarks/floor.py --model-repository FOLDER/llama --model llama

`llama` has 1.1 billion weights in the mixture of llama.cpp's Q4_K_M; there are also `llama_q8_0`, and that
file in int8 and int4. `mixture` has the layers of Qwen3 MoE in Q4_K, 3.9 billion weights of which a token
reads 0.6. `hybrid` has the layers of Qwen3.5 in Q4_K, a billion weights: three of gated delta networks, then
one of attention. The speed of a product depends on the formats and not on the numbers, so that blocks are
random bytes with plausible scales, and nothing is compared with a source. The tokenizer is that of the
default model. Prints the bytes of the weights that each token reads in llama.cpp.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from genserve.export import SilentProgress
from genserve.export.checkpoint_reader import read_checkpoint
from genserve.export.conversion import Conversion
from genserve.export.export_options import ExportFormat, Precision
from genserve.export.model_folders import ModelFolders
from genserve.export.pulling import cache_folder, fetch_gguf
from genserve.export.reference import Reference

VOCAB = 49152
NOTHING_SEEN = Reference(
    ids=np.empty((0, 0), np.int64),
    hidden=np.empty((0, 0, 0), np.float32),
    logits=np.empty((0, 0, 0), np.float32),
    activations={},
)


class Tensor(NamedTuple):
    """A tensor of a file; `kind` is F32 (`value`, or random around zero if it is None), or a block format."""

    name: str
    shape: tuple[int, ...]
    kind: str = "F32"
    value: float | None = 1.0


class Shape(NamedTuple):
    """The sizes of a model in a file's header; all heads of queries together may be wider than `hidden`."""

    architecture: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    more: Mapping[str, Any] = {}

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the header, without the name of the architecture."""
        fields: dict[str, Any] = {
            "block_count": self.layers,
            "context_length": 4096,
            "embedding_length": self.hidden,
            "feed_forward_length": self.inner,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": 10_000.0,
            "rope.dimension_count": self.head_dim,
        }
        return fields | dict(self.more)


LLAMA = Shape("llama", layers=20, hidden=2048, inner=5632, heads=32, kv_heads=4, head_dim=64)
EXPERTS, USED_EXPERTS, EXPERT_INNER = 64, 8, 768
MIXTURE = Shape(
    "qwen3moe", layers=24, hidden=1024, inner=EXPERT_INNER, heads=16, kv_heads=4, head_dim=128,
    more={
        "expert_count": EXPERTS,
        "expert_used_count": USED_EXPERTS,
        "expert_feed_forward_length": EXPERT_INNER,
    },
)  # fmt: skip
STATE_HEADS, STATE_DIM, KERNEL = 16, 128, 4
HYBRID = Shape(
    "qwen35", layers=24, hidden=1536, inner=4608, heads=8, kv_heads=2, head_dim=256,
    more={
        "rope.dimension_count": 64,
        "rope.dimension_sections": [11, 11, 10, 0],
        "full_attention_interval": 4,
        "ssm.conv_kernel": KERNEL,
        "ssm.group_count": STATE_HEADS,
        "ssm.state_size": STATE_DIM,
        "ssm.time_step_rank": STATE_HEADS,
        "ssm.inner_size": STATE_HEADS * STATE_DIM,
    },
)  # fmt: skip


def llama_layer(shape: Shape, layer: int, *, low: str, high: str) -> Iterator[Tensor]:
    """Yield the tensors of a layer; Q4_K_M has more bits for half of the values and of the downs."""
    eighth = shape.layers // 8
    is_high = layer < eighth or layer >= shape.layers - eighth or (layer - eighth) % 3 == 2
    yield from attention(shape, low=low, value=high if is_high else low)
    yield Tensor("ffn_norm.weight", (shape.hidden,))
    yield from feed_forward(shape, low=low, down=high if is_high else low)


def mixture_layer(shape: Shape, _layer: int, *, low: str) -> Iterator[Tensor]:
    yield from attention(shape, low=low, value=low)
    yield from head_norms(shape)
    yield Tensor("ffn_norm.weight", (shape.hidden,))
    yield Tensor("ffn_gate_inp.weight", (EXPERTS, shape.hidden), value=None)
    yield Tensor("ffn_gate_exps.weight", (EXPERTS, EXPERT_INNER, shape.hidden), low)
    yield Tensor("ffn_up_exps.weight", (EXPERTS, EXPERT_INNER, shape.hidden), low)
    yield Tensor("ffn_down_exps.weight", (EXPERTS, shape.hidden, EXPERT_INNER), low)


def hybrid_layer(shape: Shape, layer: int, *, low: str) -> Iterator[Tensor]:
    if layer % 4 == 3:
        yield from attention(shape, low=low, value=low, gated=True)
        yield from head_norms(shape)
    else:
        wide = STATE_HEADS * STATE_DIM
        yield Tensor("attn_norm.weight", (shape.hidden,))
        yield Tensor("attn_qkv.weight", (3 * wide, shape.hidden), low)
        yield Tensor("attn_gate.weight", (wide, shape.hidden), low)
        yield Tensor("ssm_conv1d.weight", (3 * wide, KERNEL), value=None)
        yield Tensor("ssm_dt.bias", (STATE_HEADS,))
        yield Tensor("ssm_a", (STATE_HEADS,), value=-1.0)
        yield Tensor("ssm_beta.weight", (STATE_HEADS, shape.hidden), low)
        yield Tensor("ssm_alpha.weight", (STATE_HEADS, shape.hidden), low)
        yield Tensor("ssm_norm.weight", (STATE_DIM,))
        yield Tensor("ssm_out.weight", (shape.hidden, wide), low)
    yield Tensor("post_attention_norm.weight", (shape.hidden,))
    yield from feed_forward(shape, low=low, down=low)


def attention(shape: Shape, *, low: str, value: str, gated: bool = False) -> Iterator[Tensor]:
    wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield Tensor("attn_norm.weight", (shape.hidden,))
    yield Tensor("attn_q.weight", (2 * wide if gated else wide, shape.hidden), low)
    yield Tensor("attn_k.weight", (narrow, shape.hidden), low)
    yield Tensor("attn_v.weight", (narrow, shape.hidden), value)
    yield Tensor("attn_output.weight", (shape.hidden, wide), low)


def head_norms(shape: Shape) -> Iterator[Tensor]:
    yield Tensor("attn_q_norm.weight", (shape.head_dim,))
    yield Tensor("attn_k_norm.weight", (shape.head_dim,))


def feed_forward(shape: Shape, *, low: str, down: str) -> Iterator[Tensor]:
    yield Tensor("ffn_gate.weight", (shape.inner, shape.hidden), low)
    yield Tensor("ffn_up.weight", (shape.inner, shape.hidden), low)
    yield Tensor("ffn_down.weight", (shape.hidden, shape.inner), down)


def tensors(model: str) -> tuple[Shape, Iterator[Tensor]]:
    """Return the shape of a model's file, and its tensors."""
    match model:
        case "llama":
            return LLAMA, whole(LLAMA, llama_layer, low="Q4_K", high="Q6_K")
        case "llama_q8_0":
            return LLAMA, whole(LLAMA, llama_layer, low="Q8_0", high="Q8_0")
        case "mixture":
            return MIXTURE, whole(MIXTURE, mixture_layer, low="Q4_K")
        case _:
            return HYBRID, whole(HYBRID, hybrid_layer, low="Q4_K")


def whole(shape: Shape, layer_of: Any, **kinds: str) -> Iterator[Tensor]:
    yield Tensor("token_embd.weight", (VOCAB, shape.hidden), kinds["low"])
    yield Tensor("output.weight", (VOCAB, shape.hidden), kinds.get("high", kinds["low"]))
    yield Tensor("output_norm.weight", (shape.hidden,))
    for layer in range(shape.layers):
        for tensor in layer_of(shape, layer, **kinds):
            yield tensor._replace(name=f"blk.{layer}.{tensor.name}")


def write_file(path: Path, model: str, *, tokenizer: Path) -> None:
    """Write a GGUF file with random blocks, and the tokenizer of another file."""
    shape, parts = tensors(model)
    writer = gguf.GGUFWriter(path, shape.architecture)
    for name, value in shape.fields.items():
        match value:
            case float():
                writer.add_float32(f"{shape.architecture}.{name}", value)
            case list():
                writer.add_array(f"{shape.architecture}.{name}", value)
            case _:
                writer.add_uint32(f"{shape.architecture}.{name}", value)
    for name, field in gguf.GGUFReader(tokenizer).fields.items():
        if name.startswith("tokenizer."):
            sub_type = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=sub_type)
    rng = np.random.default_rng(0)
    for tensor in parts:
        values: NDArray[Any]
        if tensor.kind != "F32":
            values = blocks(rng, tensor.kind, *tensor.shape)
        elif tensor.value is not None:
            values = np.full(tensor.shape, tensor.value, np.float32)
        else:
            values = rng.standard_normal(tensor.shape, np.float32) / np.float32(tensor.shape[-1] ** 0.5)
        writer.add_tensor(tensor.name, values, raw_dtype=GGMLQuantizationType[tensor.kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def blocks(rng: np.random.Generator, kind: str, *shape: int) -> NDArray[np.uint8]:
    """Return random codes with scales that give weights around zero of the usual size."""
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    made = np.frombuffer(rng.bytes(int(np.prod(shape)) // block * size), np.uint8).reshape(-1, size).copy()
    unit = shape[-1] ** -0.5
    match kind:
        case "Q4_K":
            made[:, 4:12], made[:, 12:16] = 0xA1, 0x11  # all scales and minimums of 32 inputs are 33
            made[:, :4] = np.array([0.22 / 33 * unit, 1.65 / 33 * unit], np.float16).view(np.uint8)
        case "Q6_K":
            made[:, 192:208] = 16                       # the scale of 16 inputs
            made[:, 208:] = np.array([0.054 / 16 * unit], np.float16).view(np.uint8)
        case "Q8_0":
            made[:, :2] = np.array([0.0135 * unit], np.float16).view(np.uint8)
    return made.reshape(*shape[:-1], -1)


def write_repository(file: Path, repository: Path, *, model: str, precision: Precision) -> None:
    """Write a repository of one model, without a comparison."""
    conversion = Conversion.of(
        read_checkpoint(file, source=file.name),
        folders=ModelFolders(model),
        export_format=ExportFormat.ONNX,
        precision=precision,
    )
    repository.mkdir(parents=True, exist_ok=True)
    conversion.layout.write(repository, repository=repository)
    version = conversion.layout.version_folder(repository)
    conversion.write_graph(version, reference=NOTHING_SEEN, progress=SilentProgress())


# The folders of each model's repositories, with the file and the precision of each.
REPOSITORIES: Mapping[str, Mapping[str, tuple[str, Precision]]] = {
    "llama": {
        "llama": ("llama", "source"), "llama_q8_0": ("llama_q8_0", "source"),
        "llama_int8": ("llama_q8_0", "int8"), "llama_int4": ("llama_q8_0", "int4"),
    },
    "mixture": {"mixture": ("mixture", "source")},
    "hybrid": {"hybrid": ("hybrid", "source")},
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("models", nargs="*", default=[*REPOSITORIES], metavar="MODEL", help="default: all")
    options = parser.parse_args()
    if unknown := set(options.models) - REPOSITORIES.keys():
        parser.error(f"unknown models: {', '.join(sorted(unknown))}; there are {', '.join(REPOSITORIES)}")
    options.folder.mkdir(parents=True, exist_ok=True)
    for model in options.models:
        for folder, (name, precision) in REPOSITORIES[model].items():
            file = options.folder / f"{name}.gguf"
            if not file.exists():
                write_file(file, name, tokenizer=fetch_gguf(cache_folder()))
                print(f"{file.name}: {read_bytes(file) / 1e6:.0f} MB of weights per token in llama.cpp")
            write_repository(file, options.folder / folder, model=model, precision=precision)


def read_bytes(file: Path) -> float:
    """Return the bytes of weights that a token reads."""
    share = USED_EXPERTS / EXPERTS
    read = (tensor for tensor in gguf.GGUFReader(file).tensors if tensor.name != "token_embd.weight")
    return sum(int(tensor.n_bytes) * (share if "_exps." in tensor.name else 1.0) for tensor in read)


if __name__ == "__main__":
    main()
