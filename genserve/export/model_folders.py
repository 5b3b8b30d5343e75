"""Model folders: names the four folders of a model, and installs an export into them."""

from __future__ import annotations

import errno
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from genserve.errors import ExportError
from genserve.export.export_options import ExportFormat

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

_NO_SPACE = "free some space, or choose a folder on another disk"
_NO_PERMISSION = "choose a folder that you may write to, or change its permissions"
_REMEDIES: Mapping[int | None, str] = {
    errno.ENOSPC: _NO_SPACE,
    errno.EDQUOT: _NO_SPACE,
    errno.EACCES: _NO_PERMISSION,
    errno.EPERM: _NO_PERMISSION,
    errno.EROFS: _NO_PERMISSION,
    errno.ENOTDIR: "a part of the path is a file: choose another folder",
    errno.EEXIST: "a file has this name: choose another folder",
    errno.ELOOP: "a part of the path is a link to itself: choose another folder",
    errno.ENAMETOOLONG: "choose a folder with a shorter name",
}


@dataclass(frozen=True, slots=True)
class ModelFolders:
    """The names of a model's four folders: the ensemble and its three steps.

    Raises:
        ExportError: the name is not usable as a folder and in a URL.
    """

    ensemble: str

    def __post_init__(self) -> None:
        _require_name(self.ensemble, of="a model")

    @property
    def tokenizer(self) -> str:
        """The folder of the tokenizer: text to token ids."""
        return f"{self.ensemble}_tokenizer"

    @property
    def logits(self) -> str:
        """The folder of the logits model: token ids to the logits of the next token."""
        return f"{self.ensemble}_logits"

    @property
    def decoder(self) -> str:
        """The folder of the decoder: logits to text."""
        return f"{self.ensemble}_decoder"

    def have_weights(self, repository: Path) -> bool:
        """Whether the repository has weights that an export would replace."""
        folder = repository / self.logits / "1"
        return any((folder / export_format.file_name).exists() for export_format in ExportFormat)

    def additional_graph(self, repository: Path, name: str) -> Path:
        """Return the folder of an additional graph of the logits model.

        Raises:
            ExportError: the name is not usable as a folder.
        """
        _require_name(name, of="a graph")
        return repository / self.logits / "1" / name

    def are_complete(self, repository: Path) -> bool:
        """Whether the repository has every file that serving needs."""
        rest = (
            f"{self.ensemble}/config.pbtxt",
            f"{self.tokenizer}/1/tokenizer.json",
            f"{self.decoder}/1/model.py",
        )
        return self.have_weights(repository) and all((repository / path).exists() for path in rest)


@dataclass(frozen=True, slots=True)
class EncoderFolders:
    """The names of an encoder model's three folders: the ensemble and its two steps.

    Raises:
        ExportError: the name is not usable as a folder and in a URL.
    """

    ensemble: str

    def __post_init__(self) -> None:
        _require_name(self.ensemble, of="a model")

    @property
    def tokenizer(self) -> str:
        """The folder of the tokenizer: text to token ids."""
        return f"{self.ensemble}_tokenizer"

    @property
    def encoder(self) -> str:
        """The folder of the encoder: token ids to a vector or scores."""
        return f"{self.ensemble}_encoder"

    @property
    def all(self) -> tuple[str, ...]:
        """All folders, the ensemble last."""
        return self.tokenizer, self.encoder, self.ensemble

    def have_weights(self, repository: Path) -> bool:
        """Whether the repository has the encoder's graph."""
        return (repository / self.encoder / "1" / "model.onnx").exists()


def _require_name(name: str, *, of: str) -> None:
    if not _NAME.fullmatch(name):
        raise ExportError(
            f"{name!r} cannot be the name of {of}",
            remedy="use 1 to 128 of A-Z, a-z, 0-9, '.', '_', '-', starting with a letter or digit",
        )


@contextmanager
def writing_into(folder: Path) -> Iterator[None]:
    """Raise ExportError where disk or permissions refuse a write below `folder`; other errors pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in _REMEDIES:
            raise
        where = f" ({error.filename})" if error.filename and str(error.filename) != str(folder) else ""
        raise ExportError(
            f"{folder} cannot be written to: {error.strerror}{where}", remedy=_REMEDIES[error.errno]
        ) from error


def require_writable(folder: Path) -> None:
    """Raise ExportError unless `folder`, or its first existing parent, is writable."""
    with writing_into(folder):
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        tempfile.TemporaryFile(dir=existing).close()


def install(staged: Path, repository: Path, folders: ModelFolders, *, overwrite: bool) -> None:
    """Move a model from the staging folder into the repository, the ensemble last.

    Existing configs and the decoder's model.py belong to the user and stay. The version folders of tokenizer
    and logits belong together and are replaced; `overwrite` replaces their configs too. If a move fails, all
    moves are undone.
    """
    replaced = {f"{folders.tokenizer}/1", f"{folders.logits}/1"}
    if overwrite:
        replaced |= {f"{folders.tokenizer}/config.pbtxt", f"{folders.logits}/config.pbtxt"}
    parts = (
        f"{folders.tokenizer}/config.pbtxt",
        f"{folders.tokenizer}/1",
        f"{folders.logits}/config.pbtxt",
        f"{folders.logits}/1",
        f"{folders.decoder}/config.pbtxt",
        f"{folders.decoder}/1/model.py",
        f"{folders.ensemble}/1/.gitkeep",
        f"{folders.ensemble}/config.pbtxt",
    )
    moved = [part for part in parts if part in replaced or not (repository / part).exists()]
    _move_all({staged / part: repository / part for part in moved}, aside=staged / "replaced")


def install_beside(staged: Path, repository: Path, folders: ModelFolders, *, beside: str) -> None:
    """Move only the graph from the staging folder into the folder `beside` the model's own graph."""
    target = folders.additional_graph(repository, beside)
    _move_all({staged / folders.logits / "1": target}, aside=staged / "replaced")


def install_encoder(staged: Path, repository: Path, folders: EncoderFolders) -> None:
    """Move an encoder model from the staging folder into the repository, the ensemble last.

    Everything of an older model with this name is replaced. If a move fails, all moves are undone.
    """
    _move_all({staged / part: repository / part for part in folders.all}, aside=staged / "replaced")


def _move_all(targets: Mapping[Path, Path], *, aside: Path) -> None:
    """Move each path to its target, and existing targets into the folder `aside`; undo all if one fails."""
    moves = _Moves()
    try:
        for number, (source, target) in enumerate(targets.items()):
            if target.exists():
                moves.move(target, aside / str(number))
            moves.move(source, target)
    except BaseException:
        moves.undo()
        raise


@dataclass(slots=True)
class _Moves:
    """Renames that can be undone."""

    renamed: list[tuple[Path, Path]] = field(default_factory=list)
    created: list[Path] = field(default_factory=list)

    def move(self, source: Path, target: Path) -> None:
        for folder in reversed([folder for folder in target.parents if not folder.exists()]):
            self.created.append(folder)
            folder.mkdir()
        # Record the move first: an interrupt may come between the rename and the record.
        self.renamed.append((source, target))
        source.rename(target)

    def undo(self) -> None:
        for source, target in reversed(self.renamed):
            if target.exists() and not source.exists():
                target.rename(source)
        for folder in reversed(self.created):
            if folder.exists():
                folder.rmdir()
