"""Recording: what a source computes over the fixed texts, recorded once, so that its export runs it no more.

A file in `recordings/` belongs to one checkpoint file, which its size and SHA-256 identify. The logits, which
would take 200 MB, are recorded as what the head reads: numbers of 21 bits, with one scale per channel.
`scripts/record_source.py` writes such files.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genserve.errors import ExportError
from genserve.export.checkpoint import Checkpoint
from genserve.export.downloading import file_sha256
from genserve.export.reference import Positions, Reference
from genserve.sampling.logits_array import FloatArray

_FOLDER = Path(__file__).parent / "recordings"
_LARGEST = (1 << 20) - 1    # of the 21 bits
_NUM_BYTES = 3              # of a number in the file


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The results of one run of a source in transformers, and its config as transformers completes it."""

    size_bytes: int                         # of the checkpoint's file
    sha256: str
    config: Mapping[str, Any]
    head: str                               # the name of the tensor [vocab, hidden] that yields the logits
    ids: NDArray[np.int64]                  # [rows, tokens] of the held-out text
    hidden: FloatArray                      # [rows, tokens, hidden]: what the head reads
    activations: Mapping[str, FloatArray]   # see `Reference`

    def reference(self, checkpoint: Checkpoint, *, norms: Collection[str]) -> Reference:
        """The reference that the source would compute; `norms` are the roles of those to observe."""
        return Reference(
            ids=self.ids,
            hidden=self.hidden,
            logits=_Product(self.hidden, lambda: checkpoint.tensor(self.head)),
            activations={role: self.activations[role] for role in norms},
        )

    def completed_config(self) -> Any:
        """The config with attributes, as the families read it."""
        return SimpleNamespace(**self.config)

    def save(self, path: Path) -> None:
        """Write a file for `recordings/`."""
        scales = np.abs(self.hidden).max(axis=(0, 1)) / np.float32(_LARGEST)
        numbers = np.rint(self.hidden / scales).astype("<i4")
        about = {
            "size_bytes": self.size_bytes,
            "sha256": self.sha256,
            "head": self.head,
            "norms": list(self.activations),
            "config": self.config,
        }
        np.savez_compressed(
            path,
            about=np.array(json.dumps(about)),
            ids=self.ids.astype(np.int32),
            scales=scales,
            # Byte by byte: the highest ones take few values, and are compressed.
            hidden=np.moveaxis(numbers[..., None].view(np.uint8)[..., :_NUM_BYTES], -1, 0),
            activations=np.array(list(self.activations.values())),
        )

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Read a file that `save` has written.

        Raises:
            ExportError: it is damaged.
        """
        try:
            return cls._read(path)
        except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error) as error:
            raise ExportError(
                f"{path} is damaged: {error}", remedy="pip install --force-reinstall --no-deps genserve"
            ) from error

    @classmethod
    def _read(cls, path: Path) -> Recording:
        with path.open("rb") as raw, np.load(raw) as file:
            about = json.loads(str(file["about"]))
            numbers = np.zeros((*file["hidden"].shape[1:], 4), np.uint8)
            numbers[..., -_NUM_BYTES:] = np.moveaxis(file["hidden"], 0, -1)
            # Shifted back as signed numbers, which restores their highest byte.
            hidden = (numbers.view("<i4")[..., 0] >> 8).astype(np.float32) * file["scales"]
            return cls(
                size_bytes=about["size_bytes"],
                sha256=about["sha256"],
                config=about["config"],
                head=about["head"],
                ids=file["ids"].astype(np.int64),
                hidden=hidden,
                activations=dict(zip(about["norms"], file["activations"], strict=True)),
            )


def find_recording(path: Path) -> Recording | None:
    """The recording of the checkpoint file at `path`, or None; raises ExportError if one is damaged."""
    size_bytes, sha256 = path.stat().st_size, ""
    for known in sorted(_FOLDER.glob("*.npz")):
        recording = Recording.load(known)
        if recording.size_bytes == size_bytes:
            sha256 = sha256 or file_sha256(path)
            if recording.sha256 == sha256:
                return recording
    return None


@dataclass(frozen=True)
class _Product:
    """Logits that are computed when they are needed, because all of them take much memory."""

    hidden: FloatArray                  # [rows, tokens, hidden]
    load: Callable[[], FloatArray]      # the head [vocab, hidden]

    @cached_property
    def head(self) -> FloatArray:
        """The head."""
        return self.load()

    def __getitem__(self, at: tuple[Positions, Positions]) -> FloatArray:
        """See `Logits`."""
        logits: FloatArray = self.hidden[at] @ self.head.T
        return logits
