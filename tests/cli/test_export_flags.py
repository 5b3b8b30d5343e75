from __future__ import annotations

from typing import get_args

from genserve.cli.export_command import ExportFlags
from genserve.cli.parser import parameters
from genserve.export import export_options


def test_the_precisions_are_those_of_the_export() -> None:
    choices = {parameter.field.name: parameter.choices for parameter in parameters(ExportFlags)}
    assert set(choices["precision"]) == set(get_args(export_options.Precision))
    assert choices["file_format"] == get_args(export_options.FileFormat)
