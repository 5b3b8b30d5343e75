"""Results of Triton's qa scripts: as JSON, and as the tables of docs/triton_qa.md."""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from conformance.triton_qa.qa_script import Check, GroupRun

Kind = Literal["passed", "differs", "needs", "failed"]
_CHECKS = ("tests", "conditions")
_WORDS = {"differs": "differs on purpose", "needs": "not applicable", "failed": "FAILS"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """A row of differences.toml: why the tests of a group that match do not pass."""

    group: str
    tests: str      # a regular expression for the whole name, `file.Class.test`
    kind: Kind      # differs: genserve does it differently on purpose; needs: something that is not here
    why: str


def read_reasons(file: Path) -> list[Reason]:
    """Return the rows of differences.toml."""
    rows = tomllib.loads(file.read_text(encoding="utf-8"))["difference"]
    return [Reason(**row) for row in rows]


def as_json(runs: Sequence[GroupRun], **facts: Any) -> str:
    """Return the runs with facts about them."""
    return json.dumps({**facts, "groups": [asdict(run) for run in runs]}, indent=1) + "\n"


def from_json(text: str) -> list[GroupRun]:
    """Return the runs that `as_json` wrote."""
    return [
        GroupRun(**{**group, **{key: [Check(**row) for row in group[key]] for key in _CHECKS}})
        for group in json.loads(text)["groups"]
    ]


def judged(run: GroupRun, reasons: Sequence[Reason]) -> Iterator[tuple[Check, Kind, str]]:
    """Yield the tests of a run with what their outcome means, and why."""
    for test in run.tests:
        if test.outcome == "passed":
            yield test, "passed", ""
            continue
        matching = (r for r in reasons if r.group == run.group and re.fullmatch(r.tests, test.name))
        reason = next(matching, None)
        if reason is not None:
            yield test, reason.kind, reason.why
        elif test.outcome == "skipped":
            yield test, "needs", "Triton's own script skips it"
        else:
            yield test, "failed", test.detail


def as_markdown(runs: Sequence[GroupRun], reasons: Sequence[Reason]) -> str:
    """Return the tables: a row for each group, and one for each test that does not pass."""
    lines = ["| group | tests | pass | differ | not applicable | fail | conditions of the script |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    total: Counter[str] = Counter()
    others = []
    for run in runs:
        rows = list(judged(run, reasons))
        counts = Counter(kind for _, kind, _ in rows)
        counts["hold"] = sum(check.outcome == "passed" for check in run.conditions)
        counts["conditions"], counts["tests"] = len(run.conditions), len(rows)
        total.update(counts)
        lines.append(_row(run.group, counts))
        others += [(run.group, test.name, _WORDS[kind], why) for test, kind, why in rows if kind != "passed"]
    lines.append(_row("**all**", total))
    lines += ["", "| group | test | | why |", "| --- | --- | --- | --- |"]
    lines += [f"| {group} | {name} | {word} | {_cell(why)} |" for group, name, word, why in others]
    return "\n".join(lines) + "\n"


def _row(group: str, counts: Counter[str]) -> str:
    numbers = " | ".join(str(counts[key]) for key in ("tests", "passed", "differs", "needs", "failed"))
    return f"| {group} | {numbers} | {counts['hold']} of {counts['conditions']} |"


def _cell(text: str) -> str:
    return re.sub(r"/\S+/", "", " ".join(text.split()).replace("|", "/"))[:160]
