"""The client that OpenAI makes, of a server with the tiny model."""

from __future__ import annotations

import openai
import pytest


@pytest.fixture
def client(tiny_server):
    with openai.OpenAI(base_url=f"{tiny_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
