"""Layout: writes the files of a model except the weights: configs, model.py and the tokenizer's files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template
from types import MappingProxyType
from typing import Self

import numpy as np

from genserve.config.model_config import ModelConfig
from genserve.config.parse import parse_config, read_config_file
from genserve.errors import ExportError, RepositoryError
from genserve.export.checkpoints.checkpoint import Checkpoint
from genserve.export.decoder import Cache, Dimensions
from genserve.export.export_options import CacheType, ExportFormat, Precision
from genserve.export.model_folders import ModelFolders
from genserve.export.quantization import cache_dtype
from genserve.repository.model_validation import valid_config
from genserve.sampling.sampling_params import TRITON_TENSORS
from genserve.tensor import DataType
from genserve.textmodel.logits_config import num_pipeline_stages

MAX_NUM_SEQS = 32               # sequences that share a step

_TEMPLATES = Path(__file__).parent / "templates"

# A request's inputs that are no sampling parameters, with data type and number of elements.
_OTHER_PARAMETERS: Mapping[str, tuple[str, int]] = MappingProxyType(
    {
        "guided_decoding_guide_type": ("TYPE_STRING", 1),
        "guided_decoding_guide": ("TYPE_STRING", 1),
        "stream": ("TYPE_BOOL", 1),
    }
)

# The config of the logits stage has these lines for each format.
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
    max_sequence_length: int | None = None      # tokens; None: the model's own context

    def limited(self, max_sequence_length: int | None) -> Self:
        """Return the layout of a model whose config allows sequences of so many tokens; None: any.

        Raises:
            ExportError: the model's own context is shorter.
        """
        own = self.dimensions.context_length
        if max_sequence_length is not None and max_sequence_length > own:
            raise ExportError(
                f"--max-sequence-length is {max_sequence_length}; the context of {self.checkpoint.source} is "
                f"{own} tokens",
                remedy=f"give at most {own}, or leave it out",
            )
        return replace(self, max_sequence_length=max_sequence_length)

    def require_agreeing_config(self, repository: Path, *, beside: bool = False) -> None:
        """Reject an existing config.pbtxt of the logits stage that describes another model.

        Only backend, outputs, states and the number of pipeline stages must agree. For a graph `beside` the
        model's own, the type of the KV cache may differ.

        Raises:
            ExportError: the existing config does not agree.
        """
        part = f"{self.folders.logits}/config.pbtxt"
        path = repository / part
        if not path.exists():
            return
        found = valid_config(read_config_file(path))
        made = valid_config(parse_config(self._files()[part], path=path))
        if _signature(found, state_types=not beside) != _signature(made, state_types=not beside):
            raise ExportError(
                f"{path} declares another backend, or other outputs, states or pipeline stages, than "
                f"{self.checkpoint.source} in {self.precision} as {self.export_format.label}",
                remedy=f"{'' if beside else '--overwrite writes a new one; or '}export under another --name",
            )

    def write(self, folder: Path, *, repository: Path) -> None:
        """Write all files except the weights: configs, model.py, and the tokenizer's files.

        The batch size is the same as in the existing config of the ensemble, which may have been tuned.
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
            max_sequence_length=self.max_sequence_length,
        )


def stage_files(
    folders: ModelFolders,
    *,
    dimensions: Dimensions,
    cache: type[np.generic],
    export_format: ExportFormat = ExportFormat.ONNX,
    max_num_seqs: int = MAX_NUM_SEQS,
    pipeline_stages: int = 1,
    max_sequence_length: int | None = None,
) -> dict[str, str]:
    """Return the configs and model.py of the ensemble and its stages, by their paths in the repository.

    Args:
        folders: the names of the models.
        dimensions: the sizes of the logits stage.
        cache: the type of the keys and values in the KV cache.
        export_format: how the logits stage is written.
        max_num_seqs: sequences that share a step.
        pipeline_stages: into how many graphs the layers are cut.
        max_sequence_length: the most tokens of a sequence; None: the model's own context.
    """
    length = max_sequence_length or dimensions.context_length
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
    """Return the bytes of a token in the KV cache; an int8 cache has scales for each head."""
    scale_bytes = 4 if cache is np.int8 else 0
    return sum(
        2 * each.num_kv_heads * (each.head_dim * np.dtype(cache).itemsize + scale_bytes)
        for each in dimensions.caches
    )


def _states(dimensions: Dimensions, *, cache: type[np.generic], export_format: ExportFormat) -> str:
    """Return the states of a sequence, in which -1 is the number of its tokens."""
    is_traced = export_format is ExportFormat.TRACED
    data_type = DataType.of_numpy(np.dtype(cache)).config_name

    def dims(of: Cache) -> str:
        sizes = (of.num_kv_heads, -1, of.head_dim) if is_traced else (-1, of.num_kv_heads, of.head_dim)
        return ", ".join(map(str, sizes))

    in_place = "" if is_traced else " use_same_buffer_for_input_output: true"
    states = [
        (f"past_key_values.{of.layer}.{part}", f"present.{of.layer}.{part}", data_type, dims(of))
        for of in dimensions.caches
        for part in ("key", "value")
    ]
    states += [
        (f"past_states.{place}", f"present_states.{place}", "TYPE_FP32", ", ".join(map(str, sizes)))
        for layer, part, sizes in dimensions.states
        for place in [f"{layer}.{part}"]
    ]
    return ",\n".join(
        f'    {{ input_name: "{past}" output_name: "{present}" '
        f"data_type: {kind} dims: [ {sizes} ]{in_place} }}"
        for past, present, kind, sizes in states
    )


def _batch_size(path: Path) -> int:
    """Return the batch size in a config; 0 if the config is missing or unreadable."""
    try:
        return valid_config(read_config_file(path)).max_batch_size
    except RepositoryError:
        return 0


def _signature(config: ModelConfig, *, state_types: bool) -> tuple[object, ...]:
    """Return what a config says about the graph: backend, outputs, states and pipeline stages."""
    states = config.sequence_batching.states if config.sequence_batching else ()
    places = [(state.input_name, state.dims, state.same_buffer) for state in states]
    types = [state.data_type if state_types else "" for state in states]
    return config.backend, config.outputs, places, types, num_pipeline_stages(config)
