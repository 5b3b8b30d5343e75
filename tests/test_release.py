"""The scripts of a release and of its audit, as the Makefile and the workflows run them."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

from genserve.version import __version__

SCRIPTS = Path(__file__).parents[1] / "scripts"

AUDIT = """
import json

found = {"id": "PYSEC-1", "fix_versions": ["2.0"]}
print(json.dumps({"dependencies": [{"name": "left", "version": "1.0", "vulns": [found]}, %s]}))
"""
SKIPPED = '{"name": "right", "skip_reason": "not on PyPI"}'


def run(script: str, *arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = os.environ | ({"PYTHONPATH": str(path)} if path else {})
    command = [sys.executable, str(SCRIPTS / script), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_a_tag_must_be_that_of_the_version_and_have_a_section_in_the_changelog() -> None:
    done = run("check_release.py", "--tag", "v99.0.0")
    assert done.returncode == 1
    assert f"the tag is v99.0.0, but genserve/version.py says {__version__}" in done.stderr


def test_a_wheel_without_the_page_is_incomplete(tmp_path: Path) -> None:
    wheel = tmp_path / f"genserve-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("genserve/py.typed", "")
    done = run("check_release.py", str(wheel))
    assert done.returncode == 1
    assert f"{wheel.name} has no genserve/server/pages/bundle/chat.js" in done.stderr
    assert "py.typed" not in done.stderr


def fake_pip_audit(folder: Path, source: str) -> Path:
    (folder / "pip_audit.py").write_text(source)
    return folder


def test_a_vulnerability_fails_the_audit(tmp_path: Path) -> None:
    done = run("audit.py", path=fake_pip_audit(tmp_path, AUDIT % SKIPPED))
    assert (done.returncode, done.stderr) == (1, "left 1.0: PYSEC-1, fixed in 2.0\n")
    assert "1 of 2 pinned packages" in done.stdout


def test_an_audit_without_advisories_says_so_and_passes(tmp_path: Path) -> None:
    done = run("audit.py", path=fake_pip_audit(tmp_path, "raise SystemExit('no route to host')"))
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "audit: skipped, the advisories cannot be read: no route to host\n"
