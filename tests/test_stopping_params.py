"""The sampling parameters that say where a text ends."""

from __future__ import annotations

import pytest

from genserve.errors import InvalidRequest
from genserve.sampling_params import sampling_params


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options, field):
    with pytest.raises(InvalidRequest) as raised:
        sampling_params(options)
    assert raised.value.field == field
