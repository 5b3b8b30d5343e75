"""The user's page names every sampling parameter."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from genserve.sampling.sampling_params import SamplingParams

PAGE = (Path(__file__).parents[2] / "docs" / "sampling.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [parameter.name for parameter in fields(SamplingParams)])
def test_a_parameter_is_explained(name: str) -> None:
    assert re.search(rf"`[^`]*\b{name}\b", PAGE)
