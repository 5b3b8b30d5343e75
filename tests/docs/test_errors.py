"""The reference of all codes of errors, with their messages and remedies."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

import pytest

from genserve import errors
from tests.docs.snippets import ROOT


@pytest.fixture(scope="module")
def errors_page() -> ModuleType:
    spec = spec_from_file_location("error_reference", ROOT / "scripts" / "error_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_code_has_a_cure(errors_page: ModuleType) -> None:
    codes = {kind.code for kind in errors_page.kinds().values()}
    assert codes == errors_page.CURES.keys()
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    classes = [kind for kind in kinds if issubclass(kind, errors.GenserveError)]
    assert {kind.code for kind in classes} <= codes


def test_the_reference_has_messages_with_their_values_and_remedies(errors_page: ModuleType) -> None:
    catalogue = errors_page.catalogue()
    assert sum(map(len, catalogue.values())) > 300
    assert ("this LLM was closed{when}", "create another one: `LLM(model)`") in catalogue["closed"]
    page = errors_page.reference()
    assert all(f"\n## {code}\n" in page for code in catalogue)
    assert all(cure in page for cure in errors_page.CURES.values())
