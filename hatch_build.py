"""Build hook: a wheel, or an editable install, with the kernels compiled for the machine that makes it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parent


class KernelsBuildHook(BuildHookInterface[Any]):
    """Compiles the kernels into genserve/kernels/lib, and names the wheel by its platform.

    The libraries are loaded by their path and know nothing of Python, so one wheel serves all its versions.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Run before hatchling collects the files of a wheel; `version` is `standard` or `editable`."""
        build = _kernels_build()
        try:
            libraries = build.build()
        except build.BuildError as error:
            self.app.abort(str(error))
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{build.wheel_platform()}"
        # Else they are left out: git does not know them. Others may lie beside them, of other machines.
        build_data["artifacts"] += [path.relative_to(ROOT).as_posix() for path in libraries]


def _kernels_build() -> ModuleType:
    """Load genserve/kernels/build.py alone: what genserve itself imports is not installed here."""
    spec = importlib.util.spec_from_file_location("kernels_build", ROOT / "genserve/kernels/build.py")
    if spec is None or spec.loader is None:
        msg = "genserve/kernels/build.py is missing"
        raise FileNotFoundError(msg)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
