"""Reference: the results of an export's source over two fixed texts.

The texts in `texts/` were written for this purpose and share no sentence: prose, dialogue, instructions,
code, tables, numbers, other languages. The source measures activations on `calibration`; exported graphs are
compared with it on `held_out`.

A recording has the results for one checkpoint file, identified by size and SHA-256, so that its export does
not run the source; `scripts/record_source.py` writes it to `recordings/`. The logits, which would take 200
MB, are recorded as the hidden states that the head reads: numbers of 21 bits, with one scale per channel.
"""

from __future__ import annotations

import json
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from genserve.errors import ExportError, InvalidRequest, ModelFailed, RepositoryError
from genserve.export.checkpoints.checkpoint import Checkpoint
from genserve.files import file_sha256
from genserve.prompt import Chat, Message
from genserve.sampling.logits_array import FloatArray
from genserve.text.tokenizer import Tokenizer

Text = Literal["calibration", "held_out"]
Positions = NDArray[np.int64]

_TEXTS = Path(__file__).parent / "texts"
_MAX_LENGTH = 256  # tokens of a row
_MAX_ROWS = 8      # rows of a text


class Logits(Protocol):
    """Logits [rows, tokens, vocab], such as an array."""

    def __getitem__(self, at: tuple[Positions, Positions], /) -> Any:
        """Return the logits at some rows [n] and tokens [n]: [n, vocab] float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The results of one run of the source."""

    ids: NDArray[np.int64]                  # [rows, tokens], the held-out text
    hidden: FloatArray                      # [rows, tokens, hidden], the input of the head
    logits: Logits                          # [rows, tokens, vocab], after each token
    # The root mean square [hidden] of each norm's output over the calibration text, by role.
    activations: Mapping[str, FloatArray]


class TextIds(NamedTuple):
    """The token ids of both texts, each [rows, tokens]."""

    calibration: NDArray[np.int64]
    held_out: NDArray[np.int64]


def read_text(name: Text) -> str:
    """Read one of the two texts."""
    return (_TEXTS / f"{name}.txt").read_text(encoding="utf-8")


def text_ids(checkpoint: Checkpoint, *, context_length: int) -> TextIds:
    """Encode both texts with the tokenizer of a checkpoint, in rows that fit into its context.

    Raises:
        ExportError: the tokenizer is broken.
    """
    length = min(_MAX_LENGTH, context_length)
    with tempfile.TemporaryDirectory() as folder:
        for name, content in checkpoint.tokenizer_files.items():
            (Path(folder) / name).write_bytes(content)
        try:
            tokenizer = Tokenizer.from_folder(Path(folder))
            return TextIds(
                calibration=_rows(tokenizer, "calibration", length=length),
                held_out=_rows(tokenizer, "held_out", length=length),
            )
        except (InvalidRequest, ModelFailed, RepositoryError) as error:
            reason = error.message.replace(f"{folder}/", "")
            raise ExportError(
                f"the tokenizer of {checkpoint.source} cannot be used: {reason}",
                remedy="download it again, or repair the file",
            ) from error


def _rows(tokenizer: Tokenizer, name: Text, *, length: int) -> NDArray[np.int64]:
    chat = [Message(**turn) for turn in json.loads((_TEXTS / f"{name}_chat.json").read_text("utf-8"))]
    if tokenizer.chat_template is None:
        turns = tokenizer.encode("\n\n".join(message.content for message in chat))
    else:
        turns = tokenizer.encode_chat(Chat(messages=tuple(chat)))
    ids = turns + tokenizer.encode(read_text(name))
    num_rows = min(_MAX_ROWS, len(ids) // length)
    return np.array(ids[: num_rows * length]).reshape(num_rows, length)


_FOLDER = Path(__file__).parent / "recordings"
_LARGEST = (1 << 20) - 1    # the largest number of 21 bits
_NUM_BYTES = 3              # bytes of a number in the file


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The results of one run of a source in transformers, and its config as transformers completes it."""

    size_bytes: int                         # size of the checkpoint's file
    sha256: str
    config: Mapping[str, Any]
    head: str                               # the name of the tensor [vocab, hidden] that yields the logits
    ids: NDArray[np.int64]                  # [rows, tokens], the held-out text
    hidden: FloatArray                      # [rows, tokens, hidden], the input of the head
    activations: Mapping[str, FloatArray]   # see `Reference`

    def reference(self, checkpoint: Checkpoint, *, norms: Collection[str]) -> Reference:
        """Return the reference that the source would compute; `norms` has the roles of the observed norms."""
        return Reference(
            ids=self.ids,
            hidden=self.hidden,
            logits=_Product(self.hidden, lambda: checkpoint.tensor(self.head)),
            activations={role: self.activations[role] for role in norms},
        )

    def completed_config(self) -> Any:
        """Return the config as an object with attributes, which the families read."""
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
            # Write the numbers byte by byte: the highest bytes have few values, so they compress well.
            hidden=np.moveaxis(numbers[..., None].view(np.uint8)[..., :_NUM_BYTES], -1, 0),
            activations=np.array(list(self.activations.values())),
        )

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Read a file that `save` has written.

        Raises:
            ExportError: the file is damaged.
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
            # Shift signed numbers back, which restores the highest byte.
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
    """Return the recording of a checkpoint file, or None; raises ExportError if it is damaged."""
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
    """Logits that are computed on demand, because all of them together take much memory."""

    hidden: FloatArray                  # [rows, tokens, hidden]
    load: Callable[[], FloatArray]      # the head [vocab, hidden]

    @cached_property
    def head(self) -> FloatArray:
        """The weight of the head, [vocab, hidden]."""
        return self.load()

    def __getitem__(self, at: tuple[Positions, Positions]) -> FloatArray:
        """See `Logits`."""
        logits: FloatArray = self.hidden[at] @ self.head.T
        return logits
