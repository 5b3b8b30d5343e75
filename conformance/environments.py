"""Environments of clients: a virtual environment or a node_modules folder for each, in a cache folder.

uv builds an environment if it is installed, or else venv and pip, and npm an environment for JavaScript. An
environment that was built from the same files is used again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# PyPI's torch for Linux brings gigabytes of CUDA. This is the version in constraints.txt, without CUDA.
_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
_BUILT = ".built"


class EnvironmentFailed(Exception):
    """The environment of a client cannot be built; the message is the end of the installer's output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What a client needs to run."""

    command: tuple[str, ...]    # runs the client's program
    version: str                # the version of the client's first package
    programs: Path | None = None    # the folder of the programs that its packages install


def build_environment(client: Path, *, cache: Path, needs_torch: bool = False) -> Environment:
    """Return the environment of a client's folder, built if its files have changed.

    Args:
        client: the folder with requirements.txt and run.py, or package.json, package-lock.json and run.mjs.
            A run.py next to a package.json runs the programs of its packages.
        cache: the folder of all environments.
        needs_torch: install torch before the requirements, without CUDA.

    Raises:
        EnvironmentFailed: a package cannot be installed.
    """
    folder = cache / client.name
    if (client / "package.json").exists():
        return _npm(client, folder)
    requirements = client / "requirements.txt"
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    pinned = requirements.read_text(encoding="utf-8")
    key = _digest(pinned, sys.version, needs_torch)
    if _read(folder / _BUILT) != key:
        shutil.rmtree(folder, ignore_errors=True)
        _create(folder)
        constraints = folder / "constraints.txt"
        torch = f"torch=={_torch_version()}+cpu" if needs_torch and sys.platform == "linux" else ""
        constraints.write_text(torch, encoding="utf-8")
        if torch:
            # pip uses the folders of wheels if the index cannot be reached.
            pip = (sys.executable, "-m", "pip", f"--python={python}", "install", "--quiet", "--no-deps")
            _run(*pip, "--retries=1", "--timeout=20", "--index-url", _TORCH_INDEX, torch)
        _install(python, "-r", str(requirements), "-c", str(constraints), *_find_links())
        (folder / _BUILT).write_text(key, encoding="utf-8")
    first = re.search(r"^[\w.-]+(?:\[[^]]*\])?==(\S+)", pinned, re.MULTILINE)
    return Environment(command=(str(python), str(client / "run.py")), version=first[1] if first else "")


def _npm(client: Path, folder: Path) -> Environment:
    manifest = (client / "package.json").read_text(encoding="utf-8")
    key = _digest(manifest, _read(client / "package-lock.json"))
    if _read(folder / _BUILT) != key:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copy(client / name, folder)
        npm = ("--no-audit", "--no-fund", "--prefix", str(folder))
        try:
            _run("npm", "ci", *npm)
        except EnvironmentFailed:
            # The lock lacks optional packages of other platforms that were not in the registry.
            _run("npm", "install", "--no-save", *npm)
        (folder / _BUILT).write_text(key, encoding="utf-8")
    # A module finds its packages next to its file, so run a copy of it there.
    for program in [*client.glob("*.mjs"), *client.parent.glob("*.mjs")]:
        shutil.copy(program, folder)
    version = next(iter(json.loads(manifest)["dependencies"].values()))
    programs = folder / "node_modules" / ".bin"
    program = client / "run.py"
    command = (sys.executable, str(program)) if program.exists() else ("node", str(folder / "run.mjs"))
    return Environment(command=command, version=version, programs=programs)


def _create(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    if shutil.which("uv"):
        _run("uv", "venv", "--quiet", "--python", sys.executable, str(folder))
    else:
        _run(sys.executable, "-m", "venv", str(folder))


def _install(python: Path, *arguments: str) -> None:
    if shutil.which("uv"):
        _run("uv", "pip", "install", "--quiet", "--python", str(python), *arguments)
    else:
        _run(str(python), "-m", "pip", "install", "--quiet", *arguments)


def _find_links() -> tuple[str, ...]:
    """The folders of wheels that pip is configured with, for uv too."""
    links = os.environ.get("PIP_FIND_LINKS", "").split()
    return tuple(argument for link in links for argument in ("--find-links", link))


def _torch_version() -> str:
    constraints = Path(__file__).parents[1] / "constraints.txt"
    found = re.search(r"^torch==(\S+)", constraints.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise EnvironmentFailed("constraints.txt does not pin torch")
    return found[1]


def _run(*command: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise EnvironmentFailed(f"{' '.join(command)}\n{done.stdout[-2000:]}")


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.exists() else ""
