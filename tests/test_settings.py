from __future__ import annotations

import math

import pytest

from genserve.settings import (
    ServerSettings,
    grpc_channel_arguments,
    read_keep_alive,
    read_max_model_len,
    read_memory_budget,
)


def test_grpc_channels_get_the_arguments_that_are_set() -> None:
    settings = ServerSettings(
        grpc_infer_response_compression_level="medium",
        grpc_keepalive_time=60000,
        grpc_keepalive_permit_without_calls=True,
        grpc_http2_max_ping_strikes=0,
        grpc_max_connection_age=5000,
    )
    assert grpc_channel_arguments(settings) == (
        ("grpc.default_compression_level", 2),
        ("grpc.keepalive_time_ms", 60000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_connection_age_ms", 5000),
    )
    assert grpc_channel_arguments(ServerSettings()) == ()


@pytest.mark.parametrize(
    ("settings", "num_bytes"),
    [
        (ServerSettings(), 0),
        (ServerSettings(cache_config="local,size=1024"), 1024),
        (ServerSettings(response_cache_byte_size=512), 512),
        (ServerSettings(cache_config="local,size=1024", response_cache_byte_size=512), 1024),
    ],
)
def test_the_response_cache_has_the_size_of_either_flag(settings: ServerSettings, num_bytes: int) -> None:
    assert settings.cache_bytes == num_bytes


# The last are those of vLLM's own tests of its notation.
@pytest.mark.parametrize(
    ("text", "tokens"),
    [("auto", None), ("-1", None), (-1, None), (4096, 4096), ("32k", 32_000), ("32K", 32_768),
     ("1m", 1_000_000), ("1M", 2**20), ("10.5k", 10_500), ("25.6k", 25_600), ("1.2m", 1_200_000)],
)  # fmt: skip
def test_a_context_length_is_written_as_in_vllm(text: str | int, tokens: int | None) -> None:
    assert read_max_model_len(text) == tokens
    assert ServerSettings(max_model_len=text).context_limit == tokens


@pytest.mark.parametrize(
    "text", ["", "x", "0", "1", "-2", "-1k", "1.5", "1.5K", "1G", "32kb", "1e3", "٣٢", 0, 1.5]
)
def test_what_is_no_context_length_is_rejected(text: str | int) -> None:
    with pytest.raises(ValueError, match="not auto, or a number of tokens"):
        read_max_model_len(text)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("5m", 300), ("1h30m", 5400), ("1.5s", 1.5), ("100ms", 0.1), (300, 300), ("300", 300), (0.5, 0.5),
        (0, 0), ("0s", 0), (-1, math.inf), ("-1", math.inf), ("-1m", math.inf),
        ("87600h", 315_360_000), (10**10, math.inf), ("9999999999h", math.inf),
    ],
)  # fmt: skip
def test_a_keep_alive_is_written_as_ollama_does(value: str | float, seconds: float) -> None:
    assert read_keep_alive(value) == pytest.approx(seconds)


@pytest.mark.parametrize("value", ["", "soon", "5 m", "m5", "nan", "inf", "1e9", "--1"])
def test_what_is_no_keep_alive_is_rejected(value: str) -> None:
    with pytest.raises(ValueError, match="is not a time"):
        read_keep_alive(value)


def test_a_memory_budget() -> None:
    assert read_memory_budget("auto") is None
    assert read_memory_budget("16GiB") == 16 * 2**30
    for text in ("0", "-1", "much"):
        with pytest.raises(ValueError, match="is not auto"):
            read_memory_budget(text)
