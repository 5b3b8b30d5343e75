from __future__ import annotations

import numpy as np
import pytest

from genserve.errors import ContextLengthExceeded, InvalidRequest
from genserve.generation.engine_request import LogitsRequest


def request(token_ids) -> LogitsRequest:
    return LogitsRequest(token_ids, on_logits=lambda _: None, vocab_size=10, max_length=4)


@pytest.mark.parametrize("token_ids", [[1, 2, 9], (1, 2, 9), np.array([1, 2, 9], dtype=np.int32)])
def test_ids_are_taken_from_lists_and_arrays(token_ids):
    assert request(token_ids).token_ids == [1, 2, 9]
    assert type(request(token_ids).token_ids[0]) is int


@pytest.mark.parametrize(
    ("token_ids", "words"),
    [
        ([], "no token ids"),
        ([1, 10], "token id 10 is outside the vocabulary of 10"),
        ([-1], "token id -1"),
        ([1.0], "list of integers, not float64"),
        ([[1, 2]], r"not int64 \[1, 2\]"),
    ],
)
def test_ids_that_cannot_be_computed_are_refused(token_ids, words):
    with pytest.raises(InvalidRequest, match=words):
        request(token_ids)


def test_more_ids_than_the_context_are_refused_and_as_many_are_not():
    assert request([1] * 4).num_pending == 4
    with pytest.raises(ContextLengthExceeded, match="5 token ids are given; the model's context is 4"):
        request([1] * 5)
