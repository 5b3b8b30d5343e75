"""Serve library: imports Ray Serve when a deployment needs it."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from genserve.errors import MissingDependency


def require_ray() -> None:
    """Check, without importing it, that Ray Serve is installed.

    Raises:
        MissingDependency: Ray Serve is not installed.
    """
    if any(find_spec(name) is None for name in ("ray", "yaml")):
        raise _missing()


def import_ray(module: str = "ray") -> Any:
    """Import Ray, or a module of it.

    Raises:
        MissingDependency: Ray is not installed.
    """
    if _has_token():
        # As `ray.init` does for a cluster that it finds. Ray reads the variable once, when it is imported.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    try:
        return import_module(module)
    except ImportError as error:
        raise _missing() from error


def _has_token() -> bool:
    """Whether there is a token for clusters that ask for one, such as the clusters of `ray.init`."""
    variables = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    return any(map(os.environ.get, variables)) or (Path.home() / ".ray" / "auth_token").is_file()


def _missing() -> MissingDependency:
    return MissingDependency("deploying on Ray needs Ray Serve", remedy="pip install 'genserve[ray]'")
