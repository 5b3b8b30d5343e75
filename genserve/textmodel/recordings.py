"""Recordings: answers with receipts beside a text model, which are repeated to see whether it has changed.

They are files in the folder `recordings` of the model: `*.json` has one answer, `*.jsonl` one in each line,
such as those of `genserve generate --output`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from genserve.errors import GenserveError, Overloaded, RepositoryError
from genserve.files import read_regular_text
from genserve.textmodel.receipts import first_difference, receipts_in, repeated_request
from genserve.textmodel.text_model import TextModel

logger = logging.getLogger(__name__)

RECORDINGS_FOLDER = "recordings"
_MAX_FILE_BYTES = 256 << 20
_MAX_THREADS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A recorded answer: its place, `FILE` or `FILE:LINE`, and its receipt."""

    place: str
    receipt: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A recording that was repeated.

    Attributes:
        recording: the recording.
        difference: what is different now; empty: the answer is the same.
    """

    recording: Recording
    difference: str


def read_recordings(model_folder: Path) -> list[Recording]:
    """Return the recordings in the folder of a text model, by the names of their files.

    Raises:
        RepositoryError: a file cannot be read, or an answer in it has not one receipt.
    """
    folder = model_folder / RECORDINGS_FOLDER
    if not folder.is_dir():
        return []
    files = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".jsonl"))
    return [recording for path in files for recording in _recordings_of(path)]


def _recordings_of(path: Path) -> Iterator[Recording]:
    try:
        text = read_regular_text(path, max_bytes=_MAX_FILE_BYTES)
    except OSError as error:
        raise RepositoryError(f"{path} cannot be read: {error.strerror}") from error
    parts = {path.name: text}
    if path.suffix == ".jsonl":
        lines = enumerate(text.split("\n"), start=1)     # texts may hold U+2028 as it is
        parts = {f"{path.name}:{number}": line for number, line in lines if line.strip()}
    for place, part in parts.items():
        try:
            found = [*receipts_in(json.loads(part))]
        except (ValueError, RecursionError) as error:
            raise RepositoryError(f"{path.parent / place} is not JSON: {error}") from None
        if len(found) != 1:
            raise RepositoryError(
                f"{path.parent / place} has {len(found)} receipts, not one",
                remedy="record the answer again, with return_receipt",
            )
        yield Recording(place=place, receipt=found[0])


def replay(model: TextModel, recordings: Sequence[Recording]) -> list[Replay]:
    """Repeat recorded answers, some at a time, and compare their tokens and ends.

    The logits may differ: only the answers are compared. The first receipt hashes the model's files, for
    about a second per gigabyte.
    """
    logger.info("model %s: repeating %d recorded answers", model.name, len(recordings))
    with ThreadPoolExecutor(min(_MAX_THREADS, model.max_num_seqs), thread_name_prefix="replay") as threads:
        together = [*threads.map(lambda one: _difference(model, one.receipt), recordings)]
    replays = []
    for recording, difference in zip(recordings, together, strict=True):
        if difference is None:
            difference = _difference(model, recording.receipt)      # alone
        if difference is None:
            difference = "it cannot be repeated: the limits of the queue reject it"
        replays.append(Replay(recording=recording, difference=difference))
    return replays


def _difference(model: TextModel, then: Mapping[str, Any]) -> str | None:
    """Return what is different now; None: the queue has no room beside the other requests."""
    try:
        now = model.repeat(repeated_request(then))
    except Overloaded:
        return None
    except GenserveError as error:
        return f"it cannot be repeated: {error.message}"
    digests, recorded = now["digests"], then.get("digests")
    for name, what in (("tokenizer", "the tokenizer"), ("chat_template", "the chat template")):
        if isinstance(recorded, Mapping) and recorded.get(name) != digests[name]:
            return f"{what} is another one, so the prompt is, too"
    return first_difference({**then, "logits_sha256": None}, now)


def require_same_answers(model: TextModel, model_folder: Path) -> None:
    """Repeat the recordings of a model.

    Raises:
        RepositoryError: an answer has changed, or a recording cannot be read; names the first one.
    """
    recordings = read_recordings(model_folder)
    changed = [one for one in replay(model, recordings) if one.difference]
    if changed:
        first = changed[0]
        raise RepositoryError(
            f"{len(changed)} of {len(recordings)} recorded answers of {model.name!r} have changed; "
            f"{RECORDINGS_FOLDER}/{first.recording.place}: {first.difference}",
            remedy="`genserve check --run` shows all; if they are meant to change, record them again, or set "
            '`verify_on_load` to "false"',
        )
