"""Typed options: sampling parameters as a person types them, a name and a value."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import cast

from genserve.errors import InvalidRequest
from genserve.sampling.params import SamplingOptions, sampling_params

__all__ = ["read_value", "with_assignments"]


def with_assignments(options: SamplingOptions, assignments: Iterable[str]) -> SamplingOptions:
    """Return options, and over them what stands behind each `--set`: NAME=VALUE.

    Raises:
        InvalidRequest: there is no = in one, or an option is none that a model would take.
    """
    merged: dict[str, object] = {**options}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise InvalidRequest(
                f"--set {assignment} gives no value", remedy=f"write --set {assignment}=VALUE"
            )
        merged[name] = read_value(value)
    sampling_params(merged)     # better refused before a model is loaded
    return cast(SamplingOptions, merged)


def read_value(text: str) -> object:
    """Read JSON; what is none is a text, and `none` or nothing is None."""
    try:
        return json.loads(text)
    except ValueError:
        return None if text in ("", "none") else text
