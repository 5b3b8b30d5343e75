"""schemathesis: generated requests to every operation of /openapi.json; none may be answered by a 5xx."""

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

from rows import URL, expect, main, row

OPTIONS = (
    "--checks=not_a_server_error", "--continue-on-failure", "--max-examples=10", "--request-timeout=120",
    "--warnings=off", "--seed=1",
)  # fmt: skip


@row("no 5xx")
def no_server_error():
    program, report = Path(sys.executable).with_name("st"), Path("report.json")
    command = [program, "run", f"{URL}/openapi.json", *OPTIONS, "--report=json", "--report-json-path", report]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    print(done.stdout, file=sys.stderr)
    results = json.loads(report.read_text(encoding="utf-8"))
    found = [*results["failures"], *results["errors"]]
    expect(done.returncode == 0 and not found, f"{len(found)} failures, the first: {json.dumps(found[:1])}")
    operations, cases = results["operations"]["tested"], results["test_cases"]["generated"]
    return f"{cases} requests to {operations} operations"


@row("the server still answers")
def still_answers():
    expect(urllib.request.urlopen(f"{URL}/health").status == 200, "not healthy")


main()
