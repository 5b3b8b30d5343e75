"""Model folders: their names, the hidden folder where an export grows, and its installation."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from genserve.errors import ExportError
from genserve.export.export_options import Form

__all__ = ["Stages", "install", "install_beside", "staging_folder", "writing_into"]


_FULL = "make room, or choose a folder on another disk"
_CLOSED = "choose a folder that you may write to, or change its permissions"
_REMEDIES: Mapping[int | None, str] = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EACCES: _CLOSED,
    errno.EPERM: _CLOSED,
    errno.EROFS: _CLOSED,
    errno.ENOTDIR: "a part of the path is a file: choose another folder",
    errno.EEXIST: "there is a file of this name: choose another folder",
}


@contextmanager
def writing_into(folder: Path) -> Iterator[None]:
    """Raise ExportError where the system refuses what is written below a folder; other errors pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in _REMEDIES:
            raise
        where = f" ({error.filename})" if error.filename and str(error.filename) != str(folder) else ""
        raise ExportError(
            f"{folder} cannot be written to: {error.strerror}{where}", remedy=_REMEDIES[error.errno]
        ) from error


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


@contextmanager
def staging_folder(repository: Path, stages: Stages) -> Iterator[Path]:
    """An empty hidden folder, which is gone afterwards, as is what a killed export has left.

    That of an export which still runs stays: it is locked.
    """
    repository.mkdir(parents=True, exist_ok=True)
    leftover = re.compile(rf"\.{re.escape(stages.ensemble)}\.[a-z0-9_]{{8}}\.tmp")
    for path in repository.iterdir():
        if leftover.fullmatch(path.name):
            # It may go while we look: then its export has ended.
            with suppress(FileNotFoundError), _locked(path) as is_free:
                if is_free:
                    shutil.rmtree(path)
    made = Path(tempfile.mkdtemp(prefix=f".{stages.ensemble}.", dir=repository))
    with _locked(made):
        folder = made.rename(f"{made}.tmp")     # which others take for a leftover where it is not locked
        try:
            yield folder
        finally:
            shutil.rmtree(folder)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock a folder, until the process ends at the latest; False: somebody else has."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield _lock(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:     # some network file systems have no locks
        return True
    return True


def install(staged: Path, repository: Path, stages: Stages, *, overwrite: bool) -> None:
    """Move the stages from the staging folder into the repository, the ensemble last.

    What is there stays: configs and the decoder's model.py belong to the user. The version folders of
    tokenizer and logits belong together and are replaced; with `overwrite` their configs too. A failure puts
    all back.
    """
    replaced = {f"{stages.tokenizer}/1", f"{stages.logits}/1"}
    if overwrite:
        replaced |= {f"{stages.tokenizer}/config.pbtxt", f"{stages.logits}/config.pbtxt"}
    parts = [part for part in _parts(stages) if part in replaced or not (repository / part).exists()]
    _install({staged / part: repository / part for part in parts}, aside=staged / "replaced")


def install_beside(staged: Path, repository: Path, stages: Stages, *, beside: str) -> None:
    """Move the graph alone from the staging folder into the folder `beside` the one that is there."""
    target = stages.beside(repository, beside)
    _install({staged / stages.logits / "1": target}, aside=staged / "replaced")


def _install(targets: Mapping[Path, Path], *, aside: Path) -> None:
    """Move each path to its target; what is there goes into the folder `aside`. A failure puts all back."""
    moves = _Moves()
    try:
        for number, (source, target) in enumerate(targets.items()):
            if target.exists():
                moves.move(target, aside / str(number))
            moves.move(source, target)
    except BaseException:
        moves.undo()
        raise


def _parts(stages: Stages) -> list[str]:
    return [
        f"{stages.tokenizer}/config.pbtxt",
        f"{stages.tokenizer}/1",
        f"{stages.logits}/config.pbtxt",
        f"{stages.logits}/1",
        f"{stages.decoder}/config.pbtxt",
        f"{stages.decoder}/1/model.py",
        f"{stages.ensemble}/1/.gitkeep",
        f"{stages.ensemble}/config.pbtxt",
    ]


@dataclass(slots=True)
class _Moves:
    """Renames that can be taken back."""

    renamed: list[tuple[Path, Path]] = field(default_factory=list)
    created: list[Path] = field(default_factory=list)

    def move(self, source: Path, target: Path) -> None:
        for folder in reversed([folder for folder in target.parents if not folder.exists()]):
            self.created.append(folder)
            folder.mkdir()
        # Noted first: an interrupt may fall between the rename and the note.
        self.renamed.append((source, target))
        source.rename(target)

    def undo(self) -> None:
        for source, target in reversed(self.renamed):
            if target.exists() and not source.exists():
                target.rename(source)
        for folder in reversed(self.created):
            if folder.exists():
                folder.rmdir()
