from __future__ import annotations

from typing import get_args

from genserve.cli.export_command import FileFormat, Precision
from genserve.export import export_options


def test_the_precisions_are_those_of_the_export() -> None:
    asked, _none = get_args(get_args(Precision)[0])
    assert set(get_args(asked)) == set(get_args(export_options.Precision))
    assert get_args(get_args(FileFormat)[0]) == get_args(export_options.FileFormat)
