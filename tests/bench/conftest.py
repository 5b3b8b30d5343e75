from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.bench.mock_server import MockServer


@pytest.fixture(scope="module")
def mock() -> Iterator[MockServer]:
    with MockServer() as server:
        yield server
