"""Logits config: what the config and the folder of a logits stage say about its graph."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from genserve.config.model_config import ModelConfig, TensorSpec
from genserve.errors import RepositoryError

__all__ = ["PARITY_FILE", "LogitsNames", "read_parity"]


PARITY_FILE = "parity.json"


def read_parity(folder: Path) -> dict[str, Any]:
    """Return the fields of `export.parity.Parity` of the graph in a folder; none, if no file has them."""
    try:
        found = json.loads((folder / PARITY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsNames:
    """The tensors of a model from token ids to logits, as its config calls them."""

    input_ids: str
    attention_mask: str | None      # None: it takes none
    logits: str

    @classmethod
    def of(cls, config: ModelConfig) -> LogitsNames:
        """Find them: by their usual names, or else (`INPUT__0`) the ids first and the mask second.

        Raises:
            RepositoryError: the model takes more than ids and a mask, or has several outputs, none `logits`.
        """
        masks = [spec for spec in config.inputs if "mask" in spec.name] or config.inputs[1:]
        ids = [spec for spec in config.inputs if spec not in masks]
        outputs = [spec for spec in config.outputs if spec.name == "logits"] or config.outputs
        if len(ids) != 1 or len(masks) > 1 or len(outputs) != 1:
            raise RepositoryError(
                f"model '{config.name}' is no logits stage: it takes {_names(config.inputs)} "
                f"and gives {_names(config.outputs)}",
                remedy="a logits stage takes `input_ids` and perhaps `attention_mask`, and gives `logits`",
            )
        return cls(
            input_ids=ids[0].name,
            attention_mask=masks[0].name if masks else None,
            logits=outputs[0].name,
        )


def _names(specs: tuple[TensorSpec, ...]) -> str:
    return ", ".join(spec.name for spec in specs) or "nothing"
