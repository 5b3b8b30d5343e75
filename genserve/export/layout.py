"""Layout: the contents of a model's folders except the weights: configs, model.py, the tokenizer's files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np

from genserve.config.model_config import ModelConfig
from genserve.config.parse import parse_model_config, read_model_config
from genserve.errors import ExportError, RepositoryError
from genserve.export.checkpoint import Checkpoint
from genserve.export.decoder import Dimensions
from genserve.export.export_options import CacheType, Form, Precision
from genserve.export.model_folders import Stages
from genserve.export.precision import cache_numbers
from genserve.tensor import DataType

__all__ = ["MAX_NUM_SEQS", "StageFolders", "stage_files"]


MAX_NUM_SEQS = 32  # that share a step
_MAX_SEQUENCE_LENGTH = 4096  # tokens; more than a chat needs, less than fills the memory

_DECODER_MODEL = '''\
"""Decoder stage: how the next token is picked from the logits. Edit it: it is yours.

`decode` is one coroutine per token sequence. All that wait at the same time share one forward of the model,
so a loop that looks like it runs alone is batched with everybody else's.
"""


class TritonPythonModel:
    async def decode(self, sequence):
        # `sample` follows the request (temperature, top_p, penalties ...), in one pass for all who wait.
        while not sequence.finished:
            sequence.append(await sequence.sample())

    # A rule of your own, here greedy:
    #
    #     while not sequence.finished:
    #         logits = await sequence.logits()   # [vocab] float32, a view, valid until the next await
    #         sequence.append(int(logits.argmax()))
'''

_TOKENIZER = """\
# Tokenizer stage: text in, token ids out, by the files of {tokenizer}/1.
name: "{tokenizer}"
backend: "tokenizer"
max_batch_size: {max_num_seqs}
input [ {{ name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }} ]
output [ {{ name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] }} ]
"""

_LOGITS = """\
# Logits stage: token ids in, the scores of the next token out, by {runtime}.
name: "{logits}"
backend: "{backend}"

# How many sequences share a step.
max_batch_size: {max_num_seqs}

input [
  {{ name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] }},
  {{ name: "attention_mask" data_type: TYPE_INT64 dims: [ -1 ] optional: true }}
]
output [ {{ name: "logits" data_type: TYPE_FP32 dims: [ -1, {vocab_size} ] }} ]

# The tokens of a sequence, prompt and answer together; the model can do {context_length}.
# A token takes {token_kib:.4g} KiB of KV cache, so many {sequence_mib:.4g} MiB.
parameters [ {{ key: "max_sequence_length" value: {{ string_value: "{max_sequence_length}" }} }} ]

# What the KV cache of all sequences may take; without it, half of the memory that is free at the load.
# parameters [ {{ key: "kv_cache_bytes" value: {{ string_value: "2GiB" }} }} ]

# A prompt that begins as another did takes over the blocks which that one left in the cache; "false": it does
# not.
# parameters [ {{ key: "prefix_cache" value: {{ string_value: "false" }} }} ]

{speculation}# Threads of one forward; without it, one for each core.
# parameters [ {{ key: "{threads}" value: {{ string_value: "2" }} }} ]

# A request comes back for each of its tokens, and may share every step with others: continuous batching.
# What it carries from step to step is its state: the KV cache, {cache}.
sequence_batching {{
  iterative_sequence: true
  oldest {{ max_candidate_sequences: {max_num_seqs} }}
  state [
{states}
  ]
}}
"""

_SPECULATION = """\
# Tokens that came after the same words before are drafted, and several looked at in one step: the same text,
# sooner where an answer repeats what is there; "none": they are not.
# parameters [ { key: "speculation" value: { string_value: "none" } } ]

"""

_STATE = """\
    {{ input_name: "past_key_values.{part}" output_name: "present.{part}" \
data_type: {data_type} dims: [ {dims} ]{in_place} }}"""

_IN_PLACE = " use_same_buffer_for_input_output: true"

_DECODER = """\
# Decoder stage: from logits to text, token by token; the loop is {decoder}/1/model.py.
name: "{decoder}"
backend: "python"
max_batch_size: {max_num_seqs}
model_transaction_policy {{ decoupled: true }}
input [
  {{ name: "logits" data_type: TYPE_FP32 dims: [ -1, -1 ] }},
{parameters}
]
output [ {{ name: "text_output" data_type: TYPE_STRING dims: [ 1 ] }} ]
"""

_ENSEMBLE = """\
# Text in, text out, as it is generated: tokenizer, then logits and decoder in turn until the answer ends.
name: "{ensemble}"
platform: "ensemble"
max_batch_size: {max_num_seqs}
model_transaction_policy {{ decoupled: true }}
input [
  {{ name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }},
{parameters}
]
output [ {{ name: "text_output" data_type: TYPE_STRING dims: [ 1 ] }} ]
ensemble_scheduling {{
  step [
    {{
      model_name: "{tokenizer}"
      model_version: -1
      input_map {{ key: "text_input" value: "text_input" }}
      output_map {{ key: "input_ids" value: "input_ids" }}
    }},
    {{
      model_name: "{logits}"
      model_version: -1
      input_map {{ key: "input_ids" value: "input_ids" }}
      output_map {{ key: "logits" value: "logits" }}
    }},
    {{
      model_name: "{decoder}"
      model_version: -1
      input_map {{ key: "logits" value: "logits" }}
{maps}
      output_map {{ key: "text_output" value: "text_output" }}
    }}
  ]
}}
"""

# What a request may say about decoding, by the tensor names of the established Triton LLM repositories.
_PARAMETERS = {
    "max_tokens": ("TYPE_INT32", 1),
    "temperature": ("TYPE_FP32", 1),
    "top_k": ("TYPE_INT32", 1),
    "top_p": ("TYPE_FP32", 1),
    "stop_words": ("TYPE_STRING", -1),
    "random_seed": ("TYPE_UINT64", 1),
    "repetition_penalty": ("TYPE_FP32", 1),
    "frequency_penalty": ("TYPE_FP32", 1),
    "presence_penalty": ("TYPE_FP32", 1),
    "min_tokens": ("TYPE_INT32", 1),
    "bad_words": ("TYPE_STRING", -1),
    "beam_width": ("TYPE_INT32", 1),
    "length_penalty": ("TYPE_FP32", 1),
    "early_stopping": ("TYPE_BOOL", 1),
    "guided_decoding_guide_type": ("TYPE_STRING", 1),
    "guided_decoding_guide": ("TYPE_STRING", 1),
    "stream": ("TYPE_BOOL", 1),
}


# How a form runs: what config.pbtxt calls its backend and threads, and what a person is told.
_RUNTIMES: Mapping[Form, Mapping[str, str]] = MappingProxyType(
    {
        Form.ONNX: {
            "backend": "onnxruntime",
            "runtime": "ONNX Runtime",
            "threads": "intra_op_thread_count",
            "cache": "blocks of tokens, written where they lie",
            "speculation": _SPECULATION,
        },
        Form.TORCHSCRIPT: {
            "backend": "pytorch",
            "runtime": "TorchScript",
            "threads": "INTRA_OP_THREAD_COUNT",
            "cache": "blocks of tokens, written where they lie",
            "speculation": "",
        },
        Form.TRACED: {
            "backend": "onnxruntime",
            "runtime": "ONNX Runtime",
            "threads": "intra_op_thread_count",
            "cache": "copied at each step, with one token more",
            "speculation": "",
        },
    }
)


def stage_files(
    stages: Stages,
    *,
    dimensions: Dimensions,
    cache: type[np.generic],
    form: Form = Form.ONNX,
    max_num_seqs: int = MAX_NUM_SEQS,
) -> dict[str, str]:
    """The files of all four stages but for tokenizer and weights: path in the repository to content.

    `cache` is the type of the keys and values in the KV cache.
    """
    length = min(dimensions.context_length, _MAX_SEQUENCE_LENGTH)
    token_bytes = _token_bytes(dimensions, cache)
    values = {
        **_RUNTIMES[form],
        "ensemble": stages.ensemble,
        "tokenizer": stages.tokenizer,
        "logits": stages.logits,
        "decoder": stages.decoder,
        "max_num_seqs": max_num_seqs,
        "vocab_size": dimensions.vocab_size,
        "context_length": dimensions.context_length,
        "max_sequence_length": length,
        "token_kib": token_bytes / 2**10,
        "sequence_mib": token_bytes * length / 2**20,
        "states": _states(dimensions, cache=cache, form=form),
        "parameters": ",\n".join(
            f'  {{ name: "{name}" data_type: {data_type} dims: [ {size} ] optional: true }}'
            for name, (data_type, size) in _PARAMETERS.items()
        ),
        "maps": "\n".join(f'      input_map {{ key: "{name}" value: "{name}" }}' for name in _PARAMETERS),
    }
    return {
        f"{stages.tokenizer}/config.pbtxt": _TOKENIZER.format_map(values),
        f"{stages.logits}/config.pbtxt": _LOGITS.format_map(values),
        f"{stages.logits}/1/.gitkeep": "",
        f"{stages.decoder}/config.pbtxt": _DECODER.format_map(values),
        f"{stages.decoder}/1/model.py": _DECODER_MODEL,
        f"{stages.ensemble}/config.pbtxt": _ENSEMBLE.format_map(values),
        f"{stages.ensemble}/1/.gitkeep": "",
    }


def _token_bytes(dimensions: Dimensions, cache: type[np.generic]) -> int:
    """How much of the cache a token takes; in int8, each head of its keys and values has a scale."""
    head_bytes = dimensions.head_dim * np.dtype(cache).itemsize + (4 if cache is np.int8 else 0)
    return 2 * dimensions.num_layers * dimensions.num_kv_heads * head_bytes


def _states(dimensions: Dimensions, *, cache: type[np.generic], form: Form) -> str:
    """What a sequence carries; -1 are its tokens."""
    heads, head_dim = dimensions.num_kv_heads, dimensions.head_dim
    dims = (heads, -1, head_dim) if form is Form.TRACED else (-1, heads, head_dim)
    return ",\n".join(
        _STATE.format(
            part=f"{i}.{part}",
            data_type=DataType.of_numpy(np.dtype(cache)).config_name,
            dims=", ".join(map(str, dims)),
            in_place="" if form is Form.TRACED else _IN_PLACE,
        )
        for i in range(dimensions.num_layers)
        for part in ("key", "value")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFolders:
    """The folders of one export."""

    stages: Stages
    form: Form
    precision: Precision
    checkpoint: Checkpoint
    dimensions: Dimensions
    kv_cache: CacheType = "float"

    def require_agreeing_config(self, repository: Path, *, beside: bool = False) -> None:
        """Refuse a config.pbtxt of the logits stage that stays there and tells of another model.

        Its batch size, threads and all else are free; for a graph `beside` its own, so is the type of its KV
        cache.
        """
        part = f"{self.stages.logits}/config.pbtxt"
        path = repository / part
        if not path.exists():
            return
        found = read_model_config(path)
        made = parse_model_config(self._files()[part], source=path)
        if _signature(found, state_types=not beside) != _signature(made, state_types=not beside):
            raise ExportError(
                f"{path} declares another backend, or other outputs or states, than "
                f"{self.checkpoint.source} in {self.precision} as {self.form.words}",
                remedy=f"{'' if beside else '--overwrite writes a new one; or '}export under another --name",
            )

    def write(self, folder: Path, *, repository: Path) -> None:
        """Write everything but the weights: configs, model.py, and the tokenizer's files.

        The batch size is that of the ensemble in the repository: its config stays, and may have been tuned.
        """
        max_num_seqs = _batch_size(repository / self.stages.ensemble / "config.pbtxt") or MAX_NUM_SEQS
        files = {part: content.encode() for part, content in self._files(max_num_seqs=max_num_seqs).items()}
        for name, content in self.checkpoint.tokenizer_files.items():
            files[f"{self.stages.tokenizer}/1/{name}"] = content
        for part, content in files.items():
            path = folder / part
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def metadata(self, *, family: str) -> dict[str, str]:
        """What the logits stage's file says of itself."""
        return {
            "genserve.family": family,
            "genserve.precision": self.precision,
            "genserve.context_length": str(self.dimensions.context_length),
            "genserve.source": self.checkpoint.source,
        }

    def _files(self, *, max_num_seqs: int = MAX_NUM_SEQS) -> dict[str, str]:
        return stage_files(
            self.stages,
            dimensions=self.dimensions,
            cache=cache_numbers(self.kv_cache, self.precision),
            form=self.form,
            max_num_seqs=max_num_seqs,
        )


def _batch_size(path: Path) -> int:
    """What a config says, if it is there and can be read; else 0."""
    try:
        return read_model_config(path).max_batch_size
    except RepositoryError:
        return 0


def _signature(config: ModelConfig, *, state_types: bool) -> tuple[object, ...]:
    """What a config says of its graph: the backend, the outputs and the states."""
    states = config.sequence_batching.states if config.sequence_batching else ()
    places = [(state.input_name, state.dims, state.same_buffer) for state in states]
    types = [state.data_type if state_types else "" for state in states]
    return config.backend, config.outputs, places, types
