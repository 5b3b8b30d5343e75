"""Clients: OpenAI's for the server of a module."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.support.live_server import LiveServer


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
