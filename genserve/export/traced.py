"""Traced conversion: has torch export models without a family from transformers' code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from genserve.export.checkpoints.checkpoint import Checkpoint
from genserve.export.decoder import Cache, Dimensions
from genserve.export.export_options import ExportFormat, Precision, Progress
from genserve.export.families import FAMILIES, architecture
from genserve.export.layout import ModelLayout
from genserve.export.model_folders import ModelFolders
from genserve.export.reference import Reference
from genserve.export.source_model import export_errors, source_model, without_warnings
from genserve.textmodel.runtimes.growing_logits import GrowingLogits

_DEFAULT_CONTEXT = 2048  # tokens, for configs that do not state a context length


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedConversion:
    """Converts a model without a family; loads the whole model into memory."""

    norms: ClassVar[Mapping[str, str]] = MappingProxyType({})
    recording: ClassVar[None] = None
    layout: ModelLayout

    @classmethod
    def of(cls, checkpoint: Checkpoint, *, folders: ModelFolders, precision: Precision) -> TracedConversion:
        """Find the dimensions of the model.

        Raises:
            ExportError: transformers has no such model, or its layers have keys and values of several sizes.
        """
        with _trace_errors(checkpoint):
            dimensions = _dimensions(checkpoint)
        layout = ModelLayout(
            folders=folders,
            export_format=ExportFormat.TRACED,
            precision=precision,
            checkpoint=checkpoint,
            dimensions=dimensions,
        )
        return cls(layout=layout)

    def write_graph(self, version: Path, *, reference: Reference, progress: Progress) -> dict[str, bool]:
        """Write the graph and its weights, in float32, into the folder `version`; `reference` is not used.

        Raises:
            ExportError: torch cannot export the model, or ONNX Runtime cannot run the exported graph.
        """
        del reference
        checkpoint, dimensions = self.layout.checkpoint, self.layout.dimensions
        path = version / ExportFormat.TRACED.file_name
        with progress.task("tracing", total=checkpoint.num_bytes, unit="bytes") as advance:
            with _trace_errors(checkpoint), without_warnings():
                program = _export(source_model(checkpoint.reporting(advance)), dimensions)
            program.model.metadata_props.update(self.layout.metadata(family="traced"))
            program.save(str(path), external_data=True)
            with _trace_errors(checkpoint):
                GrowingLogits(path, max_num_seqs=1)  # ONNX Runtime lacks some operators that torch writes
        return {}


class _Cached(nn.Module):
    """A model of transformers whose cache consists of plain tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, past: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        # Make the cache without the config, so that layers with a window keep all tokens; a mask hides the
        # older ones.
        cache = DynamicCache()
        for index in range(len(past) // 2):
            cache.update(past[2 * index], past[2 * index + 1], index)
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
        )
        return output.logits, *_tensors(output.past_key_values)


def _tensors(cache: Any) -> list[Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def _dimensions(checkpoint: Checkpoint) -> Dimensions:
    """Read the dimensions from the cache of a run without data (on torch's meta device)."""
    config = AutoConfig.for_model(**checkpoint.config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=torch.float32, trust_remote_code=False
        )
        ids = torch.zeros((1, 2), dtype=torch.long)
        # Without a mask some models look for padding in the ids, which have no values here.
        mask = torch.ones_like(ids)
        output = model.eval()(ids, attention_mask=mask, past_key_values=DynamicCache(), use_cache=True)
    tensors = _tensors(output.past_key_values)
    shapes = enumerate(tensor.shape for tensor in tensors[::2])
    caches = (Cache(layer=index, num_kv_heads=heads, head_dim=size) for index, (_, heads, _, size) in shapes)
    return Dimensions(
        num_layers=len(tensors) // 2,
        caches=tuple(caches),
        vocab_size=output.logits.shape[-1],
        context_length=getattr(config, "max_position_embeddings", None) or _DEFAULT_CONTEXT,
    )


def _export(model: nn.Module, sizes: Dimensions) -> Any:
    batch, sequence, past_length = 2, 3, 5
    names = [f"{each.layer}.{part}" for each in sizes.caches for part in ("key", "value")]
    past = [
        torch.zeros((batch, each.num_kv_heads, past_length, each.head_dim))
        for each in sizes.caches
        for _ in ("key", "value")
    ]
    any_size = torch.export.Dim.DYNAMIC
    return torch.onnx.export(
        _Cached(model).eval(),
        (
            torch.zeros((batch, sequence), dtype=torch.long),
            torch.ones((batch, past_length + sequence), dtype=torch.long),
            torch.arange(past_length, past_length + sequence).repeat(batch, 1),
            past,
        ),
        dynamo=True,
        input_names=[
            "input_ids",
            "attention_mask",
            "position_ids",
            *(f"past_key_values.{name}" for name in names),
        ],
        output_names=["logits", *(f"present.{name}" for name in names)],
        dynamic_shapes=(*[{0: any_size, 1: any_size}] * 3, [{0: any_size, 2: any_size} for _ in names]),
        verbose=False,
    )


def _trace_errors(checkpoint: Checkpoint) -> AbstractContextManager[None]:
    return export_errors(
        f"{checkpoint.source} has the architecture {architecture(checkpoint.config)}, which cannot be traced",
        remedy=f"known architectures: {', '.join(sorted(FAMILIES))}",
    )
