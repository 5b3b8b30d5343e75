"""Conversion: one checkpoint on its way to the files of its stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import filterfalse
from pathlib import Path
from typing import Self

from genserve.config.model_config import ModelConfig
from genserve.config.parse import parse_model_config, read_model_config
from genserve.errors import ExportError
from genserve.export.architectures import FAMILIES, architecture, family_of
from genserve.export.checkpoint import Checkpoint, FloatArray
from genserve.export.decoder import Decoder, Dimensions
from genserve.export.decoder_graph import write_decoder
from genserve.export.family import Family
from genserve.export.graph import Graph
from genserve.export.layers import Layers
from genserve.export.layout import stage_files
from genserve.export.precision import FORMATS
from genserve.export.report import Precision
from genserve.export.stages import Stages

__all__ = ["Conversion"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What is to be written: a checkpoint, in a precision, under a name."""

    stages: Stages
    precision: Precision
    checkpoint: Checkpoint
    family: Family
    decoder: Decoder

    @classmethod
    def of(cls, checkpoint: Checkpoint, *, stages: Stages, precision: Precision) -> Self:
        """Find the family of the checkpoint.

        Raises:
            ExportError: no family builds what the config names.
        """
        family = family_of(checkpoint.config)
        if family is None:
            raise ExportError(
                f"{checkpoint.source} is of the architecture {architecture(checkpoint.config)}, "
                "which cannot be exported",
                remedy=f"known architectures: {', '.join(sorted(FAMILIES))}",
            )
        return cls(
            stages=stages,
            precision=precision,
            checkpoint=family.completed(checkpoint),
            family=family,
            decoder=family.decoder(checkpoint.config),
        )

    @property
    def dimensions(self) -> Dimensions:
        """What the stages around the graph need to know of it."""
        return self.decoder.dimensions

    def require_agreeing_config(self, repository: Path, *, state_types: bool = True) -> None:
        """Refuse a config.pbtxt of the logits stage that stays there and tells of another model.

        Its batch size, threads and all else are free. With `state_types` off, so is the type of its KV cache.
        """
        part = f"{self.stages.logits}/config.pbtxt"
        path = repository / part
        if not path.exists():
            return
        found = read_model_config(path)
        made = parse_model_config(self._files()[part], source=path)
        if _signature(found, state_types=state_types) != _signature(made, state_types=state_types):
            raise ExportError(
                f"{path} declares other outputs or states than {self.checkpoint.source} in {self.precision}",
                remedy="--overwrite writes a new one; or export under another --name",
            )

    def write_files(self, folder: Path) -> None:
        """Write everything but the graph: configs, model.py, and the tokenizer's files."""
        files = {part: content.encode() for part, content in self._files().items()}
        for name, content in self.checkpoint.tokenizer_files.items():
            files[f"{self.stages.tokenizer}/1/{name}"] = content
        for part, content in files.items():
            path = folder / part
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def write_graph(self, folder: Path, *, advance: Callable[[int], None]) -> Path:
        """Write the graph and its weights; returns their folder. `advance` is called with 1 after each layer.

        Raises:
            ExportError: the checkpoint lacks a tensor, or has one that the family knows nothing of.
        """
        version = folder / self.stages.logits / "1"
        version.mkdir(parents=True, exist_ok=True)
        used: set[str] = set()

        def load(name: str) -> FloatArray:
            used.add(name)
            return self.checkpoint.load(name)

        with Graph(version) as graph:
            layers = Layers(graph, FORMATS[self.precision])
            weights = self.family.weights(replace(self.checkpoint, load=load), self.decoder)
            write_decoder(weights, self.decoder, layers, advance)
            self._require_all(used)
            graph.save(metadata=self._metadata())
        return version

    def _files(self) -> dict[str, str]:
        return stage_files(self.stages, dimensions=self.dimensions, numbers=FORMATS[self.precision])

    def _metadata(self) -> dict[str, str]:
        return {
            "genserve.family": self.family.name,
            "genserve.precision": self.precision,
            "genserve.context_length": str(self.dimensions.context_length),
            "genserve.source": self.checkpoint.source,
        }

    def _require_all(self, used: set[str]) -> None:
        unknown = sorted(filterfalse(self.family.may_ignore, self.checkpoint.tensor_names - used))
        if unknown:
            raise ExportError(
                f"{self.checkpoint.source} has {len(unknown)} tensors that the family {self.family.name} "
                f"does not know, {unknown[0]!r} first",
                remedy="it is not the plain architecture that its config names; nothing was installed",
            )


def _signature(config: ModelConfig, *, state_types: bool) -> tuple[object, ...]:
    """What a config says of its graph: the outputs and the states."""
    states = config.sequence_batching.states if config.sequence_batching else ()
    types = (state.data_type if state_types else "" for state in states)
    return config.outputs, [(state.input_name, state.dims) for state in states], list(types)
