from __future__ import annotations

import pytest

from genserve.completion import Delta, join_deltas
from genserve.errors import StreamBroken


def test_deltas_without_a_finish_reason_do_not_join():
    with pytest.raises(StreamBroken):
        join_deltas([Delta(text="half", token_ids=(1,))])
