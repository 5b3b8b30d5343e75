"""Matrices of which `make test` runs representatives."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest

__all__ = ["with_extended"]


def with_extended(cases: Iterable[Any], *, always: Container[Any]) -> list[Any]:
    """Return cases as parameters of a test; all but those that run `always` have the marker `extended`."""
    return [pytest.param(case, marks=[] if case in always else pytest.mark.extended) for case in cases]
