"""Encoder source: reads a checkpoint that makes vectors or scores of texts, and what its files say of it.

These are the files of sentence-transformers: how vectors are pooled, which layers follow, and prompts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from genserve.errors import ExportError
from genserve.export.export_options import ENCODER_TYPES

# The most tokens of a text where the checkpoint allows more: attention takes the square of them in memory.
_LONGEST_TEXT = 8192
_MODES = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_ACTIVATIONS = {"Identity": nn.Identity, "Tanh": nn.Tanh, "ReLU": nn.ReLU, "GELU": nn.GELU}


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """What an encoder's checkpoint says about its use.

    Attributes:
        inputs: the inputs of the graph, in order.
        output: "last_hidden_state", "logits", or "sentence_embedding" if the graph pools.
        size: the numbers of a vector, or of the scores of a pair.
        pooling: how the output becomes a vector; "none": it is one.
        normalizes: whether vectors get the length 1.
        sigmoid: whether a score is mapped to a number from 0 to 1.
        max_length: the most tokens of a text.
        prompts: the tokenizer stage writes one before a text, by the use of its vector.
        default_prompt_name: the prompt of requests that name none.
    """

    inputs: tuple[str, ...]
    output: str
    size: int
    pooling: str
    normalizes: bool
    sigmoid: bool
    max_length: int
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None

    @property
    def is_classifier(self) -> bool:
        """Whether it reads pairs of texts, and computes scores."""
        return self.output == "logits"


class EncoderModule(nn.Module):
    """A model of transformers with one output; it pools where layers follow the pooling."""

    def __init__(
        self, model: nn.Module, encoder: Encoder, *, pooling: str, dense: Sequence[nn.Module]
    ) -> None:
        super().__init__()
        self.model, self.inputs, self.output = model, encoder.inputs, encoder.output
        self.pooling, self.dense = pooling, nn.Sequential(*dense)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the output for ids and masks [rows, tokens], in the order of `Encoder.inputs`."""
        by_name = dict(zip(self.inputs, inputs, strict=True))
        output = self.model(**by_name)
        if self.output != "sentence_embedding":
            result: Tensor = getattr(output, self.output)
            return result
        pooled = _pooled(output.last_hidden_state, by_name["attention_mask"], self.pooling)
        vectors: Tensor = self.dense(pooled)
        return vectors


def _pooled(hidden: Tensor, mask: Tensor, pooling: str) -> Tensor:
    if pooling == "cls":
        return hidden[:, 0]
    weights = mask.to(hidden.dtype)
    if pooling == "last":  # the token at which the count of tokens becomes complete
        counts = weights.cumsum(dim=1)
        weights = weights * (counts == counts[:, -1:])
    return (hidden * weights[:, :, None]).sum(dim=1) / weights.sum(dim=1, keepdim=True).clamp(min=1e-9)


def read_encoder(
    folder: Path, *, pooling: str | None = None, max_length: int | None = None
) -> tuple[Encoder, EncoderModule]:
    """Read a checkpoint in safetensors.

    Args:
        folder: a Hugging Face folder, also of a model that generates text.
        pooling: "mean", "cls" or "last"; None: what the files of sentence-transformers say, or the mean.
        max_length: the most tokens of a text; None: what the files say.

    Raises:
        ExportError: it has parts that are not supported. Transformers raises any exception.
    """
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    architecture = (config.architectures or [""])[0]
    is_classifier = architecture.endswith("ForSequenceClassification")
    if is_classifier and config.model_type not in ENCODER_TYPES:
        raise ExportError(
            f"{folder.name} has the architecture {architecture}, which is not supported",
            remedy=f"export a classifier of one of {', '.join(sorted(ENCODER_TYPES))}",
        )
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
    modules = _modules(folder)
    dense = [_dense(folder / path) for kind, path in modules if kind == "Dense"]
    size: int = config.num_labels if is_classifier else config.hidden_size
    if dense:
        size = dense[-1].out_features
    pooling = "none" if is_classifier else pooling or _pooling(folder)
    prompts = _json(folder / "config_sentence_transformers.json", {})
    encoder = Encoder(
        inputs=tuple(inputs),
        output="logits" if is_classifier else "sentence_embedding" if dense else "last_hidden_state",
        size=size,
        pooling="none" if dense else pooling,
        normalizes="Normalize" in dict(modules),
        sigmoid=is_classifier and config.num_labels == 1 and not _is_identity(config),
        max_length=_max_length(folder, config, wanted=max_length),
        prompts=prompts.get("prompts") or {},
        default_prompt_name=prompts.get("default_prompt_name"),
    )
    return encoder, EncoderModule(model, encoder, pooling=pooling, dense=dense).eval()


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Return the modules of sentence-transformers, in order, each with its folder; raises ExportError."""
    found = [
        (module["type"].rpartition(".")[2], module.get("path", ""))
        for module in _json(folder / "modules.json", [])
    ]
    known = ["Transformer", "Pooling", *("Dense" for kind, _ in found if kind == "Dense"), "Normalize"]
    kinds = [kind for kind, _ in found]
    if kinds and kinds not in (known, known[:-1], known[:1]):
        unknown = next((kind for kind in kinds if kind not in known), kinds[-1])
        raise ExportError(
            f"{folder.name} consists of {', '.join(kinds)}; {unknown} is not supported there",
            remedy="export a model that consists of Transformer, Pooling, Dense and Normalize, in this order",
        )
    return found


class _Dense(nn.Module):
    """The module Dense of sentence-transformers: a linear layer and an activation."""

    def __init__(self, layer: nn.Linear, activation: nn.Module) -> None:
        super().__init__()
        self.layer, self.activation = layer, activation
        self.out_features = layer.out_features

    def forward(self, vectors: Tensor) -> Tensor:
        made: Tensor = self.activation(self.layer(vectors))
        return made


def _dense(folder: Path) -> _Dense:
    config = _json(folder / "config.json", {})
    name = str(config.get("activation_function", "Identity")).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise ExportError(
            f"{folder.name} has the activation {name}, which is not supported",
            remedy=f"known: {', '.join(_ACTIVATIONS)}",
        )
    weights = load_file(folder / "model.safetensors")
    layer = nn.Linear(config["in_features"], config["out_features"], bias=config.get("bias", True))
    layer.load_state_dict({key.removeprefix("linear."): weight.float() for key, weight in weights.items()})
    return _Dense(layer, _ACTIVATIONS[name]())


def _pooling(folder: Path) -> str:
    found = _json(folder / "1_Pooling" / "config.json", {})
    wanted = (
        [found["pooling_mode"]]
        if isinstance(found.get("pooling_mode"), str)
        else [
            name.removeprefix("pooling_mode_").removesuffix("_token").removesuffix("_tokens")
            for name, value in found.items()
            if name.startswith("pooling_mode_") and value
        ]
    )
    if len(wanted) > 1 or not _MODES.keys() >= set(wanted):
        raise ExportError(
            f"{folder.name} pools by {', '.join(wanted)}, which is not supported",
            remedy=f"known: {', '.join(_MODES)}",
        )
    if found.get("include_prompt") is False:
        raise ExportError(
            f"{folder.name} leaves the prompt out of the pooling (include_prompt), which is not supported",
            remedy="export a model that pools all tokens",
        )
    return _MODES[wanted[0]] if wanted else "mean"


def _is_identity(config: Any) -> bool:
    """Whether the config of a cross-encoder says, in sentence-transformers' field, that logits are scores."""
    stated = getattr(config, "sentence_transformers", None) or {}
    activation = stated.get("activation_fn") or getattr(config, "sbert_ce_default_activation_function", None)
    return str(activation).endswith("Identity")


def _max_length(folder: Path, config: Any, *, wanted: int | None) -> int:
    """Return the most tokens of a text: `wanted`, sentence-transformers' number, or the model's positions."""
    positions: int = config.max_position_embeddings
    if config.model_type in ("roberta", "xlm-roberta", "camembert", "mpnet"):
        positions -= (config.pad_token_id or 0) + 1  # which count from behind the padding's
    if wanted is not None and wanted > positions:
        raise ExportError(
            f"--max-sequence-length is {wanted}; {folder.name} reads {positions} tokens",
            remedy=f"give at most {positions}, or leave it out",
        )
    stated = _json(folder / "sentence_bert_config.json", {}).get("max_seq_length")
    return wanted or min(stated or _LONGEST_TEXT, _LONGEST_TEXT, positions)


def _json(file: Path, default: Any) -> Any:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else default
