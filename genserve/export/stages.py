"""Stages: the four folders that serve one model, and whether they are there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from genserve.errors import ExportError
from genserve.export.form import Form

__all__ = ["Stages"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True)
class Stages:
    """The names of a model's stages.

    Raises:
        ExportError: the name cannot be that of a folder and of a path on the wire.
    """

    ensemble: str

    def __post_init__(self) -> None:
        _require_name(self.ensemble, of="a model")

    @property
    def tokenizer(self) -> str:
        """Text to token ids."""
        return f"{self.ensemble}_tokenizer"

    @property
    def logits(self) -> str:
        """Token ids to the scores of the next token."""
        return f"{self.ensemble}_logits"

    @property
    def decoder(self) -> str:
        """Scores to text."""
        return f"{self.ensemble}_decoder"

    def have_weights(self, repository: Path) -> bool:
        """Whether the weights are in the repository, so that an export would replace them."""
        folder = repository / self.logits / "1"
        return any((folder / form.file_name).exists() for form in Form)

    def beside(self, repository: Path, name: str) -> Path:
        """Return the folder of another graph of the logits stage, beside the one that it came with.

        Raises:
            ExportError: the name cannot be that of a folder.
        """
        _require_name(name, of="a graph")
        return repository / self.logits / "1" / name

    def are_complete(self, repository: Path) -> bool:
        """Whether all that serving needs is in the repository."""
        rest = (
            f"{self.ensemble}/config.pbtxt",
            f"{self.tokenizer}/1/tokenizer.json",
            f"{self.decoder}/1/model.py",
        )
        return self.have_weights(repository) and all((repository / path).exists() for path in rest)


def _require_name(name: str, *, of: str) -> None:
    if not _NAME.fullmatch(name):
        raise ExportError(
            f"{name!r} cannot be the name of {of}",
            remedy="a name is 1 to 128 of A-Z, a-z, 0-9, '.', '_', '-'; the first a letter or digit",
        )
