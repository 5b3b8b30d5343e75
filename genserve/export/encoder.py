"""Encoder export: BERT and its kin, which make vectors of texts or scores of pairs of texts.

The graph is traced from the code of transformers, in fp32.
"""

from __future__ import annotations

import json
import logging
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from string import Template
from textwrap import shorten
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from genserve.backends.encoder import normalized, pool
from genserve.backends.onnx_session import CPU_PROVIDER, open_session
from genserve.errors import ExportError
from genserve.export.export_options import EncoderReport, Precision, Progress
from genserve.export.model_folders import EncoderFolders, install_encoder, writing_into
from genserve.files import staging_folder
from genserve.sampling.logits_array import FloatArray
from genserve.text.tokenizer import Tokenizer
from genserve.textmodel.logits_config import PARITY_FILE

_TEMPLATES = Path(__file__).parent / "templates"
_TEXTS = Path(__file__).parent / "texts"
_BATCH = 32
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_NUM_TEXTS = 16     # that are compared with the source
_LARGEST_DIFFERENCE = 1e-5  # from the source: of one number of a vector of length 1, or of a score


@dataclass(frozen=True, slots=True, kw_only=True)
class _Encoder:
    """What an encoder's checkpoint says about its use."""

    inputs: tuple[str, ...]     # of the graph, in order
    output: str                 # "last_hidden_state" or "logits"
    size: int                   # numbers of a vector, or of the scores of a pair
    pooling: str
    normalizes: bool
    sigmoid: bool               # whether a score is mapped to a number from 0 to 1
    max_length: int

    @property
    def is_classifier(self) -> bool:
        """Whether it reads pairs of texts, and computes scores."""
        return self.output == "logits"


def export_encoder(
    folder: Path,
    *,
    repository: Path,
    name: str,
    precision: Precision | None = None,
    overwrite: bool = False,
    progress: Progress,
) -> EncoderReport:
    """Convert an encoder into the ensemble `name`, its tokenizer and its graph; compare it with its source.

    Args:
        folder: a Hugging Face folder with config.json, tokenizer.json and safetensors; the files of
            sentence-transformers say how vectors are pooled, the mean of the tokens by default.
        repository: the model repository; created if missing.
        name: the name that the model gets in the repository.
        precision: fp32; None: the same.
        overwrite: replace an existing model of this name.
        progress: displays the tasks of the export.

    Raises:
        ExportError: the model exists, cannot be converted, or is too far from its source.
    """
    started_s = time.perf_counter()
    if precision not in (None, "fp32"):
        raise ExportError(f"an encoder cannot be exported in {precision}", remedy="write --precision fp32")
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
    with progress.task("reading the checkpoint"), _as_export_error(folder):
        encoder, model = _read(folder)
    with writing_into(repository), staging_folder(repository, name) as staged:
        version = _write_files(staged, folders, folder, encoder)
        with progress.task("converting to fp32"), _as_export_error(folder), _quiet():
            _write_graph(version, model, encoder, source=folder.name)
        with progress.task("comparing with the source"):
            difference, angle = _distance(staged, folders, model, encoder)
        if difference > _LARGEST_DIFFERENCE:
            raise ExportError(
                f"the graph of {folder.name} is too far from its source: largest difference {difference:.3g}",
                remedy="nothing was installed; report it, with the name of the checkpoint",
            )
        report = EncoderReport(
            name=name,
            precision="fp32",
            seconds=time.perf_counter() - started_s,
            largest_difference=difference,
            lowest_cosine=1 - angle,
            size_bytes=sum(path.stat().st_size for path in version.glob("model.onnx*")),
            path=repository / name,
        )
        parity = {key: value for key, value in asdict(report).items() if key not in ("seconds", "path")}
        (version / PARITY_FILE).write_text(json.dumps(parity, indent=2) + "\n", encoding="utf-8")
        install_encoder(staged, repository, folders)
    return report


def _read(folder: Path) -> tuple[_Encoder, nn.Module]:
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    architecture = (config.architectures or [""])[0]
    is_classifier = architecture.endswith("ForSequenceClassification")
    kind = AutoModelForSequenceClassification if is_classifier else AutoModel
    model = kind.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=False,
    ).eval()
    config.use_cache = model.config.use_cache = False
    inputs = ["input_ids", "attention_mask"]
    # The tokenizers of the other types tell no segments apart, though some of their configs have two.
    if config.model_type == "bert" and config.type_vocab_size > 1:
        inputs.append("token_type_ids")
    modules = [Path(module["type"].replace(".", "/")).name for module in _json(folder / "modules.json", [])]
    unknown = [module for module in modules if module not in ("Transformer", "Pooling", "Normalize")]
    if unknown:
        raise ExportError(
            f"{folder.name} has the module {unknown[0]} behind its pooling, which is not supported",
            remedy="export a model that consists of Transformer, Pooling and Normalize",
        )
    encoder = _Encoder(
        inputs=tuple(inputs),
        output="logits" if is_classifier else "last_hidden_state",
        size=config.num_labels if is_classifier else config.hidden_size,
        pooling="none" if is_classifier else _pooling(folder),
        normalizes="Normalize" in modules,
        sigmoid=is_classifier and config.num_labels == 1 and not _is_identity(config),
        max_length=_max_length(folder, config),
    )
    return encoder, model


def _pooling(folder: Path) -> str:
    found = _json(folder / "1_Pooling" / "config.json", {})
    modes = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
    wanted = [found["pooling_mode"]] if isinstance(found.get("pooling_mode"), str) else [
        name.removeprefix("pooling_mode_").removesuffix("_token").removesuffix("_tokens")
        for name, value in found.items()
        if name.startswith("pooling_mode_") and value
    ]
    if len(wanted) > 1 or not modes.keys() >= set(wanted):
        raise ExportError(
            f"{folder.name} pools by {', '.join(wanted)}, which is not supported",
            remedy=f"known: {', '.join(modes)}",
        )
    return modes[wanted[0]] if wanted else "mean"


def _is_identity(config: Any) -> bool:
    """Whether the config of a cross-encoder says, in sentence-transformers' field, that logits are scores."""
    stated = getattr(config, "sentence_transformers", None) or {}
    activation = stated.get("activation_fn") or getattr(config, "sbert_ce_default_activation_function", None)
    return str(activation).endswith("Identity")


def _max_length(folder: Path, config: Any) -> int:
    """Return the tokens that the model reads: by sentence-transformers' file, else by its positions."""
    stated = _json(folder / "sentence_bert_config.json", {}).get("max_seq_length")
    positions: int = config.max_position_embeddings
    if config.model_type in ("roberta", "xlm-roberta", "camembert", "mpnet"):
        positions -= (config.pad_token_id or 0) + 1     # which count from behind the padding's
    return min(stated or positions, positions)


def _json(file: Path, default: Any) -> Any:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else default


def _write_files(staged: Path, folders: EncoderFolders, source: Path, encoder: _Encoder) -> Path:
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
        if "token_type_ids" in encoder.inputs else "",
        "types_made": '\n      output_map { key: "token_type_ids" value: "token_type_ids" }'
        if "token_type_ids" in encoder.inputs else "",
        "types_taken": '\n      input_map { key: "token_type_ids" value: "token_type_ids" }'
        if "token_type_ids" in encoder.inputs else "",
        "pair_input": ', { name: "text_pair" data_type: TYPE_STRING dims: [ 1 ] }'
        if encoder.is_classifier else "",
        "pair_taken": '\n      input_map { key: "text_pair" value: "text_pair" }'
        if encoder.is_classifier else "",
        "graph_output": encoder.output,
        "output": "scores" if encoder.is_classifier else "embedding",
        "sigmoid": '\nparameters { key: "sigmoid" value { string_value: "true" } }'
        if encoder.sigmoid else "",
        "kind": kind,
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


class _Traced(nn.Module):
    """A model of transformers with one output."""

    def __init__(self, model: nn.Module, encoder: _Encoder) -> None:
        super().__init__()
        self.model, self.encoder = model, encoder

    def forward(self, *inputs: Tensor) -> Tensor:
        output = self.model(**dict(zip(self.encoder.inputs, inputs, strict=True)))
        result: Tensor = getattr(output, self.encoder.output)
        return result


def _write_graph(version: Path, model: nn.Module, encoder: _Encoder, *, source: str) -> None:
    example = torch.tensor([[2, 3, 4, 5, 6, 7, 8], [3, 4, 5, 6, 7, 8, 9]])
    values = {"input_ids": example, "attention_mask": torch.ones_like(example)}
    any_size = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    program = torch.onnx.export(
        _Traced(model, encoder).eval(),
        tuple(values.get(name, torch.zeros_like(example)) for name in encoder.inputs),
        dynamo=True,
        input_names=list(encoder.inputs),
        output_names=[encoder.output],
        dynamic_shapes=(tuple(any_size for _ in encoder.inputs),),
        verbose=False,
    )
    assert program is not None
    path = version / "model.onnx"
    program.save(str(path), external_data=True)
    graph = onnx.load(path)
    helper.set_model_props(graph, {"genserve.precision": "fp32", "genserve.source": source})
    for file in version.glob("model.onnx*"):
        file.unlink()
    onnx.save(graph, path, save_as_external_data=True, location="model.onnx.data")


def _distance(
    staged: Path, folders: EncoderFolders, model: nn.Module, encoder: _Encoder
) -> tuple[float, float]:
    """Return the largest difference of a number from the source's, and the largest one minus the cosine.

    Vectors are compared as vectors of length 1; scores as they are.
    """
    tokenizer = Tokenizer.from_folder(staged / folders.tokenizer / "1")
    session = open_session(
        staged / folders.encoder / "1" / "model.onnx", parameters={}, graph_level=0, providers=[CPU_PROVIDER]
    )
    words = (_TEXTS / "held_out.txt").read_text(encoding="utf-8").split()
    size = len(words) // _NUM_TEXTS
    differences, angles = [], []
    for index in range(_NUM_TEXTS):
        text = " ".join(words[index * size : (index + 1) * size : 1 + index % 3])
        texts = [(text, " ".join(words[:9]))] if encoder.is_classifier else [(text,)]
        [row] = tokenizer.encode_texts(texts, max_length=encoder.max_length, truncate=True)
        mask = [1] * len(row.ids)
        values = {"input_ids": [row.ids], "attention_mask": [mask], "token_type_ids": [row.type_ids]}
        arrays = {name: np.array(values[name]) for name in encoder.inputs}
        with torch.inference_mode():
            expected = _Traced(model, encoder)(*map(torch.from_numpy, arrays.values())).numpy()
        [found] = session.run([encoder.output], arrays)
        one, other = (_comparable(array, encoder) for array in (expected, found))
        differences.append(float(np.abs(one - other).max()))
        angles.append(0.0 if encoder.is_classifier else float(1 - np.vecdot(one, other).min()))
    return max(differences), max(angles)


def _comparable(output: FloatArray, encoder: _Encoder) -> FloatArray:
    if encoder.is_classifier:
        return output
    return normalized(pool(output, np.ones(output.shape[:2]), encoder.pooling))


@contextmanager
def _as_export_error(folder: Path) -> Iterator[None]:
    """Turn any exception of transformers or torch into an ExportError."""
    try:
        yield
    except ExportError:
        raise
    except Exception as error:
        reason = shorten(str(error.__cause__ or error), width=300) or type(error).__name__
        raise ExportError(
            f"the encoder {folder.name} cannot be converted: {reason}",
            remedy="export a checkpoint of BERT, RoBERTa, XLM-R, MPNet or ModernBERT in safetensors",
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warnings of torch and transformers, which are meant for authors of models."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
