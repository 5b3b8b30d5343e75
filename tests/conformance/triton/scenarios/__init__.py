"""Scenarios: the requests of all topics."""

from __future__ import annotations

from tests.conformance.triton.scenarios import health, inference

__all__ = ["TOPICS"]

TOPICS = (*health.TOPICS, *inference.TOPICS)
