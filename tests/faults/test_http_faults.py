"""Faults of HTTP: what a client may send to any route, and what it is told."""

from __future__ import annotations

import pytest

from tests.faults.shared_server import SharedServer


@pytest.mark.parametrize("path", ["/nowhere", "/V2", "/v1/chat/completions/", "/generate/", "/v2/models/"])
def test_a_path_that_no_route_has(server: SharedServer, path: str) -> None:
    response = server.get(path)
    assert response.status == 404
    assert response.headers["content-type"] == "application/json"
    assert response.error
