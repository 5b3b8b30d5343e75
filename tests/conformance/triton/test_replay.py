"""genserve answers as the real Triton did, but for the differences that are meant."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path

import pytest

from tests.conformance.triton.differences import DIFFERENCES, of_genserve
from tests.conformance.triton.exchange import load_topics
from tests.conformance.triton.replay import mismatches
from tests.conformance.triton.runs import MODELS
from tests.conformance.triton.scenarios import TOPICS

# The models' own warnings are theirs.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")

_DOCS = Path(__file__).parents[3] / "docs"
DOCS = "".join((_DOCS / page).read_text(encoding="utf-8") for page in ("triton.md", "triton_qa.md"))
_RECORDED = load_topics()


@pytest.mark.parametrize("topic", _RECORDED, ids=lambda topic: topic.name)
def test_the_exchanges_go_as_recorded(conformance_server, topic):
    conversation = conformance_server(topic.run)
    found = [
        line
        for exchange in topic.exchanges
        if (different := mismatches(of_genserve(topic.name, exchange), conversation))
        for line in (f"{topic.name}/{exchange.name}", *different)
    ]
    assert not found, "\n" + "\n".join(found)


def test_the_recordings_match_the_scenarios():
    asked = {topic.name: [exchange.name for exchange in topic.exchanges] for topic in TOPICS}
    assert {topic.name: [exchange.name for exchange in topic.exchanges] for topic in _RECORDED} == asked


def test_every_difference_is_of_an_exchange():
    names = [f"{topic.name}/{exchange.name}" for topic in _RECORDED for exchange in topic.exchanges]
    for difference in DIFFERENCES:
        assert any(re.fullmatch(difference.exchanges, name) for name in names), difference.exchanges


@pytest.mark.parametrize("row", sorted({difference.row for difference in DIFFERENCES}))
def test_every_difference_has_its_row_in_the_docs(row):
    assert f"\n| {row} |" in DOCS


def test_every_model_is_asked_for():
    exchanges = chain.from_iterable(topic.exchanges for topic in TOPICS)
    asked = {name for exchange in exchanges for step in exchange.steps for name in _models_of(step.request)}
    assert {model.name for model in MODELS.iterdir()} - asked == set()


def _models_of(request):
    """The models that a request names."""
    if "path" in request:
        return re.findall(r"/models/([^/?]+)", request["path"])
    messages = request.get("messages", [request.get("message", {})])
    return [
        message[field]
        for message in messages
        if isinstance(message, dict)
        for field in ("name", "model_name")
        if field in message
    ]
