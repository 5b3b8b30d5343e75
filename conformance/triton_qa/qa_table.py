"""QA table: writes the results of Triton's qa scripts as JSON, and as the tables of docs/triton_qa.md."""

from __future__ import annotations

import json
import re
import textwrap
import tomllib
from collections import Counter, defaultdict
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
    """A row of differences.toml: why the matching tests of a group do not pass."""

    group: str
    tests: str      # a regular expression for the whole name, `file.Class.test`
    kind: Kind      # differs: genserve differs on purpose; needs: the test needs something that is missing
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
    """Yield the tests of a run, each with the meaning of its outcome and the reason."""
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
    """Return two tables: how many tests pass, of all groups, and how many do not, by reason."""
    total: Counter[str] = Counter()
    others: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)     # tests of each group, by reason
    passing, partly = [], []
    for run in runs:
        rows = list(judged(run, reasons))
        counts = Counter(kind for _, kind, _ in rows)
        counts["hold"] = sum(check.outcome == "passed" for check in run.conditions)
        counts["conditions"], counts["tests"] = len(run.conditions), len(rows)
        total.update(counts)
        for _, kind, why in rows:
            if kind != "passed":
                others[_WORDS[kind], _cell(why)][run.group] += 1
        if counts["passed"] == counts["tests"] and counts["hold"] == counts["conditions"]:
            passing.append(f"{run.group} ({counts['tests']})")
        else:
            partly.append(run.group)
    numbers = [total[key] for key in ("tests", "passed", "differs", "needs", "failed")]
    lines = ["| tests | pass | differ | not applicable | fail | conditions of the scripts |"]
    lines.append("| ---: | ---: | ---: | ---: | ---: | ---: |")
    lines.append(f"| {' | '.join(map(str, numbers))} | {total['hold']} of {total['conditions']} |")
    lines += ["", _filled("All tests and conditions pass in: ", passing), "", _filled("In part in: ", partly)]
    lines += ["", "| tests | | why | groups |", "| ---: | --- | --- | --- |"]
    for (word, why), groups in others.items():
        lines.append(f"| {groups.total()} | {word} | {why} | {', '.join(groups)} |")
    return "\n".join(lines) + "\n"


def _filled(beginning: str, names: Sequence[str]) -> str:
    return textwrap.fill(f"{beginning}{', '.join(names)}.", width=138, break_on_hyphens=False)


def _cell(text: str) -> str:
    return re.sub(r"/\S+/", "", " ".join(text.split()).replace("|", "/"))[:160]
