from __future__ import annotations

from typing import get_args

from genserve.cli.flags import Precision
from genserve.export import report


def test_the_precisions_are_those_of_the_export() -> None:
    assert set(get_args(get_args(Precision)[0])) == set(get_args(report.Precision))
