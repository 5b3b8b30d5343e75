"""Runs: the ways a server is started for the exchanges, and which models it then has."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["MODELS", "RUNS", "Run", "lay_out"]

MODELS = Path(__file__).parent / "models"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Options of a server, named as Triton's flags are."""

    model_control_mode: str = "none"
    load_model: tuple[str, ...] = ()
    exit_on_error: bool = True
    strict_readiness: bool = True
    cache_config: str | None = None
    http_header_forward_pattern: str | None = None
    models: tuple[str, ...] | None = None  # the folders of its repository; None: all of them

    def options(self) -> dict[str, Any]:
        """The options that are not Triton's defaults."""
        defaults = asdict(Run())
        return {key: value for key, value in asdict(self).items() if value != defaults[key]}

    def flags(self) -> list[str]:
        """The same as flags of tritonserver."""
        flags = []
        for key, value in self.options().items():
            if key == "models":
                continue
            for item in value if isinstance(value, tuple) else (value,):
                word = str(item).lower() if isinstance(item, bool) else item
                flags.append(f"--{key.replace('_', '-')}={word}")
        return flags


RUNS = {
    "all": Run(model_control_mode="explicit", load_model=("*",), exit_on_error=False),
    "cache": Run(
        cache_config="local,size=1048576",
        http_header_forward_pattern="x-.*",
        models=("cached", "told", "pass"),
    ),
    "fixed": Run(
        exit_on_error=False, strict_readiness=False, models=("pass", "identity_fp32", "broken_initialize")
    ),
    "empty": Run(model_control_mode="explicit", models=("pass", "cold", "cold_ensemble", "identity_fp32")),
}


def lay_out(run: Run, repository: Path) -> None:
    """Copy the models of a run into a new folder: servers may write into it."""
    for model in run.models or sorted(path.name for path in MODELS.iterdir()):
        shutil.copytree(MODELS / model, repository / model, ignore=shutil.ignore_patterns("__pycache__"))
