"""The sampling parameters that say where a text ends."""

from __future__ import annotations

import pytest

from genserve.errors import InvalidRequest
from genserve.sampling.sampling_params import sampling_params


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
        ({"stop_regex": ["a", ""]}, "stop_regex[1]"),
        ({"stop_regex": ["a" * 513]}, "stop_regex[0]"),
        ({"stop_regex": ["a"] * 5}, "stop_regex"),
        ({"skip_special_tokens": None}, "skip_special_tokens"),
        ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens"),
        ({"stop_regex": "a", "use_beam_search": True}, "stop_regex"),
        ({"stream_interval": 0}, "stream_interval"),
        ({"max_time_ms": 0}, "max_time_ms"),
        ({"max_time_ms": 1.5}, "max_time_ms"),
        ({"repetition_detection": 5}, "repetition_detection"),
        ({"repetition_detection": {"size": 5}}, "repetition_detection"),
        ({"repetition_detection": {"max_pattern_size": 5}}, "repetition_detection.min_count"),
        ({"repetition_detection": {"min_count": 5}}, "repetition_detection.max_pattern_size"),
        (
            {"repetition_detection": {"max_pattern_size": 5, "min_count": 1}},
            "repetition_detection.min_count",
        ),
        (
            {"repetition_detection": {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}},
            "repetition_detection.min_pattern_size",
        ),
        (
            {"repetition_detection": {"max_pattern_size": 2049, "min_count": 2}},
            "repetition_detection.max_pattern_size",
        ),
        (
            {"repetition_detection": {"max_pattern_size": True, "min_count": 2}},
            "repetition_detection.max_pattern_size",
        ),
    ],
)
def test_a_wrong_option_is_refused_by_name(options, field):
    with pytest.raises(InvalidRequest) as raised:
        sampling_params(options)
    assert raised.value.field == field
