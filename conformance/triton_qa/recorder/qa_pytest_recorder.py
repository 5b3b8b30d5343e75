"""A pytest plug-in that records what `sitecustomize` does for unittest: tests that are plain functions."""

from __future__ import annotations

from typing import Any

from sitecustomize import record


def pytest_runtest_logreport(report: Any) -> None:
    """Record the outcome of a test function; methods of unittest classes record themselves."""
    file, _, rest = report.nodeid.partition("::")
    name = f"{file.rpartition('/')[2].removesuffix('.py')}.{rest.replace('::', '.')}"
    if report.when == "call" or report.outcome != "passed":
        record("pytest:" + name, report.outcome, report.longreprtext)
