from __future__ import annotations

import pytest

from genserve.settings import ServerSettings, grpc_channel_arguments


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
