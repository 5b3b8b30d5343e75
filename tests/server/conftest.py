"""Clients: a plain one for the server with the tiny model, Triton's for the server of a module, a browser."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest
import tritonclient.http as triton
from playwright.sync_api import Browser

from tests.server.browser import chromium
from tests.server.live_kserve import LiveKServe


@pytest.fixture
def http(tiny_server):
    with httpx2.Client(base_url=tiny_server.url, timeout=60) as client:
        yield client


@pytest.fixture
def client(server: LiveKServe) -> Iterator[triton.InferenceServerClient]:
    client = triton.InferenceServerClient(server.address)
    yield client
    client.close()


@pytest.fixture(scope="module")  # playwright's event loop would be in the way of other modules' async tests
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser
