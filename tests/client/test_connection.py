from __future__ import annotations

import ssl

import httpx2
import pytest

from genserve.client.connection import Connection, connection, retry_wait_s
from genserve.errors import GenserveError, InvalidRequest, ModelFailed, ModelNotReady, Overloaded, Unreachable


def connect(base_url: str | None = None, *, api_key: str | None = None) -> Connection:
    return connection(base_url, api_key=api_key, timeout_s=600, max_retries=2)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GENSERVE_BASE_URL", raising=False)
    monkeypatch.delenv("GENSERVE_API_KEY", raising=False)


def test_the_default_is_this_machine_without_a_key() -> None:
    assert connect().base_url == "http://127.0.0.1:8000"
    assert "authorization" not in connect().headers


def test_an_argument_overrides_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GENSERVE_BASE_URL", "http://elsewhere:1/")
    monkeypatch.setenv("GENSERVE_API_KEY", "from-env")
    assert connect().base_url == "http://elsewhere:1"
    assert connect().headers["authorization"] == "Bearer from-env"
    assert connect("https://here", api_key="given").base_url == "https://here"
    assert connect("https://here", api_key="given").headers["authorization"] == "Bearer given"


def test_a_url_without_a_scheme_is_rejected_with_the_full_url() -> None:
    with pytest.raises(InvalidRequest) as caught:
        connect("localhost:8000")
    assert caught.value.field == "base_url"
    assert "http://localhost:8000" in caught.value.remedy


def test_a_url_that_ends_with_v1_is_rejected_with_the_url_without_it() -> None:
    with pytest.raises(InvalidRequest) as caught:
        connect("http://localhost:8000/v1/")
    assert caught.value.field == "base_url"
    assert caught.value.remedy.endswith(" http://localhost:8000")


@pytest.mark.parametrize("api_key", ["schlüssel", "secret\n", "secret "])
def test_an_invalid_key_is_rejected_and_not_quoted(api_key: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        connect(api_key=api_key)
    assert caught.value.field == "api_key"
    assert api_key.strip() not in str(caught.value)


def test_the_key_is_not_in_the_repr() -> None:
    assert "secret" not in repr(connect(api_key="secret"))


def wait_s(failure: GenserveError, *, attempt: int = 0, jitter: float = 0.0) -> float | None:
    return retry_wait_s(failure, attempt=attempt, max_retries=3, jitter=jitter)


def unreachable(cause: Exception) -> Unreachable:
    failure = Unreachable("no answer")
    failure.__cause__ = cause
    return failure


@pytest.mark.parametrize("failure", [InvalidRequest("wrong"), ModelFailed("nan"), GenserveError("?")])
def test_permanent_errors_are_not_retried(failure: GenserveError) -> None:
    assert wait_s(failure) is None


def test_a_failed_connection_is_retried_and_a_timeout_is_not() -> None:
    assert wait_s(unreachable(httpx2.ConnectError("refused"))) is not None
    assert wait_s(unreachable(httpx2.RemoteProtocolError("closed"))) is not None
    assert wait_s(unreachable(httpx2.ReadTimeout("late"))) is None


def test_an_untrusted_certificate_is_not_retried() -> None:
    error = httpx2.ConnectError("verify failed")
    error.__cause__ = ssl.SSLCertVerificationError("self-signed certificate")
    error.__cause__.verify_code, error.__cause__.verify_message = 18, "self-signed certificate"
    assert wait_s(unreachable(error)) is None


def test_the_wait_doubles_and_has_jitter() -> None:
    failure = ModelNotReady("loading")
    assert [wait_s(failure, attempt=attempt) for attempt in range(3)] == [0.25, 0.5, 1.0]
    assert wait_s(failure, attempt=1, jitter=0.5) == 0.75


def test_after_the_last_attempt_it_gives_up() -> None:
    assert wait_s(ModelNotReady("loading"), attempt=3) is None


def test_the_wait_is_at_least_the_retry_after() -> None:
    assert wait_s(Overloaded("full", retry_after_s=7)) == 7.0
    assert wait_s(Overloaded("full", retry_after_s=7), jitter=0.5) == 7.25


def test_a_retry_after_of_more_than_a_minute_gives_up() -> None:
    assert wait_s(Overloaded("full", retry_after_s=61)) is None


def test_a_loading_model_is_retried_after_the_time_of_the_server() -> None:
    assert wait_s(ModelNotReady("loading", retry_after_s=5)) == 5.0
    assert wait_s(ModelNotReady("loading")) == wait_s(Overloaded("full", retry_after_s=0))
