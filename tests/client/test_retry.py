from __future__ import annotations

import httpx2
import pytest

from genserve.client.connection import retry_wait_s
from genserve.errors import GenserveError, InvalidRequest, ModelFailed, ModelNotReady, Overloaded, Unreachable


def wait_s(failure: GenserveError, *, attempt: int = 0, chance: float = 0.0) -> float | None:
    return retry_wait_s(failure, attempt=attempt, max_retries=3, chance=chance)


def unreachable(cause: Exception) -> Unreachable:
    failure = Unreachable("no answer")
    failure.__cause__ = cause
    return failure


@pytest.mark.parametrize("failure", [InvalidRequest("wrong"), ModelFailed("nan"), GenserveError("?")])
def test_what_would_fail_again_is_not_tried_again(failure: GenserveError) -> None:
    assert wait_s(failure) is None


def test_a_connection_that_failed_is_tried_again_and_an_answer_that_is_late_is_not() -> None:
    assert wait_s(unreachable(httpx2.ConnectError("refused"))) is not None
    assert wait_s(unreachable(httpx2.RemoteProtocolError("closed"))) is not None
    assert wait_s(unreachable(httpx2.ReadTimeout("late"))) is None


def test_the_wait_doubles_and_chance_spreads_it() -> None:
    failure = ModelNotReady("loading")
    assert [wait_s(failure, attempt=attempt) for attempt in range(3)] == [0.25, 0.5, 1.0]
    assert wait_s(failure, attempt=1, chance=0.5) == 0.75


def test_the_last_try_is_the_last() -> None:
    assert wait_s(ModelNotReady("loading"), attempt=3) is None


def test_the_wait_is_never_shorter_than_the_server_asks_for() -> None:
    assert wait_s(Overloaded("full", retry_after_s=7)) == 7.0
    assert wait_s(Overloaded("full", retry_after_s=7), chance=0.5) == 7.25


def test_a_server_that_asks_for_more_than_a_minute_is_not_waited_for() -> None:
    assert wait_s(Overloaded("full", retry_after_s=61)) is None


def test_a_model_that_loads_is_waited_for_as_long_as_the_server_says() -> None:
    assert wait_s(ModelNotReady("loading", retry_after_s=5)) == 5.0
    assert wait_s(ModelNotReady("loading")) == wait_s(Overloaded("full", retry_after_s=0))
