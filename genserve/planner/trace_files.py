"""Trace files: the requests of a recorded load, in the formats of published traces."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from genserve.errors import InvalidRequest
from genserve.planner.planned_request import PlannedRequest

_HASHED_TOKENS = 512        # of a prompt, for which Mooncake's traces have an id
# Columns of CSV files: arrival, prompt tokens, new tokens.
_COLUMNS = (
    ("Timestamp", "Request tokens", "Response tokens"),     # BurstGPT; seconds
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),      # Azure LLM inference traces; dates
)
_FORMATS = (
    "JSON lines with `timestamp` (ms), `input_length` and `output_length` as Mooncake's, a CSV file of "
    "BurstGPT or of Azure's LLM traces, or a report of `genserve bench --save-detailed --output FILE.json`"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceLoad:
    """The requests of a file, at its times."""

    path: Path
    num_requests: int | None = None     # None: all of the file
    speed: float = 1.0                  # 2: in half the time

    def requests(self) -> Iterator[PlannedRequest]:
        """Yield the requests in the order of their arrival; those without a prompt or an answer are left out.

        Raises:
            InvalidRequest: the file cannot be read, or has another format.
        """
        rows = sorted(_read(self.path), key=lambda row: row.arrived_s)
        if not rows:
            raise InvalidRequest(f"{self.path} has no request", field="trace", remedy=f"write {_FORMATS}")
        ids = _TokenIds(rows)
        for row in islice(rows, self.num_requests):
            prompt, answer = ids.take(row)
            arrived_s = (row.arrived_s - rows[0].arrived_s) / self.speed
            yield PlannedRequest(arrived_s=arrived_s, prompt=prompt, answer=answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    arrived_s: float
    num_prompt: int
    num_new: int
    hash_ids: Sequence[int | str] = ()


class _TokenIds:
    """Assigns token ids: equal ones to blocks of the same hash id, and new ones to all other tokens."""

    def __init__(self, rows: Sequence[_Row]) -> None:
        hash_ids = dict.fromkeys(hash_id for row in rows for hash_id in row.hash_ids)
        self._block_of = {hash_id: index for index, hash_id in enumerate(hash_ids)}
        self._next = len(self._block_of) * _HASHED_TOKENS

    def take(self, row: _Row) -> tuple[tuple[range, ...], range]:
        """Return the ids of the prompt and of the answer of a request."""
        left, prompt = row.num_prompt, []
        for hash_id in row.hash_ids:
            first = self._block_of[hash_id] * _HASHED_TOKENS
            prompt.append(range(first, first + min(_HASHED_TOKENS, left)))
            left -= len(prompt[-1])
        own = range(self._next, self._next + left)
        answer = range(own.stop, own.stop + row.num_new)
        self._next = answer.stop
        return (*prompt, own), answer


def _read(path: Path) -> list[_Row]:
    try:
        match path.suffix:
            case ".csv":
                with path.open(encoding="utf-8", newline="") as file:
                    rows = list(_csv_rows(path, csv.DictReader(file)))
            case ".json":
                rows = list(_bench_rows(path))
            case _:
                lines = path.read_bytes().splitlines()
                rows = [_line_row(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}", field="trace") from error
    return [row for row in rows if row.num_prompt > 0 and row.num_new > 0]


def _line_row(path: Path, number: int, line: bytes) -> _Row:
    try:
        entry = orjson.loads(line)
        row = _Row(
            arrived_s=float(entry["timestamp"]) / 1e3,
            num_prompt=int(entry["input_length"]),
            num_new=int(entry["output_length"]),
            hash_ids=tuple(entry.get("hash_ids") or ()),
        )
        hash(row.hash_ids)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _malformed(path, number, error) from None
    return row


def _csv_rows(path: Path, reader: csv.DictReader[str]) -> Iterator[_Row]:
    names = reader.fieldnames or ()
    columns = next((columns for columns in _COLUMNS if set(columns) <= set(names)), None)
    if columns is None:
        known = " or ".join(", ".join(columns) for columns in _COLUMNS)
        message = f"{path} has the columns {', '.join(names)}"
        raise InvalidRequest(message, field="trace", remedy=f"name them {known}")
    for number, row in enumerate(reader, 2):
        try:
            arrival, num_prompt, num_new = (row[column] for column in columns)
            yield _Row(arrived_s=_seconds(arrival), num_prompt=int(num_prompt), num_new=int(num_new))
        except (ValueError, TypeError) as error:
            raise _malformed(path, number, error) from None


def _bench_rows(path: Path) -> Iterator[_Row]:
    """Yield the complete requests of all loads of a report, one load after the other."""
    try:
        runs: Iterable[Mapping[str, Any]] = orjson.loads(path.read_bytes())["runs"]
        began_s = 0.0
        for run in runs:
            columns = (run["start_times"], run["input_lens"], run["output_lens"], run["is_complete"])
            for sent_s, num_prompt, num_new, is_complete in zip(*columns, strict=True):
                if is_complete and num_prompt is not None:
                    yield _Row(arrived_s=began_s + sent_s, num_prompt=num_prompt, num_new=num_new)
            began_s += run["duration"]
    except (ValueError, TypeError, KeyError) as error:
        raise _malformed(path, 1, error) from None


def _seconds(text: str) -> float:
    """Return the seconds of a number, or of a date without a time zone."""
    try:
        return float(text)
    except ValueError:
        # Azure's have seven digits behind the comma, and Python reads six.
        whole, _, fraction = text.partition(".")
        return datetime.fromisoformat(whole).replace(tzinfo=UTC).timestamp() + float(f"0.{fraction or 0}")


def _malformed(path: Path, number: int, error: Exception) -> InvalidRequest:
    return InvalidRequest(
        f"{path}:{number} is no request of a trace: {error!r}", field="trace", remedy=f"write {_FORMATS}"
    )
