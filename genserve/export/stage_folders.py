"""Stage folders: what lies in a model's four folders beside the weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from genserve.config.model_config import ModelConfig
from genserve.config.parse import parse_model_config, read_model_config
from genserve.errors import ExportError, RepositoryError
from genserve.export.checkpoint import Checkpoint
from genserve.export.decoder import Dimensions
from genserve.export.form import Form
from genserve.export.layout import MAX_NUM_SEQS, stage_files
from genserve.export.precision import cache_numbers
from genserve.export.report import CacheType, Precision
from genserve.export.stages import Stages

__all__ = ["StageFolders"]


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
