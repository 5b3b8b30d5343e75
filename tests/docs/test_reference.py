"""The reference that scripts/reference_pages.py writes from the code is complete."""

from __future__ import annotations

import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

import pytest

from genserve.cli.main import parsers
from genserve.config.schema import new_model_config
from genserve.sampling.sampling_params import PARAMETERS
from genserve.server.observe.metrics_text import VLLM_NAMES, metrics_text
from tests.docs.snippets import ROOT


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = spec_from_file_location("reference_pages", ROOT / "scripts" / "reference_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages(reference: ModuleType) -> dict[str, str]:
    return reference.pages()


def test_every_command_and_every_flag_is_on_the_page(pages):
    for name, parser in parsers().items():
        [section] = re.findall(rf"\n## genserve {name}\n(.*?)(?=\n## |\Z)", pages["cli.md"], re.DOTALL)
        names = [name for each in parser.parameters for name in each.names]
        assert [name for name in names if f"`{name}`" not in section] == []


def test_every_variable_that_the_code_reads_is_on_the_page(pages):
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "genserve").rglob("*.py"))
    read = set(re.findall(r"\"(GENSERVE_[A-Z_]+[A-Z])\"", sources))
    assert len(read) > 5
    assert {name for name in read if f"`{name}`" not in pages["environment.md"]} == set()


def test_every_route_with_every_field_is_on_the_page(reference, pages):
    document = reference.openapi()
    page = pages["http.md"]
    for path, methods in document["paths"].items():
        assert {f"### {method.upper()} {path}" for method in methods} <= set(page.splitlines())
    for name, schema in document["components"]["schemas"].items():
        fields = schema.get("properties", {}) if name.endswith("Body") else {}
        others = [field for field in fields if not re.search(rf"[`.]{field}[`.\[]", page)]
        assert set(others) <= set(PARAMETERS)


def test_every_sampling_parameter_is_on_the_page(pages):
    assert {name for name in PARAMETERS if f"| `{name}` |" not in pages["sampling.md"]} == set()


def test_every_field_of_the_schema_is_on_the_page(pages):
    names = [field.name for field in new_model_config().DESCRIPTOR.fields]
    assert {name for name in names if f"| `{name}` |" not in pages["config.md"]} == set()


def test_every_metric_of_a_server_is_on_the_page(pages, tiny_server):
    text = metrics_text(tiny_server.server.services.metrics.registry).decode()
    exported = set(re.findall(r"^# TYPE (genserve_\w+|vllm:\w+) ", text, re.MULTILINE))
    assert len(exported) > 60
    assert {name for name in exported if f"`{name}`" not in pages["metrics.md"]} == set()
    for ours, theirs in VLLM_NAMES.items():
        total = "_total" if f"{ours}_total" in exported else ""
        assert f"| `{ours}{total}` | `{theirs}{total}` |" in pages["metrics.md"]
