from __future__ import annotations

import pytest

from genserve.errors import InferenceError, Status
from genserve.kserve.trace_settings import TraceSettings


def test_a_models_settings_lie_over_the_servers() -> None:
    settings = TraceSettings()
    settings.update({"trace_rate": "5"}, model="m")
    settings.update({"trace_rate": "7", "log_frequency": "2"})
    assert settings.values("m")["trace_rate"] == "5"
    assert settings.values("m")["log_frequency"] == "2"
    settings.update({"trace_rate": None}, model="m")
    assert settings.values("m")["trace_rate"] == "7"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"trace_level": ["TIMESTAMPS"]},
            "Attempting to set invalid trace setting :trace file name is not given",
        ),
        ({"trace_level": ["OFF", "TENSORS"]}, "Expect only one trace level 'OFF' is specified"),
        ({"trace_rate": "x"}, "Unable to parse 'trace_rate', got: x"),
        ({"trace_count": "-5"}, "Unable to parse 'trace_count'. Expecting value >= -1, got:-5"),
        (
            {"trace_rate": "99999999999"},
            "Unable to parse 'trace_rate', value is out of range [ 0, 4294967295 ], got: 99999999999",
        ),
    ],
)
def test_bad_changes_are_refused_whole(changes: dict[str, object], text: str) -> None:
    settings = TraceSettings()
    with pytest.raises(InferenceError) as caught:
        settings.update({"log_frequency": "3", **changes})
    assert caught.value.message == text
    assert settings.values() == TraceSettings().values()


def test_the_file_is_not_for_clients() -> None:
    with pytest.raises(InferenceError) as caught:
        TraceSettings().update({"trace_file": "x"})
    assert caught.value.status is Status.UNSUPPORTED


def test_levels_that_nobody_knows_are_off() -> None:
    assert TraceSettings().update({"trace_level": ["FOO"]})["trace_level"] == ["OFF"]
