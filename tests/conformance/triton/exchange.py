"""Exchange: a short conversation with a server, and what is expected of it; one file per topic.

A file is `{"topic", "server", "exchanges"}`; `server` has the options its server is started with (see
runs.py). An exchange is

    {"name": "...",
     "steps": [{"request": {...}, "expect": {...}, "concurrent": true, "settle": true}],
     "counts": {"model": {...}}}

`concurrent` steps that follow each other form one group: each is sent `after_ms` after the group
began, none waits for another. A step with `settle` is repeated until the answer is the expected one,
since some things (statistics, unloading) happen a moment after the answer. `counts` are the
differences of statistics and metrics between the beginning and the end of the exchange, by model.

A request has a `protocol`, and `only` if it asks for the index and wants the entries of some models:

    http         verb, path, headers, and a body: `json`, `text` or `base64`; after `json`, `base64` is
                 binary tensor data (the header with the length of the JSON is then added)
    metrics      path on the metrics port
    grpc         method, message (as protobuf's JSON); a method with a slash is a full one, and its
                 message the base64 of its bytes
    grpc_stream  messages, sent at once; metadata

An answer to http has status, headers (those that matter) and a body as above, or `events` of a
stream; one to grpc a message, or code and details; one to grpc_stream responses, and code and
details if the stream ended with an error. What differs from run to run is normalised (normal.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["EXCHANGES", "Exchange", "Step", "Topic", "canonical", "load_topics"]

EXCHANGES = Path(__file__).parent / "exchanges"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One request; without an expected answer before it is recorded."""

    request: dict[str, Any]
    expect: dict[str, Any] | None = None
    concurrent: bool = False
    settle: bool = False
    after_ms: int = 0  # when a concurrent step begins, after the beginning of its group

    def to_json(self) -> dict[str, Any]:
        """The step as it stands in a file."""
        record: dict[str, Any] = {"request": self.request, "expect": self.expect}
        if self.concurrent:
            record |= {"concurrent": True, "after_ms": self.after_ms}
        if self.settle:
            record["settle"] = True
        return record


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Steps in their order, and the models whose counts are compared."""

    name: str
    steps: tuple[Step, ...]
    counted: tuple[str, ...] = ()
    counts: dict[str, Any] | None = None

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Exchange:
        """The exchange of a file."""
        return cls(
            name=record["name"],
            steps=tuple(Step(**step) for step in record["steps"]),
            counted=tuple(record.get("counts", {})),
            counts=record.get("counts"),
        )

    def to_json(self) -> dict[str, Any]:
        """The exchange as it stands in a file."""
        record = {"name": self.name, "steps": [step.to_json() for step in self.steps]}
        return record | ({"counts": self.counts} if self.counted else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """The exchanges of one file, and the run (see runs.py) that their server is of."""

    name: str
    run: str
    exchanges: tuple[Exchange, ...]

    @classmethod
    def load(cls, path: Path) -> Topic:
        """The topic of a file."""
        record = json.loads(path.read_text())
        return cls(
            name=record["topic"],
            run=record["run"],
            exchanges=tuple(Exchange.from_json(exchange) for exchange in record["exchanges"]),
        )

    def save(self, *, server: dict[str, Any]) -> None:
        """Write the file; `server` is what the options of its run are, for the reader."""
        record = {
            "topic": self.name,
            "run": self.run,
            "server": server,
            "exchanges": [exchange.to_json() for exchange in self.exchanges],
        }
        text = json.dumps(record, indent=1, ensure_ascii=False)
        (EXCHANGES / f"{self.name}.json").write_text(text + "\n")


def load_topics() -> list[Topic]:
    """All topics, by name."""
    return [Topic.load(path) for path in sorted(EXCHANGES.glob("*.json"))]


def canonical(value: object) -> str:
    """A text that is equal for equal answers: 1 is not 1.0, NaN is NaN, the order of keys is free."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, indent=1)
