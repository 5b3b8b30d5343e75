"""Records the outcome of each unittest that a process runs, as JSON lines in $QA_RESULTS."""

from __future__ import annotations

import json
import os
import sys
import traceback
import unittest
from pathlib import Path
from typing import Any

_FILE = os.environ.get("QA_RESULTS", "")
_run = unittest.TestCase.run


def record(test: str, outcome: str, detail: str = "") -> None:
    """Append one line; a test that begins but never ends has only the outcome `begun`."""
    with Path(_FILE).open("a", encoding="utf-8") as lines:
        lines.write(json.dumps({"test": test, "outcome": outcome, "detail": detail[-2000:]}) + "\n")


def name_of(test: Any) -> str:
    """Return `file.Class.method`, also for the tests of a file that is the main program."""
    module = type(test).__module__
    if module == "__main__":
        module = Path(sys.modules["__main__"].__file__ or "main").stem
    method = getattr(test, "_testMethodName", str(test))
    return f"{module.rpartition('.')[2]}.{type(test).__qualname__}.{method}"


class _Recording:
    """A test result that records each outcome, and passes it on to another result."""

    def __init__(self, result: Any, name: str) -> None:
        self._result, self._name, self._failed = result, name, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._result, name)

    def addSuccess(self, test: Any) -> Any:  # noqa: N802 - the name of unittest
        if not self._failed:
            record(self._name, "passed")
        return self._result.addSuccess(test)

    def addFailure(self, test: Any, err: Any) -> Any:  # noqa: N802
        self._fail(err)
        return self._result.addFailure(test, err)

    def addError(self, test: Any, err: Any) -> Any:  # noqa: N802
        self._fail(err)
        return self._result.addError(test, err)

    def addSkip(self, test: Any, reason: str) -> Any:  # noqa: N802
        record(self._name, "skipped", reason)
        return self._result.addSkip(test, reason)

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> Any:  # noqa: N802
        if err is not None:
            self._fail(err)
        return self._result.addSubTest(test, subtest, err)

    def _fail(self, err: Any) -> None:
        if not self._failed:
            self._failed = True
            record(self._name, "failed", "".join(traceback.format_exception(*err)))


def _recorded_run(self: unittest.TestCase, result: Any = None) -> Any:
    if result is None:
        result = self.defaultTestResult()
    name = name_of(self)
    record(name, "begun")
    return _run(self, _Recording(result, name))  # type: ignore[arg-type]


if _FILE:
    unittest.TestCase.run = _recorded_run  # type: ignore[method-assign]
