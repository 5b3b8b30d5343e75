"""Loads: the requests to simulate, drawn at a rate, or read from a file in a format of published traces.

Their tokens are numbers without a meaning.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson

from genserve.bench.load_plan import arrival_times
from genserve.errors import InvalidRequest

_SESSION_IDS = 1 << 24      # token ids of one session
_HASHED_TOKENS = 512        # Mooncake's traces have an id for so many tokens of a prompt
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
class PlannedRequest:
    """When a request arrives, and its tokens.

    Equal token ids mean equal tokens, so that prompts with the same beginning share blocks of the KV cache.
    """

    arrived_s: float
    prompt: tuple[range, ...]       # token ids; the ranges follow each other
    answer: range                   # token ids; at least one
    session: Session | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """The length of the prompt."""
        return sum(map(len, self.prompt))

    def token_ids(self) -> list[int]:
        """Return the token ids of the prompt."""
        return list(chain.from_iterable(self.prompt))


class PlannedLoad(Protocol):
    """Requests to simulate. It is sent to other processes, so it says how to make them."""

    def requests(self) -> Iterable[PlannedRequest]:
        """Return the requests in the order of their arrival."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """The distribution of a number of tokens: log-normal, at least 1."""

    mean: float
    variation: float = 0.0      # standard deviation / mean; 0: all are the same

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        """Return `count` lengths."""
        if not self.variation:
            return [max(1, round(self.mean))] * count
        variance = math.log(1 + self.variation**2)
        drawn = rng.lognormal(math.log(self.mean) - variance / 2, math.sqrt(variance), count)
        return [max(1, round(float(length))) for length in drawn]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticLoad:
    """Users that arrive at a rate; each has a session of some turns, at a pace of its own.

    A turn's prompt is the system prompt, all earlier turns with their answers, and a new message.
    """

    num_requests: int           # the requests of all turns together
    rate: float                 # requests per second, of all turns together
    burstiness: float = 1.0     # how unevenly sessions arrive; 1: a Poisson process
    input_len: Lengths          # the length of the message of a turn
    output_len: Lengths
    num_system_prompts: int = 0     # each session begins with a system prompt; 0: with none
    system_len: int = 0
    num_turns: int = 1
    think_s: float = 0.0        # mean time from an answer to the next turn; exponentially distributed
    seed: int = 0

    def requests(self) -> Iterator[PlannedRequest]:
        """Yield the first turns of all sessions, in the order of their arrival."""
        rng = np.random.default_rng(self.seed)
        count, turns = math.ceil(self.num_requests / self.num_turns), self.num_turns
        arrivals_s = arrival_times(
            count, rate=self.rate / self.num_turns, burstiness=self.burstiness, rng=rng
        )
        inputs, outputs = self.input_len.draw(rng, count * turns), self.output_len.draw(rng, count * turns)
        thinking_s = rng.exponential(self.think_s, count * turns).tolist()
        systems = rng.integers(max(1, self.num_system_prompts), size=count).tolist()
        # System prompts have the ids before the ids of the first session.
        first_session = -(-self.num_system_prompts * self.system_len // _SESSION_IDS)
        for number, (arrived_s, system) in enumerate(zip(arrivals_s, systems, strict=True)):
            places = slice(number * turns, (number + 1) * turns)
            session = Session(
                lengths=list(zip(inputs[places], outputs[places], strict=True)), thinking_s=thinking_s[places]
            )
            first_id, num_input = (first_session + number) * _SESSION_IDS, inputs[number * turns]
            prompt = [range(first_id, first_id + num_input)]
            if self.num_system_prompts and self.system_len:
                prompt.insert(0, range(system * self.system_len, (system + 1) * self.system_len))
            end = first_id + num_input
            yield PlannedRequest(
                arrived_s=arrived_s,
                prompt=tuple(prompt),
                answer=range(end, end + outputs[number * turns]),
                session=session if turns > 1 else None,
            )


class Session:
    """The requests of one user, each sent some time after the answer to the one before."""

    def __init__(self, *, lengths: list[tuple[int, int]], thinking_s: list[float]) -> None:
        self._lengths = lengths
        self._thinking_s = thinking_s
        self._turn = 0

    def next_turn(self, request: PlannedRequest, *, ended_s: float) -> PlannedRequest | None:
        """Return the request after one whose answer ended at `ended_s`; None: it was the last."""
        self._turn += 1
        if self._turn == len(self._lengths):
            return None
        num_input, num_output = self._lengths[self._turn]
        *system, own = request.prompt
        end = request.answer.stop + num_input
        return replace(
            request,
            arrived_s=ended_s + self._thinking_s[self._turn],
            prompt=(*system, range(own.start, end)),
            answer=range(end, end + num_output),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceLoad:
    """The requests of a file, at its times."""

    path: Path
    num_requests: int | None = None     # None: all of the file
    speed: float = 1.0                  # 2: the trace is replayed in half its time

    def requests(self) -> Iterator[PlannedRequest]:
        """Yield the requests in the order of their arrival; requests without prompt or answer are left out.

        Raises:
            InvalidRequest: the file cannot be read, or has another format.
        """
        rows = sorted(_trace_rows(self.path), key=lambda row: row.arrived_s)
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


def _trace_rows(path: Path) -> list[_Row]:
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
            yield _Row(arrived_s=_arrival_s(arrival), num_prompt=int(num_prompt), num_new=int(num_new))
        except (ValueError, TypeError) as error:
            raise _malformed(path, number, error) from None


def _bench_rows(path: Path) -> Iterator[_Row]:
    """Yield the complete requests of a report, load by load."""
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


def _arrival_s(text: str) -> float:
    """Return the seconds of a number, or of a date without a time zone."""
    try:
        return float(text)
    except ValueError:
        # Azure's have seven digits after the comma, and Python reads six.
        whole, _, fraction = text.partition(".")
        return datetime.fromisoformat(whole).replace(tzinfo=UTC).timestamp() + float(f"0.{fraction or 0}")


def _malformed(path: Path, number: int, error: Exception) -> InvalidRequest:
    return InvalidRequest(
        f"{path}:{number} is no request of a trace: {error!r}", field="trace", remedy=f"write {_FORMATS}"
    )
