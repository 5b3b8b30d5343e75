"""Batch files: read the requests and write the answers of a batch as JSON lines.

A request is `{"prompt": ...}` or `{"messages": [...]}` with sampling parameters, or a line in OpenAI's batch
format: `{"custom_id": ..., "method": "POST", "url": "/v1/...", "body": {...}}`. Each answer has the id of its
request, by default the line number.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

import orjson

from genserve.completion import Completion
from genserve.errors import GenserveError, InvalidRequest

LineId: TypeAlias = str | int
_BEGIN = b'{"id":'      # the beginning of every row
_ALWAYS = {"text", "token_ids", "finish_reason", "stop_reason", "usage"}    # keys of every answer


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLine:
    """One request of a batch."""

    id: LineId
    fields: Mapping[str, Any]           # the fields of the line's object, without the id
    error: InvalidRequest | None = None     # why the request cannot be sent

    @property
    def is_openai(self) -> bool:
        """Whether the line has OpenAI's batch format; its answer then has that format too."""
        return "body" in self.fields


def read_requests(path: Path | None) -> list[BatchLine]:
    """Return the requests of a file; None: of standard input.

    Raises:
        InvalidRequest: the file cannot be read, has no request, or has two requests with the same id.
    """
    place = "standard input" if path is None else str(path)
    try:
        content = sys.stdin.buffer.read() if path is None else path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{place} cannot be read: {error.strerror}", remedy="check --input") from None
    lines: dict[LineId, BatchLine] = {}
    for number, raw in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not raw.strip():
            continue
        line = _read_line(raw, number)
        if line.id in lines:
            raise InvalidRequest(
                f"line {number} of {place} repeats the id {line.id!r}", remedy="give each line its own id"
            )
        lines[line.id] = line
    if not lines:
        raise InvalidRequest(
            f"{place} has no requests", remedy='write one JSON object per line, such as {"prompt": "Tea is"}'
        )
    return list(lines.values())


def _read_line(raw: bytes, number: int) -> BatchLine:
    try:
        fields = orjson.loads(raw)
    except ValueError as error:
        return _invalid(number, f"line {number} is not JSON: {error}")
    if not isinstance(fields, dict):
        return _invalid(number, f"line {number} is not a JSON object")
    key = "custom_id" if "body" in fields else "id"
    line_id = fields.pop(key, number)
    if not isinstance(line_id, (str, int)) or isinstance(line_id, bool):
        return _invalid(number, f"the {key} of line {number} is neither text nor a whole number")
    return BatchLine(id=line_id, fields=fields)


def _invalid(number: int, message: str) -> BatchLine:
    remedy = 'write one JSON object per line, such as {"prompt": "Tea is"}'
    return BatchLine(id=number, fields={}, error=InvalidRequest(message, remedy=remedy))


def answer_document(completion: Completion) -> dict[str, Any]:
    """Return an answer for JSON, with the fields of every answer and the requested fields."""
    document = {key: value for key, value in asdict(completion).items() if key in _ALWAYS or value}
    if not completion.prompt_logprobs:
        document.pop("prompt_token_ids", None)
    return document


def error_row(line: BatchLine, error: GenserveError) -> dict[str, Any]:
    """Return the answer of a request that failed."""
    details = {"code": error.code, "message": error.message, "remedy": error.remedy}
    if isinstance(error, InvalidRequest) and error.field is not None:
        details["field"] = error.field
    if line.is_openai:
        return {"id": f"batch_req_{line.id}", "custom_id": line.id, "response": None, "error": details}
    return {"id": line.id, "error": details}


def has_failed(row: Mapping[str, Any]) -> bool:
    """Whether a row of an output file is an error."""
    response = row.get("response") or {}
    return row.get("error") is not None or response.get("status_code", 200) >= 300


class AnswerFile:
    """A file to which answers are added as they come; `finish` sorts them by the order of the requests.

    The answers of an earlier run stay, and need not be computed again. Its errors, and a last line that was
    cut off, are removed.
    """

    is_on_terminal = False

    def __init__(self, path: Path, lines: Sequence[BatchLine]) -> None:
        """Read the file if it exists.

        Raises:
            InvalidRequest: the file has an answer to an unknown request, or cannot be written.
        """
        self._path = Path(os.path.realpath(path))   # `finish` replaces the file, not a link to it
        self._order = {line.id: index for index, line in enumerate(lines)}
        rows = dict(self._read())
        self.done = frozenset(rows)
        with self._writing():
            self._replace(rows)
            self._file: BinaryIO = self._path.open("ab")

    def add(self, row: Mapping[str, Any]) -> None:
        """Write an answer; it survives a later crash of this process."""
        with self._writing():
            self._file.write(_written(row))
            self._file.flush()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()

    def finish(self) -> None:
        """Sort all answers by the order of the requests, and close the file."""
        self.close()
        rows = {_row_id(row): raw for raw, row in self._rows()}
        with self._writing():
            self._replace(rows)

    def _read(self) -> Iterator[tuple[LineId, bytes]]:
        for raw, row in self._rows():
            line_id = _row_id(row)
            if line_id not in self._order:
                raise InvalidRequest(
                    f"{self._path} has an answer to {line_id!r}, which is not in the input",
                    remedy="name another --output, or delete the file",
                )
            if not has_failed(row):
                yield line_id, raw

    def _rows(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        """Yield the complete lines of the file, as bytes and parsed."""
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            raise _no_output(self._path, error) from None
        *whole, cut = content.split(b"\n")     # an incomplete row may follow the last line feed
        if not _BEGIN.startswith(cut[: len(_BEGIN)]):
            raise self._not_ours()
        for raw in whole:
            try:
                row = orjson.loads(raw)
            except ValueError:
                raise self._not_ours() from None
            if not isinstance(row, dict) or not isinstance(_row_id(row), (str, int)):
                raise self._not_ours()
            yield raw + b"\n", row

    def _not_ours(self) -> InvalidRequest:
        return InvalidRequest(f"{self._path} has a line that is no answer", remedy="name another --output")

    def _replace(self, rows: Mapping[LineId, bytes]) -> None:
        beside = self._path.with_name(self._path.name + ".part")
        beside.write_bytes(b"".join(rows[line_id] for line_id in sorted(rows, key=self._order.__getitem__)))
        beside.replace(self._path)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise _no_output(self._path, error) from None


class AnswerStream:
    """Answers on a pipe or on standard output, in the order of the requests."""

    done: frozenset[LineId] = frozenset()

    def __init__(self, lines: Sequence[BatchLine], file: BinaryIO) -> None:
        self.is_on_terminal = file.isatty()
        self._file = file
        self._waiting = [line.id for line in reversed(lines)]
        self._rows: dict[LineId, bytes] = {}

    def add(self, row: Mapping[str, Any]) -> None:
        """Write an answer once all answers before it have been written."""
        self._rows[_row_id(row)] = _written(row)
        while self._waiting and self._waiting[-1] in self._rows:
            self._file.write(self._rows.pop(self._waiting.pop()))
        self._file.flush()

    def close(self) -> None:
        """Do nothing: standard output stays open."""

    def finish(self) -> None:
        """Do nothing: every answer has been written."""


def open_answers(path: Path | None, lines: Sequence[BatchLine]) -> AnswerFile | AnswerStream:
    """Return the output for answers: a file, or standard output for None; raises as `AnswerFile`."""
    if path is None:
        return AnswerStream(lines, sys.stdout.buffer)
    try:
        if path.exists() and not path.is_file():    # for example /dev/stdout
            return AnswerStream(lines, os.fdopen(os.open(path, os.O_WRONLY), "wb"))
    except OSError as error:
        raise _no_output(path, error) from None
    return AnswerFile(path, lines)


def _no_output(path: Path, error: OSError) -> InvalidRequest:
    return InvalidRequest(
        f"{path} cannot be written: {error.strerror}", remedy="check --output and the disk"
    )


def _row_id(row: Mapping[str, Any]) -> LineId:
    return cast("LineId", row["custom_id"] if "custom_id" in row else row.get("id"))


def _written(row: Mapping[str, Any]) -> bytes:
    return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)
