"""Scenarios: the requests of all topics."""

from __future__ import annotations

from tests.conformance.triton.scenarios import (
    health,
    inference,
    protocol,
    python_models,
    repository,
    scheduling,
)

__all__ = ["TOPICS"]

_MODULES = (health, inference, protocol, python_models, repository, scheduling)
TOPICS = tuple(topic for module in _MODULES for topic in module.TOPICS)
