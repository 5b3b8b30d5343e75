"""Layout: the files of a model's folders except the weights: configs, model.py and the tokenizer's files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from types import MappingProxyType

import numpy as np

from genserve.config.model_config import ModelConfig
from genserve.config.parse import parse_model_config, read_model_config
from genserve.errors import ExportError, RepositoryError
from genserve.export.checkpoint import Checkpoint
from genserve.export.decoder import Dimensions
from genserve.export.export_options import CacheType, ExportFormat, Precision
from genserve.export.model_folders import ModelFolders
from genserve.export.quantization import cache_dtype
from genserve.sampling.sampling_params import TRITON_TENSORS
from genserve.tensor import DataType
from genserve.textmodel.logits_config import num_pipeline_stages

MAX_NUM_SEQS = 32               # sequences that share a step
_MAX_SEQUENCE_LENGTH = 4096     # tokens; more than a chat needs, and a cache of it fits into memory

_TEMPLATES = Path(__file__).parent / "templates"

# The inputs of a request other than sampling parameters, with data type and number of elements.
_OTHER_PARAMETERS: Mapping[str, tuple[str, int]] = MappingProxyType(
    {
        "guided_decoding_guide_type": ("TYPE_STRING", 1),
        "guided_decoding_guide": ("TYPE_STRING", 1),
        "stream": ("TYPE_BOOL", 1),
    }
)

# The words of each format in the config of the logits stage.
_RUNTIMES: Mapping[ExportFormat, Mapping[str, str]] = MappingProxyType(
    {
        ExportFormat.ONNX: {
            "backend": "onnxruntime",
            "runtime": "ONNX Runtime",
            "threads": "intra_op_thread_count",
            "cache": "blocks of tokens, written in place",
        },
        ExportFormat.TORCHSCRIPT: {
            "backend": "pytorch",
            "runtime": "TorchScript",
            "threads": "INTRA_OP_THREAD_COUNT",
            "cache": "blocks of tokens, written in place",
        },
        ExportFormat.TRACED: {
            "backend": "onnxruntime",
            "runtime": "ONNX Runtime",
            "threads": "intra_op_thread_count",
            "cache": "copied at each step, one token longer",
        },
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayout:
    """The folders and files of one export."""

    folders: ModelFolders
    export_format: ExportFormat
    precision: Precision
    checkpoint: Checkpoint
    dimensions: Dimensions
    kv_cache: CacheType = "float"
    pipeline_stages: int = 1

    def require_agreeing_config(self, repository: Path, *, beside: bool = False) -> None:
        """Reject an existing config.pbtxt of the logits stage that describes another model.

        Its batch size, threads and the rest are free. For a graph `beside` the model's own, so is the type of
        its KV cache.

        Raises:
            ExportError: its backend, outputs, states or number of pipeline stages differ.
        """
        part = f"{self.folders.logits}/config.pbtxt"
        path = repository / part
        if not path.exists():
            return
        found = read_model_config(path)
        made = parse_model_config(self._files()[part], source=path)
        if _signature(found, state_types=not beside) != _signature(made, state_types=not beside):
            raise ExportError(
                f"{path} declares another backend, or other outputs, states or pipeline stages, than "
                f"{self.checkpoint.source} in {self.precision} as {self.export_format.label}",
                remedy=f"{'' if beside else '--overwrite writes a new one; or '}export under another --name",
            )

    def write(self, folder: Path, *, repository: Path) -> None:
        """Write all files except the weights: configs, model.py, and the tokenizer's files.

        The batch size is that of the ensemble in the repository, whose config stays and may have been tuned.
        """
        max_num_seqs = _batch_size(repository / self.folders.ensemble / "config.pbtxt") or MAX_NUM_SEQS
        files = {part: content.encode() for part, content in self._files(max_num_seqs=max_num_seqs).items()}
        for name, content in self.checkpoint.tokenizer_files.items():
            files[f"{self.folders.tokenizer}/1/{name}"] = content
        for part, content in files.items():
            path = folder / part
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def version_folder(self, folder: Path) -> Path:
        """Return the version folder of the logits stage below `folder`, created if missing."""
        version = folder / self.folders.logits / "1"
        version.mkdir(parents=True, exist_ok=True)
        return version

    def metadata(self, *, family: str) -> dict[str, str]:
        """Return the metadata in the file of the logits stage."""
        return {
            "genserve.family": family,
            "genserve.precision": self.precision,
            "genserve.context_length": str(self.dimensions.context_length),
            "genserve.source": self.checkpoint.source,
        }

    def _files(self, *, max_num_seqs: int = MAX_NUM_SEQS) -> dict[str, str]:
        return stage_files(
            self.folders,
            dimensions=self.dimensions,
            cache=cache_dtype(self.kv_cache, self.precision),
            export_format=self.export_format,
            max_num_seqs=max_num_seqs,
            pipeline_stages=self.pipeline_stages,
        )


def stage_files(
    folders: ModelFolders,
    *,
    dimensions: Dimensions,
    cache: type[np.generic],
    export_format: ExportFormat = ExportFormat.ONNX,
    max_num_seqs: int = MAX_NUM_SEQS,
    pipeline_stages: int = 1,
) -> dict[str, str]:
    """Return the configs and model.py of all four stages, by their paths in the repository.

    `cache` is the type of the keys and values in the KV cache.
    """
    length = min(dimensions.context_length, _MAX_SEQUENCE_LENGTH)
    token_bytes = _token_bytes(dimensions, cache)
    parameters = {**{name: row.triton_type for name, row in TRITON_TENSORS.items()}, **_OTHER_PARAMETERS}
    values = {
        **_RUNTIMES[export_format],
        "ensemble": folders.ensemble,
        "tokenizer": folders.tokenizer,
        "logits": folders.logits,
        "decoder": folders.decoder,
        "max_num_seqs": max_num_seqs,
        "vocab_size": dimensions.vocab_size,
        "context_length": dimensions.context_length,
        "max_sequence_length": length,
        "token_kib": f"{token_bytes / 2**10:.4g}",
        "sequence_mib": f"{token_bytes * length / 2**20:.4g}",
        "speculation": _read("speculation.pbtxt") if export_format is ExportFormat.ONNX else "",
        "pipeline": Template(_read("pipeline.pbtxt")).substitute(
            stages=pipeline_stages, gpus=", ".join(map(str, range(pipeline_stages)))
        )
        if pipeline_stages > 1
        else "",
        "threads_of": "stage of a pipeline. Default: the cores, divided among the stages"
        if pipeline_stages > 1
        else "forward. Default: one per core",
        "states": _states(dimensions, cache=cache, export_format=export_format),
        "parameters": ",\n".join(
            f'  {{ name: "{name}" data_type: {data_type} dims: [ {size} ] optional: true }}'
            for name, (data_type, size) in parameters.items()
        ),
        "maps": "\n".join(f'      input_map {{ key: "{name}" value: "{name}" }}' for name in parameters),
    }

    def config(stage: str) -> str:
        return Template(_read(f"{stage}.pbtxt")).substitute(values)

    return {
        f"{folders.tokenizer}/config.pbtxt": config("tokenizer"),
        f"{folders.logits}/config.pbtxt": config("logits"),
        f"{folders.logits}/1/.gitkeep": "",
        f"{folders.decoder}/config.pbtxt": config("decoder"),
        f"{folders.decoder}/1/model.py": _read("decoder.py.txt"),
        f"{folders.ensemble}/config.pbtxt": config("ensemble"),
        f"{folders.ensemble}/1/.gitkeep": "",
    }


def _read(template: str) -> str:
    return (_TEMPLATES / template).read_text(encoding="utf-8")


def _token_bytes(dimensions: Dimensions, cache: type[np.generic]) -> int:
    """Return the bytes of a token in the KV cache; in int8, each head of its keys and values has a scale."""
    head_bytes = dimensions.head_dim * np.dtype(cache).itemsize + (4 if cache is np.int8 else 0)
    return 2 * dimensions.num_layers * dimensions.num_kv_heads * head_bytes


def _states(dimensions: Dimensions, *, cache: type[np.generic], export_format: ExportFormat) -> str:
    """Return the states of a sequence, in which -1 is the number of its tokens."""
    heads, head_dim = dimensions.num_kv_heads, dimensions.head_dim
    is_traced = export_format is ExportFormat.TRACED
    data_type = DataType.of_numpy(np.dtype(cache)).config_name
    dims = ", ".join(map(str, (heads, -1, head_dim) if is_traced else (-1, heads, head_dim)))
    in_place = "" if is_traced else " use_same_buffer_for_input_output: true"
    return ",\n".join(
        f'    {{ input_name: "past_key_values.{layer}.{part}" output_name: "present.{layer}.{part}" '
        f"data_type: {data_type} dims: [ {dims} ]{in_place} }}"
        for layer in range(dimensions.num_layers)
        for part in ("key", "value")
    )


def _batch_size(path: Path) -> int:
    """Return the batch size in a config; 0 if the config is missing or unreadable."""
    try:
        return read_model_config(path).max_batch_size
    except RepositoryError:
        return 0


def _signature(config: ModelConfig, *, state_types: bool) -> tuple[object, ...]:
    """Return what a config says of the graph: its backend, outputs, states and pipeline stages."""
    states = config.sequence_batching.states if config.sequence_batching else ()
    places = [(state.input_name, state.dims, state.same_buffer) for state in states]
    types = [state.data_type if state_types else "" for state in states]
    return config.backend, config.outputs, places, types, num_pipeline_stages(config)
