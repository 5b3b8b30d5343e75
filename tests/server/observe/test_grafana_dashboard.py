"""The Grafana dashboard: its queries are valid, and read metrics that a server has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx2
import promql_parser
import pytest

DEPLOY = Path(__file__).parents[3] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "genserve.json").read_text(encoding="utf-8"))
PANELS = DASHBOARD["panels"]
QUERIES = [(panel["title"], target["expr"]) for panel in PANELS for target in panel.get("targets", ())]


def selectors(node: Any) -> Iterator[Any]:
    """The series that an expression selects."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    for name in ("expr", "lhs", "rhs", "vector_selector"):
        if (inner := getattr(node, name, None)) is not None:
            yield from selectors(inner)
    for argument in getattr(node, "args", ()):
        yield from selectors(argument)


@pytest.fixture(scope="module")
def series(tiny_server) -> set[tuple[str, frozenset[str]]]:
    """The names and labels of a real scrape, and the labels that Prometheus adds."""
    body = {"prompt": "a b c", "max_tokens": 3}
    assert httpx2.post(f"{tiny_server.url}/v1/completions", json=body).status_code == 200
    text = httpx2.get(f"{tiny_server.url}/metrics").text
    lines = re.findall(r"^(\w[\w:]*)(?:{(.*)})? ", text, re.MULTILINE)
    return {(name, frozenset(re.findall(r'(\w+)="', labels)) | {"instance", "job"}) for name, labels in lines}


@pytest.mark.parametrize(("title", "query"), QUERIES)
def test_a_query_reads_metrics_of_the_server(series, title, query):
    plain = re.sub(r"\$\w+", "m", query.replace("$__rate_interval", "1m"))
    found = list(selectors(promql_parser.parse(plain)))
    assert found
    for selector in found:
        wanted = {matcher.name for matcher in selector.matchers.matchers}
        assert any(name == selector.name and wanted <= labels for name, labels in series)


def test_the_parser_finds_every_series_of_a_query():
    query = 'histogram_quantile(0.9, sum by (le) (rate(a_bucket{x="1"}[1m]))) / (b + max(c)) or vector(0)'
    assert [selector.name for selector in selectors(promql_parser.parse(query))] == ["a_bucket", "b", "c"]


def test_every_variable_is_declared_and_every_source_is_the_chosen_one():
    declared = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(PANELS)))
    assert used - {"__rate_interval"} == declared
    for panel in PANELS:
        for owner in (panel, *panel.get("targets", ())):
            if panel["type"] != "row":
                assert owner["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_no_two_panels_overlap():
    places = [panel["gridPos"] for panel in PANELS]
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y
