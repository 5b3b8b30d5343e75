"""Diagnostics, and the positions of fields in a text."""

from __future__ import annotations

from pathlib import Path

import pytest

from genserve.config.diagnostics import Diagnostic, Severity, SourceMap, first_error


def make(severity: Severity, *, position: str = "") -> Diagnostic:
    return Diagnostic(severity=severity, path=Path("m"), position=position, message="wrong", remedy="mend it")


def test_a_diagnostic_has_a_position_if_it_is_known() -> None:
    positiond, unpositiond = make(Severity.ERROR, position="3:14"), make(Severity.ERROR)
    assert (positiond.where, positiond.line, positiond.column) == ("m:3:14", 3, 14)
    assert (unpositiond.where, unpositiond.line, unpositiond.column) == ("m", None, None)


def test_only_an_error_is_raised() -> None:
    assert first_error([make(Severity.WARNING)]) is None
    error = first_error([make(Severity.WARNING), make(Severity.ERROR, position="1:2"), make(Severity.ERROR)])
    assert error is not None
    assert (error.message, error.remedy) == ("m:1:2: wrong", "mend it")


TEXT = """\
# name: "of a comment"
name: "a" 'b'  max_batch_size: - 1;
input [ { name: "x" dims: [ 1, 2 ] },
        { name: "y" dims < > } ]
input { name: "z" }, sequence_batching { state: { } oldest { preferred_batch_size: [ ] } }
parameters { key: "k" value { string_value: "} name: 1" } }
parameters [ { key: 'l' value: { } } ]
platform: "p"
"""


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("name", "2:1"),
        ("max_batch_size", "2:16"),
        ("input", "3:9"),
        ("input[0].dims", "3:21"),
        ("input[0].dims[1]", "3:21"),
        ("input[1]", "4:9"),
        ("input[1].name", "4:11"),
        ("input[2]", "5:1"),
        ("input[2].name", "5:9"),
        ("sequence_batching[0].state[0]", "5:42"),
        ("sequence_batching.oldest", "5:53"),
        ("parameters[1]", "7:14"),
        ("platform", "8:1"),
    ],
)
def test_a_field_is_at_its_name_and_a_listed_message_at_its_brace(
    path: str, place: str
) -> None:
    assert SourceMap(TEXT).of(path) == place


def test_a_missing_field_is_at_the_field_around_it() -> None:
    assert SourceMap(TEXT).of("input[1].data_type") == "4:9"
    assert SourceMap(TEXT).of("backend") == "1:1"


def test_an_entry_of_a_map_is_found_by_its_key() -> None:
    assert SourceMap(TEXT).of_key("parameters", "k") == "6:1"
    assert SourceMap(TEXT).of_key("parameters", "l") == "7:14"
