"""What the pages of models say that runs is what the families, the wrappers and the refusals say."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from genserve.export.checkpoints.quantized_checkpoint import METHODS
from genserve.export.families import FAMILIES
from genserve.export.families.text_part import WRAPPERS
from genserve.export.gguf.architectures import GGUF_ARCHITECTURES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tables() -> Any:
    """The script that writes the tables."""
    spec = importlib.util.spec_from_file_location("model_tables", ROOT / "scripts" / "model_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_architecture_has_its_models(tables: Any) -> None:
    assert tables.MODELS.keys() == FAMILIES.keys()


def test_every_method_of_quantized_weights_is_described(tables: Any) -> None:
    assert tables.QUANTIZED.keys() == METHODS.keys()


def test_the_reference_has_all_that_is_built(tables: Any) -> None:
    page = tables.reference()
    names = [*FAMILIES, *GGUF_ARCHITECTURES, *WRAPPERS, *METHODS]
    assert [name for name in names if f"`{name}`" not in page] == []


def test_the_page_names_the_models_of_every_architecture(tables: Any) -> None:
    page = tables.PAGE.read_text(encoding="utf-8")
    families = {re.match(r"\w+", models)[0] for models in tables.MODELS.values()}
    assert {family for family in families if family not in page} == set()


def test_the_table_of_short_names_is_current(tables: Any) -> None:
    page = (ROOT / "docs" / "which_model.md").read_text(encoding="utf-8")
    assert tables.derived(page) == page


@pytest.mark.extended   # it makes the configs of all architectures in transformers
def test_the_table_of_what_is_refused_is_current(tables: Any) -> None:
    page = tables.PAGE.read_text(encoding="utf-8")
    assert tables.derived(page) == page
