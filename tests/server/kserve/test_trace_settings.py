from __future__ import annotations

from pathlib import Path

import pytest

from genserve.errors import GenserveError, InferenceError, Status
from genserve.server.kserve.trace_settings import TraceSettings, read_trace_config


@pytest.fixture
def with_file(tmp_path: Path) -> TraceSettings:
    return TraceSettings({"trace_file": str(tmp_path / "t.json"), "trace_rate": "1"})


def num_traced(settings: TraceSettings, *, model: str = "m", of: int = 6) -> int:
    return sum(settings.sample(model) is not None for _ in range(of))


def test_settings_of_a_model_override_the_servers() -> None:
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
def test_an_invalid_change_is_rejected_completely(changes: dict[str, object], text: str) -> None:
    settings = TraceSettings()
    with pytest.raises(InferenceError) as caught:
        settings.update({"log_frequency": "3", **changes})
    assert caught.value.message == text
    assert settings.values() == TraceSettings().values()


def test_clients_cannot_change_the_trace_file() -> None:
    with pytest.raises(InferenceError) as caught:
        TraceSettings().update({"trace_file": "x"})
    assert caught.value.status is Status.UNSUPPORTED


def test_unknown_levels_are_ignored() -> None:
    assert TraceSettings().update({"trace_level": ["FOO"]})["trace_level"] == ["OFF"]


def test_without_a_level_nothing_is_traced(with_file) -> None:
    assert num_traced(with_file) == 0
    assert not with_file.enabled
    with_file.update({"trace_level": ["TIMESTAMPS"]}, model="m")
    assert with_file.enabled
    assert (num_traced(with_file), num_traced(with_file, model="other")) == (6, 0)


def test_levels_are_combined_and_unknown_ones_ignored(with_file) -> None:
    both = ["TIMESTAMPS", "TENSORS"]
    assert with_file.update({"trace_level": ["TENSORS", "FOO", "TIMESTAMPS"]})["trace_level"] == both
    assert with_file.update({"trace_level": ["FOO"]})["trace_level"] == both
    trace = with_file.sample("m")
    assert trace is not None
    assert (trace.has_timestamps, trace.has_tensors) == (True, True)


def test_the_remaining_count_is_returned_and_survives_other_changes(with_file) -> None:
    with_file.update({"trace_level": ["TIMESTAMPS"], "trace_count": "4"})
    assert num_traced(with_file, of=2) == 2
    assert with_file.values()["trace_count"] == "2"
    assert with_file.update({"trace_rate": "2"})["trace_count"] == "2"
    assert with_file.update({"log_frequency": "7"}, model="m")["trace_count"] == "2"
    assert num_traced(with_file, of=10) == 2
    assert num_traced(with_file, model="other", of=10) == 2
    assert with_file.update({"trace_count": "1"})["trace_count"] == "1"
    assert with_file.update({"trace_count": None}, model="")["trace_count"] == "-1"


def test_the_count_of_a_model_does_not_change_with_the_servers(with_file) -> None:
    with_file.update({"trace_level": ["TIMESTAMPS"]})
    with_file.update({"trace_count": "3"}, model="m")
    assert num_traced(with_file, of=1) == 1
    with_file.update({"trace_count": "9"})
    assert (with_file.values("m")["trace_count"], with_file.values()["trace_count"]) == ("2", "9")


def test_a_rate_of_zero_is_rejected_with_a_level(with_file) -> None:
    assert with_file.update({"trace_rate": "0"})["trace_rate"] == "0"
    with pytest.raises(InferenceError, match="setting :sample rate must be non-zero"):
        with_file.update({"trace_level": ["TIMESTAMPS"]})
    assert with_file.values()["trace_level"] == ["OFF"]


def test_a_trace_file_in_a_missing_folder_is_rejected_at_startup(tmp_path) -> None:
    file = tmp_path / "none" / "t.json"
    with pytest.raises(GenserveError, match=str(file)) as caught:
        TraceSettings({"trace_file": str(file)})
    assert "--trace-config triton,file=" in caught.value.remedy


def test_trace_config_is_parsed_as_in_tritonserver() -> None:
    words = ("triton,file=/t.json", "triton,log-frequency=50", "rate=100", "count=-1", "mode=triton")
    assert read_trace_config((*words, "level=min", "level=tensors")) == {
        "trace_file": "/t.json",
        "log_frequency": "50",
        "trace_rate": "100",
        "trace_count": "-1",
        "trace_level": ["TIMESTAMPS", "TENSORS"],
    }
    assert read_trace_config(("level=TIMESTAMPS", "level=off"))["trace_level"] == ["OFF"]


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("mode=opentelemetry", "the only mode is triton"),
        ("opentelemetry,url=localhost", "the only mode is triton"),
        ("file=/t.json", "use one of level=, rate=, count=, triton,file=, triton,log-frequency="),
        ("rate", "use one of level="),
        ("triton,file=", "use one of level="),
        ("level=TENSOR", "use one of the levels OFF, TIMESTAMPS, TENSORS"),
        ("rate=often", "use an integer"),
    ],
)
def test_unsupported_trace_config_is_rejected_by_name(word: str, remedy: str) -> None:
    with pytest.raises(GenserveError, match=word) as caught:
        read_trace_config((word,))
    assert remedy in caught.value.remedy


def test_a_level_without_a_file_is_rejected_at_startup() -> None:
    with pytest.raises(InferenceError, match="trace file name is not given"):
        TraceSettings(read_trace_config(("level=TIMESTAMPS",)))


def test_reading_settings_does_not_reset_counts(with_file) -> None:
    with_file.update({"trace_level": ["TIMESTAMPS"], "trace_rate": "2"})
    assert num_traced(with_file, of=1) == 0
    with_file.update({})
    assert num_traced(with_file, of=1) == 1
