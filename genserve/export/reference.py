"""Reference: what the source of an export computes over two fixed texts.

The texts in `texts/` were written for this purpose and share no sentence: prose, dialogue, instructions,
code, tables, numbers, other languages. `calibration` yields the size of activations; exported graphs are
compared on `held_out`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from genserve.errors import ExportError, InvalidRequest, ModelFailed, RepositoryError
from genserve.export.checkpoint import Checkpoint
from genserve.prompt import Chat, Message
from genserve.sampling.logits_array import FloatArray
from genserve.text.tokenizer import Tokenizer

Text = Literal["calibration", "held_out"]
Positions = NDArray[np.int64]

_TEXTS = Path(__file__).parent / "texts"
_MAX_LENGTH = 256  # tokens of a row
_MAX_ROWS = 8      # of each text


class Logits(Protocol):
    """Logits [rows, tokens, vocab], such as an array."""

    def __getitem__(self, at: tuple[Positions, Positions], /) -> Any:
        """Those of some rows [n] and their tokens [n]: [n, vocab] float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The results of one run of the source."""

    ids: NDArray[np.int64]                  # [rows, tokens] of the held-out text
    hidden: FloatArray                      # [rows, tokens, hidden]: what the head reads
    logits: Logits                          # [rows, tokens, vocab], after each of these tokens
    # By the role of a norm: the root mean square [hidden] of its output over the calibration text.
    activations: Mapping[str, FloatArray]


class TextIds(NamedTuple):
    """Both texts as token ids, [rows, tokens] each."""

    calibration: NDArray[np.int64]
    held_out: NDArray[np.int64]


def read_text(name: Text) -> str:
    """One of the two texts."""
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
