"""Result table: writes the rows of all clients for a terminal, as JSON and as Markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from conformance.client_programs import Outcome, Row

_MAX_DETAIL_CHARS = 160
_WORDS: dict[Outcome | None, str] = {
    "ok": "works", "text": "its text", "router": "the router", "failed": "FAILS", None: "-"
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One row of one client, with its outcome for both models."""

    client: str
    version: str
    row: str
    default: Outcome | None     # None: the row was not run with this model
    scripted: Outcome | None
    seconds: float
    detail: str

    @property
    def works(self) -> bool:
        """Whether the row works, or cannot because of a router, and no model fails except for its text."""
        outcomes = (self.default, self.scripted)
        return (
            "failed" not in outcomes
            and ("ok" in outcomes or "router" in outcomes)
            and self.scripted != "text"
        )


def results(client: str, version: str, rows: Mapping[str, Sequence[Row]]) -> list[Result]:
    """Join the rows of a client that have the same name.

    Args:
        client: the title of the client.
        version: the version of the client's package.
        rows: the rows by model, `default` and `scripted`.
    """
    names = dict.fromkeys(row.name for of_model in rows.values() for row in of_model)
    by_name = {model: {row.name: row for row in of_model} for model, of_model in rows.items()}
    return [
        _result(client, version, name, {model: of_model.get(name) for model, of_model in by_name.items()})
        for name in names
    ]


def _result(client: str, version: str, name: str, rows: dict[str, Row | None]) -> Result:
    outcomes: dict[str, Outcome | None] = {"default": None, "scripted": None}
    for model, row in rows.items():
        # One model lacks a row that the other has, so its program ended before.
        outcomes[model] = row.outcome if row else "failed"
    found = [row for row in rows.values() if row]
    details = [row.detail for row in found if row.outcome != "ok"] + [row.detail for row in found]
    return Result(
        client=client,
        version=version,
        row=name,
        default=outcomes["default"],
        scripted=outcomes["scripted"],
        seconds=round(sum(row.seconds for row in found), 1),
        detail=next(filter(None, details), ""),
    )


def as_json(table: Sequence[Result], **facts: Any) -> str:
    """Return the table with facts about the run."""
    rows = [asdict(result) | {"works": result.works} for result in table]
    return json.dumps({**facts, "rows": rows}, indent=1) + "\n"


def from_json(text: str) -> list[Result]:
    """Return the table that `as_json` wrote."""
    rows = json.loads(text)["rows"]
    return [Result(**{name: value for name, value in row.items() if name != "works"}) for row in rows]


def as_markdown(table: Sequence[Result]) -> str:
    """Return the table in Markdown, with details for the rows that fail."""
    head = "| client | row | default model | scripted model | seconds | problem |\n"
    lines = [
        f"| {_client(result)} | {result.row} | {_WORDS[result.default]} | {_WORDS[result.scripted]} "
        f"| {result.seconds:.1f} | {_problem(result)} |"
        for result in table
    ]
    return head + "| --- | --- | --- | --- | ---: | --- |\n" + "\n".join(lines) + "\n"


def as_summary(table: Sequence[Result]) -> str:
    """Return a row per client in Markdown: the numbers of its rows, and those that do not work by name."""
    head = "| client | rows | work | of these, not with the small model | the router lacks | fail |\n"
    lines = []
    for client in dict.fromkeys(map(_client, table)):
        rows = [result for result in table if _client(result) == client]
        works = [result for result in rows if result.works]
        lacks = [result.row for result in works if "router" in (result.default, result.scripted)]
        fails = [f"{result.row}: {_problem(result)}" for result in rows if not result.works]
        num_works = len(works) - len(lacks)
        num_texts = sum(result.default == "text" for result in works)
        cells = (client, len(rows), num_works, num_texts, "; ".join(lacks), "; ".join(fails))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return head + "| --- | ---: | ---: | ---: | --- | --- |\n" + "\n".join(lines) + "\n"


def as_text(table: Sequence[Result]) -> str:
    """Return the table for a terminal."""
    cells = [("client", "row", "default", "scripted", "seconds", "detail")]
    cells += [
        (_client(r), r.row, _WORDS[r.default], _WORDS[r.scripted], f"{r.seconds:.1f}", _short(r.detail))
        for r in table
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
    num_failed = sum(not result.works for result in table)
    return "\n".join([*lines, "", f"{len(table)} rows, {num_failed} of which fail"])


def _client(result: Result) -> str:
    return f"{result.client} {result.version}".strip()


def _problem(result: Result) -> str:
    return "" if result.works else f"`{_short(result.detail).replace('`', ' ').replace('|', '/')}`"


def _short(detail: str) -> str:
    return detail if len(detail) <= _MAX_DETAIL_CHARS else detail[: _MAX_DETAIL_CHARS - 1] + "…"
