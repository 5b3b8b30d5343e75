"""Index: which models a repository holds, read from its folders; nothing is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from genserve.config.fault import first_error
from genserve.config.model_config import ModelConfig
from genserve.config.parse import ParsedConfig, inspect_model_config
from genserve.errors import ConfigError, RepositoryError

__all__ = ["ModelEntry", "scan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """One model folder."""

    name: str
    path: Path
    parsed: ParsedConfig                    # its config.pbtxt

    @property
    def config(self) -> ModelConfig | None:
        """What its config.pbtxt says; None: that cannot be read, `error` says why."""
        return self.parsed.config

    @property
    def error(self) -> ConfigError | None:
        """The first error of its config.pbtxt."""
        return first_error(self.parsed.faults)

    @property
    def is_ensemble(self) -> bool:
        """Whether this model chains others, and so answers requests by name."""
        return self.config is not None and self.config.platform == "ensemble"

    @property
    def versions(self) -> tuple[int, ...]:
        """The version folders, ascending: those named by a number that does not begin with 0."""
        names = (p.name for p in self.path.iterdir() if p.is_dir())
        return tuple(sorted(int(n) for n in names if n.isascii() and n.isdigit() and not n.startswith("0")))

    def latest_version(self) -> Path:
        """Return the folder of the highest version, Triton's default policy.

        Raises:
            RepositoryError: there is none.
        """
        versions = self.versions
        if not versions:
            raise RepositoryError(
                f"model {self.name!r} has no version folder in {self.path}",
                remedy="its weights are missing: `genserve pull` or `genserve export` brings them",
            )
        return self.path / str(versions[-1])


def scan(roots: Iterable[Path]) -> dict[str, ModelEntry]:
    """Read the folders of one or more repositories; hidden folders are passed over.

    Returns:
        The entries by name, in alphabetical order. A model whose config.pbtxt is broken is listed
        with its faults. Where two roots hold the same name, the first root's counts.

    Raises:
        RepositoryError: a root is not a folder.
    """
    entries: dict[str, ModelEntry] = {}
    for root in roots:
        if not root.is_dir():
            raise RepositoryError(
                f"there is no model repository at {root}",
                remedy="name one with --model-repository, or make one: `genserve pull smollm2`",
            )
        for path in root.iterdir():
            if path.is_dir() and not path.name.startswith(".") and path.name not in entries:
                parsed = inspect_model_config(path / "config.pbtxt")
                entries[path.name] = ModelEntry(name=path.name, path=path, parsed=parsed)
    return dict(sorted(entries.items()))
