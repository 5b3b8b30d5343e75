"""What the runner of Triton's qa scripts reads from a script and its trace."""

import json
import shutil
import subprocess
import sys

import pytest

from conformance.triton_qa.qa_script import Check, Group, GroupRun, run_group
from conformance.triton_qa.qa_table import Reason, as_json, as_markdown, from_json
from conformance.triton_qa.qa_workspace import Workspace

TEST = """
import unittest

class Sums(unittest.TestCase):
    def test_right(self):
        self.assertEqual(1 + 1, 2)

    def test_wrong(self):
        self.assertEqual(1 + 1, 3)

    @unittest.skip("not today")
    def test_skipped(self):
        pass

unittest.main()
"""
SCRIPT = """#!/bin/bash
# A comment, in place of which the runner traces the script.
SERVER_PID=0
RET=0
if [ "$SERVER_PID" == "0" ]; then
    echo -e "\\n***\\n*** Failed to start $SERVER\\n***"
    exit 1
fi
set -e
kill $SERVER_PID
wait $SERVER_PID
set +e
python sums_test.py
if [ $? -ne 0 ]; then
    echo -e "\\n***\\n*** Test Failed\\n***"
    RET=1
else
    if [ "$SERVER_PID" == "1" ]; then
        RET=1
    fi
fi
if [ "$RET" == "7" ]; then
    RET=1
fi
exit $RET
"""


@pytest.fixture
def workspace(tmp_path):
    if not shutil.which("unshare") or subprocess.run(["unshare", "-rn", "true"], check=False).returncode:
        pytest.skip("needs Linux namespaces")
    workspace = Workspace(tmp_path)
    folder = workspace.qa / "L0_sums"
    folder.mkdir(parents=True)
    (folder / "test.sh").write_text(SCRIPT)
    (folder / "sums_test.py").write_text(TEST)
    (workspace.environment / "bin").mkdir(parents=True)
    (workspace.environment / "bin" / "python").symlink_to(sys.executable)
    return workspace


def test_a_script_reports_its_tests_and_the_conditions_that_it_reached(workspace, tmp_path):
    run = run_group(workspace, Group(name="L0_sums", minutes=1), logs=tmp_path / "logs")
    assert run.status == 1
    assert [(test.name, test.outcome) for test in run.tests] == [
        ("sums_test.Sums.test_right", "passed"),
        ("sums_test.Sums.test_skipped", "skipped"),
        ("sums_test.Sums.test_wrong", "failed"),
    ]
    assert run.tests[2].detail == "AssertionError: 2 != 3"
    assert [(check.name, check.outcome) for check in run.conditions] == [
        ("test.sh:7: Failed to start $SERVER", "failed"),
        ("test.sh:16: Test Failed", "failed"),
        ('test.sh:23: if [ "$RET" == "7" ]; then', "passed"),
    ]


def test_tables_give_the_reason_of_each_test_that_does_not_pass():
    tests = [Check(name=f"t.T.{name}", outcome=outcome) for name, outcome in
             (("a", "passed"), ("b", "failed"), ("c", "failed"), ("d", "skipped"))]  # fmt: skip
    run = GroupRun(group="L0_x", status=1, seconds=2.0, tests=tests, conditions=[])
    assert json.loads(as_json([run], triton="1"))["triton"] == "1"
    assert from_json(as_json([run])) == [run]
    reasons = [Reason(group="L0_x", tests=r"t\.T\.b", kind="differs", why="we | know")]
    lines = as_markdown([run], reasons).splitlines()
    assert "| 4 | 1 | 1 | 1 | 1 | 0 of 0 |" in lines
    assert "| 1 | differs on purpose | we / know | L0_x |" in lines
    assert "| 1 | FAILS |  | L0_x |" in lines
