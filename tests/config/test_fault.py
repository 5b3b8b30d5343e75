from __future__ import annotations

from pathlib import Path

from genserve.config.diagnostics import Diagnostic, Severity, first_error, nearest


def make(severity: Severity, *, position: str = "") -> Diagnostic:
    return Diagnostic(severity=severity, path=Path("m"), position=position, message="wrong", remedy="mend it")


def test_a_fault_says_where_it_is_as_far_as_that_is_known() -> None:
    positiond, unpositiond = make(Severity.ERROR, position="3:14"), make(Severity.ERROR)
    assert (positiond.where, positiond.line, positiond.column) == ("m:3:14", 3, 14)
    assert (unpositiond.where, unpositiond.line, unpositiond.column) == ("m", None, None)


def test_only_an_error_is_one_to_raise() -> None:
    assert first_error([make(Severity.WARNING)]) is None
    error = first_error([make(Severity.WARNING), make(Severity.ERROR, position="1:2"), make(Severity.ERROR)])
    assert error is not None
    assert (error.message, error.remedy) == ("m:1:2: wrong", "mend it")


def test_a_wrong_name_is_answered_with_the_nearest_or_with_all() -> None:
    assert nearest("pyton", known=["onnxruntime", "python"]) == "did you mean python?"
    assert nearest("vllm", known=["onnxruntime", "python"]) == "known there: onnxruntime, python"
    assert nearest("vllm", known=[]) == "known there: none"
