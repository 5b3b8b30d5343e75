"""Build hook: compiles the kernels for the machine that builds a wheel or an editable install."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parent


class KernelsBuildHook(BuildHookInterface[Any]):
    """Compiles the kernels into genserve/kernels/lib, and sets the platform tag of the wheel.

    The libraries are loaded by path and independent of Python, so one wheel serves all its versions.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the kernels before hatchling collects files; `version` is `standard` or `editable`."""
        build = _kernels_build()
        try:
            libraries = build.build()
        except build.BuildError as error:
            self.app.abort(str(error))
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{build.wheel_platform()}"
        # Ignored by git, so they must be listed. The folder may also have libraries of other machines.
        build_data["artifacts"] += [path.relative_to(ROOT).as_posix() for path in libraries]


def _kernels_build() -> ModuleType:
    """Load only genserve/kernels/build.py, because the dependencies of genserve are not installed here."""
    spec = importlib.util.spec_from_file_location("kernels_build", ROOT / "genserve/kernels/build.py")
    if spec is None or spec.loader is None:
        msg = "genserve/kernels/build.py is missing"
        raise FileNotFoundError(msg)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
