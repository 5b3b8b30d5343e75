"""Check a release: tag and changelog have its version, and its archives are complete.

    python scripts/check_release.py --tag v0.2.0 --notes notes.md dist/*

Without a tag only the archives are checked.
"""

from __future__ import annotations

import argparse
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Files that are read by name, so that no test would fail to import them.
IN_WHEEL: tuple[str, ...] = (
    "genserve/py.typed",
    "genserve/export/recordings/gemma3-270m.npz",
    "genserve/export/recordings/smollm2.npz",
    "genserve/export/templates/decoder.py.txt",
    "genserve/export/texts/held_out.txt",
    "genserve/server/pages/bundle/chat.js",
    "genserve/server/pages/bundle/dashboard.js",
    "genserve/server/pages/bundle/math.js",
    "genserve/server/pages/bundle/style.css",
    r"genserve/kernels/lib/libgenserve_portable\.(so|dylib)",
    "genserve/kernels/src/attention.hpp",
    r"genserve-[^/]*\.dist-info/licenses/LICENSE",
    r"genserve-[^/]*\.dist-info/entry_points\.txt",
)
IN_SDIST: tuple[str, ...] = ("hatch_build.py", "LICENSE", "genserve/kernels/src/attention.hpp")


def main() -> None:
    """Check what the command line names; exit with the problems as the message."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("archives", nargs="*", type=Path)
    parser.add_argument("--tag", help="such as v0.2.0")
    parser.add_argument("--notes", type=Path, help="write the section of the changelog to this file")
    options = parser.parse_args()
    version = read_version((ROOT / "genserve/version.py").read_text())
    changelog = (ROOT / "CHANGELOG.md").read_text()
    problems = [] if options.tag is None else list(tag_problems(options.tag, version, changelog))
    for archive in options.archives:
        problems += archive_problems(archive, version)
    if problems:
        sys.exit("\n".join(problems))
    if options.notes:
        options.notes.write_text(section(changelog, version))
    print(f"genserve {version}: {len(options.archives)} archives are complete")


def read_version(source: str) -> str:
    """Return the value of `__version__`."""
    versions: list[str] = re.findall(r'^__version__ = "(.*)"$', source, flags=re.MULTILINE)
    return versions[0]


def section(changelog: str, version: str) -> str:
    """Return a version's section of the changelog; empty without a heading `## VERSION (DATE)`."""
    heading = rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)\n(.*?)(?=^## |\Z)"
    match = re.search(heading, changelog, flags=re.MULTILINE | re.DOTALL)
    return match[1].strip() + "\n" if match else ""


def tag_problems(tag: str, version: str, changelog: str) -> Iterator[str]:
    """Yield the facts that contradict a tag."""
    if tag != f"v{version}":
        yield f"the tag is {tag}, but genserve/version.py says {version}"
    if not section(changelog, version).strip():
        yield f"CHANGELOG.md has no section `## {version} (YYYY-MM-DD)`"


def archive_problems(archive: Path, version: str) -> Iterator[str]:
    """Yield the files that an archive lacks."""
    if not archive.name.startswith(f"genserve-{version}"):
        yield f"{archive.name} is not of version {version}"
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as files:
            names = files.namelist()
        wanted = IN_WHEEL
    elif archive.name.endswith(".tar.gz"):
        with tarfile.open(archive) as files:
            names = [name.partition("/")[2] for name in files.getnames()]
        wanted = IN_SDIST
    else:
        return
    for pattern in wanted:
        if not any(re.fullmatch(pattern, name) for name in names):
            yield f"{archive.name} has no {pattern}"


if __name__ == "__main__":
    main()
