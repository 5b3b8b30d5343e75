"""`python -m conformance.triton_qa`: runs Triton's qa scripts against genserve; see docs/triton_qa.md."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from conformance.triton_qa.qa_script import Group, GroupRun, run_group
from conformance.triton_qa.qa_table import Reason, as_json, as_markdown, from_json, judged, read_reasons
from conformance.triton_qa.qa_workspace import HERE, PROJECT, Sources, lay_out

_PAGE = PROJECT / "docs" / "triton_qa.md"
_BEGIN = "<!-- table: written by `python -m conformance.triton_qa --docs` -->\n"
_END = "<!-- end of the table -->"


def main() -> int:
    """Run the groups that the command line names; returns 1 if a test fails without a reason."""
    options = _options()
    rows = tomllib.loads((HERE / "groups.toml").read_text(encoding="utf-8"))["group"]
    groups = [Group(**row) for row in rows]
    if options.list:
        print("\n".join(group.name for group in groups))
        return 0
    reasons = read_reasons(HERE / "differences.toml")
    results = options.work / "results.json"
    runs = {run.group: run for run in _earlier(results)}
    if not options.table:
        chosen = [group for group in groups if not options.only or group.name in options.only]
        runs |= {run.group: run for run in _run(chosen, options, reasons)}
    ordered = [runs[group.name] for group in groups if group.name in runs]
    facts = {"triton": _commit(options.server)} if options.server else {}
    results.write_text(as_json(ordered, **facts), encoding="utf-8")
    if options.docs:
        _write_page(as_markdown(ordered, reasons))
    return 1 if any(kind == "failed" for run in ordered for _, kind, _ in judged(run, reasons)) else 0


def _run(
    groups: Sequence[Group], options: argparse.Namespace, reasons: Sequence[Reason]
) -> Iterator[GroupRun]:
    workspace = lay_out(
        options.work,
        Sources(
            server=options.server, client=options.client, python_backend=options.python_backend
        ),
    )
    for group in groups:
        run = run_group(workspace, group, logs=options.work / "logs")
        failed = [test for test, kind, _ in judged(run, reasons) if kind == "failed"]
        print(f"{run.group}: {len(run.tests)} tests, {len(failed)} fail, {run.seconds:.0f} s", flush=True)
        for test in failed:
            print(f"  {test.name}: {test.detail}")
        yield run


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m conformance.triton_qa", description=__doc__)
    for name in ("server", "client", "python_backend"):
        flag = f"--triton-{name}".replace("_", "-")
        parser.add_argument(flag, dest=name, type=Path, metavar="DIR", help=f"checkout of Triton's {name}")
    parser.add_argument("--only", action="append", default=[], metavar="GROUP", help="this group; repeatable")
    parser.add_argument("--list", action="store_true", help="print the names of the groups")
    parser.add_argument("--table", action="store_true", help="use the results of earlier runs")
    parser.add_argument("--docs", action="store_true", help="write the tables to docs/triton_qa.md")
    parser.add_argument(
        "--work", type=Path, default=PROJECT / ".conformance" / "triton_qa", metavar="DIR",
        help="folder of the models, environments, logs and results",
    )
    options = parser.parse_args()
    given = options.server and options.client and options.python_backend
    if not (given or options.list or options.table):
        parser.error("--triton-server, --triton-client and --triton-python-backend are missing")
    return options


def _earlier(results: Path) -> list[GroupRun]:
    return from_json(results.read_text(encoding="utf-8")) if results.exists() else []


def _commit(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "log", "-1", "--format=%h %cs"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _write_page(tables: str) -> None:
    before, begin, rest = _PAGE.read_text(encoding="utf-8").partition(_BEGIN)
    _, end, after = rest.partition(_END)
    _PAGE.write_text(f"{before}{begin}{tables}{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
