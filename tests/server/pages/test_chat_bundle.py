"""The committed bundle of the chat page is what its sources build."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_the_committed_bundle_is_a_fresh_build(tmp_path):
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("there is no npm")
    web = tmp_path / "web"
    shutil.copytree(ROOT / "web", web, ignore=shutil.ignore_patterns("node_modules"))
    bundle = Path("genserve/server/pages/bundle")
    shutil.copytree(ROOT / bundle, tmp_path / bundle)
    subprocess.run([npm, "ci", "--no-audit", "--no-fund"], cwd=web, check=True)
    subprocess.run([npm, "run", "check"], cwd=web, check=True)
    subprocess.run([npm, "run", "build", "--", "--check"], cwd=web, check=True)
