"""Encoder export: converts a checkpoint into a model of vectors or scores of texts.

BERT and its kin, decoders that were trained for vectors such as EmbeddingGemma and Qwen3-Embedding, and with
a `pooling` any model that generates text. The graph is traced from the code of transformers.
"""

from __future__ import annotations

import json
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from string import Template

import numpy as np
import torch

from genserve.backends.encoder import normalized, pool
from genserve.backends.onnx_session import CPU_PROVIDER, open_session
from genserve.errors import ExportError
from genserve.export.encoders.encoder_graph import write_graph
from genserve.export.encoders.encoder_source import Encoder, EncoderModule, read_encoder
from genserve.export.export_options import EncoderReport, Pooling, Precision, Progress
from genserve.export.model_folders import EncoderFolders, install_encoder, writing_into
from genserve.export.source_model import export_errors, without_warnings
from genserve.files import staging_folder
from genserve.sampling.logits_array import FloatArray
from genserve.text.tokenizer import Tokenizer
from genserve.textmodel.logits_config import PARITY_FILE

_TEMPLATES = Path(__file__).parents[1] / "templates"
_TEXTS = Path(__file__).parents[1] / "texts"
_BATCH = 32
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_NUM_TEXTS = 16  # that are compared with the source
_MAX_TOKENS = 512  # of each of them


@dataclass(frozen=True, slots=True, kw_only=True)
class _Distance:
    """How far a graph is from its source; vectors are compared as vectors of length 1, scores as they are."""

    largest_difference: float  # of one number
    lowest_cosine: float  # of two vectors of one text; 1 for scores
    correlation: float  # Pearson's, of the cosines of all pairs of texts, or of all scores


# The largest difference and the lowest cosine, by precision. The correlation says nothing of random weights,
# whose vectors are nearly equal.
_BOUNDS = {"fp32": (1e-5, 0.99999), "int8": (0.25, 0.99)}


def export_encoder(
    folder: Path,
    *,
    repository: Path,
    name: str,
    precision: Precision | None = None,
    pooling: Pooling | None = None,
    max_sequence_length: int | None = None,
    overwrite: bool = False,
    progress: Progress,
) -> EncoderReport:
    """Convert an encoder into the ensemble `name`, its tokenizer and its graph; compare it with its source.

    Args:
        folder: a Hugging Face folder with config.json, tokenizer.json and safetensors.
        repository: the model repository; created if missing.
        name: the name that the model gets in the repository.
        precision: fp32 or int8; None: fp32.
        pooling: how the hidden states become a vector; None: as the files of sentence-transformers say, by
            default the mean of the tokens.
        max_sequence_length: the most tokens of a text; None: what the checkpoint says, up to 8,192.
        overwrite: replace an existing model of this name.
        progress: displays the tasks of the export.

    Raises:
        ExportError: the model exists, cannot be converted, or is too far from its source.
    """
    started_s = time.perf_counter()
    precision = precision or "fp32"
    if precision not in _BOUNDS:
        raise ExportError(
            f"an encoder cannot be exported in {precision}", remedy="write --precision fp32 or int8"
        )
    folders = EncoderFolders(name)
    # A text model of this name has the ensemble and the tokenizer, too.
    if any((repository / part).exists() for part in folders.all) and not overwrite:
        raise ExportError(
            f"a model {name!r} or a part of it already exists in {repository}",
            remedy="--overwrite replaces them; or export under another --name",
        )
    if not (folder / "tokenizer.json").exists():
        raise ExportError(
            f"{folder} has no tokenizer.json",
            remedy="write it with AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
        )
    with progress.task("reading the checkpoint"), _conversion_errors(folder):
        encoder, module = read_encoder(folder, pooling=pooling, max_length=max_sequence_length)
    with writing_into(repository), staging_folder(repository, name) as staged:
        version = _write_files(staged, folders, folder, encoder)
        with progress.task(f"converting to {precision}"), _conversion_errors(folder), without_warnings():
            write_graph(version, module, encoder, precision=precision, source=folder.name)
        with progress.task("comparing with the source"):
            distance = _distance(staged, folders, module, encoder)
        _require_near(distance, source=folder.name, precision=precision)
        report = EncoderReport(
            name=name,
            precision=precision,
            seconds=time.perf_counter() - started_s,
            largest_difference=distance.largest_difference,
            lowest_cosine=distance.lowest_cosine,
            correlation=distance.correlation,
            size_bytes=sum(path.stat().st_size for path in version.glob("model.onnx*")),
            path=repository / name,
        )
        parity = {key: value for key, value in asdict(report).items() if key not in ("seconds", "path")}
        (version / PARITY_FILE).write_text(json.dumps(parity, indent=2) + "\n", encoding="utf-8")
        install_encoder(staged, repository, folders)
    return report


def _require_near(found: _Distance, *, source: str, precision: Precision) -> None:
    largest_difference, lowest_cosine = _BOUNDS[precision]
    if found.largest_difference > largest_difference or found.lowest_cosine < lowest_cosine:
        raise ExportError(
            f"the {precision} graph of {source} is too far from its source: largest difference "
            f"{found.largest_difference:.3g}, lowest cosine {found.lowest_cosine:.5f}",
            remedy="nothing was installed; try --precision fp32, and report a failure of fp32",
        )


def _write_files(staged: Path, folders: EncoderFolders, source: Path, encoder: Encoder) -> Path:
    """Write the configs and the tokenizer; return the folder for the graph."""
    kind = "reranker" if encoder.is_classifier else "embedding"
    values = {
        "name": folders.ensemble,
        "tokenizer": folders.tokenizer,
        "encoder": folders.encoder,
        "batch": _BATCH,
        "max_length": encoder.max_length,
        "pooling": encoder.pooling,
        "normalize": str(encoder.normalizes).lower(),
        "size": encoder.size,
        "types_output": ', { name: "token_type_ids" data_type: TYPE_INT64 dims: [ -1 ] }'
        if "token_type_ids" in encoder.inputs
        else "",
        "types_made": '\n      output_map { key: "token_type_ids" value: "token_type_ids" }'
        if "token_type_ids" in encoder.inputs
        else "",
        "types_taken": '\n      input_map { key: "token_type_ids" value: "token_type_ids" }'
        if "token_type_ids" in encoder.inputs
        else "",
        "pair_input": ', { name: "text_pair" data_type: TYPE_STRING dims: [ 1 ] }'
        if encoder.is_classifier
        else "",
        "pair_taken": '\n      input_map { key: "text_pair" value: "text_pair" }'
        if encoder.is_classifier
        else "",
        "graph_output": encoder.output,
        "output": "scores" if encoder.is_classifier else "embedding",
        "sigmoid": '\nparameters { key: "sigmoid" value { string_value: "true" } }'
        if encoder.sigmoid
        else "",
        "kind": kind,
        "prompts": _parameters(encoder),
    }
    for part in ("tokenizer", "encoder", "ensemble"):
        model = staged / getattr(folders, part)
        (model / "1").mkdir(parents=True)
        text = (_TEMPLATES / f"encoder_{part}.pbtxt").read_text(encoding="utf-8")
        (model / "config.pbtxt").write_text(Template(text).substitute(values), encoding="utf-8")
    (staged / folders.ensemble / "1" / ".gitkeep").touch()
    for name in _TOKENIZER_FILES:
        if (source / name).exists():
            (staged / folders.tokenizer / "1" / name).write_bytes((source / name).read_bytes())
    return staged / folders.encoder / "1"


def _parameters(encoder: Encoder) -> str:
    """Return the parameters of the tokenizer that hold prompts."""
    values = {}
    if encoder.prompts:
        values["prompts"] = json.dumps(dict(encoder.prompts), ensure_ascii=False)
    if encoder.default_prompt_name:
        values["default_prompt_name"] = encoder.default_prompt_name
    return "".join(
        f'\nparameters {{ key: "{key}" value {{ string_value: {json.dumps(text, ensure_ascii=False)} }} }}'
        for key, text in values.items()
    )


def _distance(staged: Path, folders: EncoderFolders, module: EncoderModule, encoder: Encoder) -> _Distance:
    tokenizer = Tokenizer.from_folder(staged / folders.tokenizer / "1")
    session = open_session(
        staged / folders.encoder / "1" / "model.onnx", parameters={}, graph_level=0, providers=[CPU_PROVIDER]
    )
    words = (_TEXTS / "held_out.txt").read_text(encoding="utf-8").split()
    size = len(words) // _NUM_TEXTS
    pairs: list[tuple[FloatArray, FloatArray]] = []  # the source's and the graph's, for each text
    for index in range(_NUM_TEXTS):
        text = " ".join(words[index * size : (index + 1) * size : 1 + index % 3])
        texts = [(text, " ".join(words[:9]))] if encoder.is_classifier else [(text,)]
        [row] = tokenizer.encode_texts(texts, max_length=min(encoder.max_length, _MAX_TOKENS), truncate=True)
        mask = [1] * len(row.ids)
        values = {"input_ids": [row.ids], "attention_mask": [mask], "token_type_ids": [row.type_ids]}
        arrays = {name: np.array(values[name]) for name in encoder.inputs}
        with torch.inference_mode():
            expected = module(*map(torch.from_numpy, arrays.values())).numpy()
        [found] = session.run([encoder.output], arrays)
        pairs.append((_comparable(expected, encoder)[0], _comparable(found, encoder)[0]))
    one, other = (np.stack(rows) for rows in zip(*pairs, strict=True))
    if encoder.is_classifier:
        cosines, compared = np.ones(1), (one.ravel(), other.ravel())
    else:
        above = np.triu_indices(_NUM_TEXTS, 1)
        cosines, compared = np.vecdot(one, other), ((one @ one.T)[above], (other @ other.T)[above])
    return _Distance(
        largest_difference=float(np.abs(one - other).max()),
        lowest_cosine=float(cosines.min()),
        correlation=float(np.corrcoef(*compared)[0, 1]),
    )


def _comparable(output: FloatArray, encoder: Encoder) -> FloatArray:
    if encoder.is_classifier:
        return output
    vectors = output if output.ndim == 2 else pool(output, np.ones(output.shape[:2]), encoder.pooling)
    return normalized(vectors)


def _conversion_errors(folder: Path) -> AbstractContextManager[None]:
    return export_errors(
        f"the encoder {folder.name} cannot be converted",
        remedy="export a checkpoint in safetensors of an architecture that transformers has",
    )
