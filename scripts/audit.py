"""Audit: searches the pinned versions for known vulnerabilities, with pip-audit.

    python scripts/audit.py

exits with 1 if there is a vulnerability. Without a network, or with an index that has no advisories, it says
so and passes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
COMMAND = (
    *(sys.executable, "-m", "pip_audit", "--requirement", str(CONSTRAINTS), "--no-deps", "--disable-pip"),
    *("--format", "json", "--progress-spinner", "off", "--timeout", "5"),
)


def main() -> None:
    """Print the vulnerabilities, or why they cannot be read."""
    done = subprocess.run(COMMAND, capture_output=True, text=True, check=False)
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except ValueError:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        print(f"audit: skipped, the advisories cannot be read: {reason[:200]}", file=sys.stderr)
        return
    problems = vulnerabilities(packages)
    audited = sum("skip_reason" not in package for package in packages)
    if not audited:
        print("audit: skipped, this index of packages has no advisories", file=sys.stderr)
        return
    print(f"audit: {audited} of {len(packages)} pinned packages looked up, {len(problems)} vulnerabilities")
    if problems:
        sys.exit("\n".join(problems))


def vulnerabilities(packages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each known vulnerability of the packages."""
    return [
        f"{package['name']} {package['version']}: {found['id']}, "
        f"fixed in {', '.join(found['fix_versions']) or 'no version'}"
        for package in packages
        for found in package.get("vulns", [])
    ]


if __name__ == "__main__":
    main()
