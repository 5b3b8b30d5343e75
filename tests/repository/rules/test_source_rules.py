from __future__ import annotations

import pytest

from genserve.repository.model_validation import repository_diagnostics
from genserve.repository.rules.source_rules import source_diagnostics


def diagnostics_of(path, source):
    path.write_bytes(source)
    return [(diagnostic.position, diagnostic.message) for diagnostic in source_diagnostics(path)]


@pytest.mark.parametrize(
    ("source", "position", "message"),
    [
        (b"class TritonPythonModel:\n    def execute(self)\n        pass\n", "2:22", "expected ':'"),
        (b"x = 1\n", "", "there is no class TritonPythonModel"),
        (b"", "", "there is no class TritonPythonModel"),
        (b"class TritonModel:\n    pass\n", "", "there is no class TritonPythonModel"),
    ],
)
def test_a_source_that_cannot_be_loaded_is_reported_with_a_position(tmp_path, source, position, message):
    assert diagnostics_of(tmp_path / "model.py", source) == [(position, message)]


@pytest.mark.parametrize(
    "source",
    [
        b"class TritonPythonModel: pass",
        b"from .model_code import TritonPythonModel",
        b"from .model_code import Model as TritonPythonModel",
        b"from .model_code import *",
        b"TritonPythonModel = make()",
        b"if True:\n    class TritonPythonModel: pass",
        b"globals()['TritonPythonModel'] = make()",
        "# -*- coding: latin-1 -*-\n# caf\xe9\nclass TritonPythonModel: pass".encode("latin-1"),
    ],
)
def test_a_source_that_may_define_the_class_is_accepted(tmp_path, source):
    assert diagnostics_of(tmp_path / "model.py", source) == []


def test_the_served_versions_are_checked(tmp_path):
    for version, source in ((1, "x ="), (2, "y =")):
        (tmp_path / "m" / str(version)).mkdir(parents=True)
        (tmp_path / "m" / str(version) / "model.py").write_text(source)
    (tmp_path / "m" / "config.pbtxt").write_text('backend: "python"')
    [diagnostic] = repository_diagnostics([tmp_path])["m"]
    assert diagnostic.where == f"{tmp_path}/m/2/model.py:1:4"
