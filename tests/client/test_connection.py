from __future__ import annotations

import pytest

from genserve.client.connection import Connection, connection
from genserve.errors import InvalidRequest


def connect(base_url: str | None = None, *, api_key: str | None = None) -> Connection:
    return connection(base_url, api_key=api_key, timeout_s=600, max_retries=2)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GENSERVE_BASE_URL", raising=False)
    monkeypatch.delenv("GENSERVE_API_KEY", raising=False)


def test_without_a_word_it_is_this_machine_and_no_key() -> None:
    assert connect().base_url == "http://127.0.0.1:8000"
    assert "authorization" not in connect().headers


def test_the_environment_fills_in_and_an_argument_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GENSERVE_BASE_URL", "http://elsewhere:1/")
    monkeypatch.setenv("GENSERVE_API_KEY", "from-env")
    assert connect().base_url == "http://elsewhere:1"
    assert connect().headers["authorization"] == "Bearer from-env"
    assert connect("https://here", api_key="given").base_url == "https://here"
    assert connect("https://here", api_key="given").headers["authorization"] == "Bearer given"


def test_a_url_without_a_scheme_is_refused_with_the_right_one() -> None:
    with pytest.raises(InvalidRequest) as caught:
        connect("localhost:8000")
    assert caught.value.field == "base_url"
    assert "http://localhost:8000" in caught.value.remedy


def test_the_v1_of_an_openai_url_is_refused_with_the_url_to_write() -> None:
    with pytest.raises(InvalidRequest, match="ends with /v1") as caught:
        connect("http://localhost:8000/v1/")
    assert caught.value.remedy == "write http://localhost:8000"


@pytest.mark.parametrize("api_key", ["schlüssel", "secret\n", "secret "])
def test_a_key_that_no_header_can_hold_is_refused_and_not_told(api_key: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        connect(api_key=api_key)
    assert caught.value.field == "api_key"
    assert api_key.strip() not in str(caught.value)


def test_the_key_is_not_in_the_repr() -> None:
    assert "secret" not in repr(connect(api_key="secret"))
