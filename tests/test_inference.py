"""An inference by itself: its end, and the objects that it then releases."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import numpy as np
import pytest

from genserve.inference import Backlog, Inference, InferenceRequest, InferenceResponse
from genserve.tensor import Tensor


def inference(on_response=lambda response, final: None, **inputs) -> Inference:
    return Inference(request=InferenceRequest(model_name="m", inputs=inputs), on_response=on_response)


def test_callbacks_of_the_end_run_even_if_the_requester_raises():
    def fail(response, final):
        raise ValueError("no place")

    one, ended = inference(fail), []
    one.when_ended(ended.append)
    with pytest.raises(ValueError, match="no place"):
        one.send(InferenceResponse(), final=True)
    assert ended == [one]


def test_an_ended_inference_cannot_be_cancelled():
    one, cancelled = inference(), []
    one.when_cancelled(lambda: cancelled.append("before"))
    one.send(None, final=True)
    one.when_cancelled(lambda: cancelled.append("after"))
    one.cancel()
    assert (cancelled, one.cancelled) == ([], False)


def test_an_inference_is_freed_without_a_garbage_collection():
    gc.disable()
    try:
        array = np.zeros(1_000_000, np.float32)
        alive = weakref.ref(array)
        one = inference(X=Tensor("X", array))
        one.when_cancelled(partial(id, one))
        one.when_ended(partial(max, one, key=id))
        one.send(InferenceResponse(), final=True)
        one.when_cancelled(partial(id, one))  # the answer may come before `submit` returns
        del array
        del one
        assert alive() is None
    finally:
        gc.enable()


def test_a_backlog_calls_back_when_it_is_empty() -> None:
    backlog, calls = Backlog(), []
    one, two = inference(), inference()
    backlog.when_clear(lambda: calls.append("at once"))
    for waiting in (one, two, two):
        backlog.add(waiting)
    backlog.when_clear(lambda: calls.append("later"))
    for waiting in (two, one, one):
        backlog.remove(waiting)
    assert (calls, backlog.waiting) == (["at once"], (two,))
    backlog.remove(two)
    assert calls == ["at once", "later"]


def test_a_lifted_backlog_blocks_no_model() -> None:
    backlog, calls = Backlog(), []
    one = inference()
    backlog.add(one)
    backlog.when_clear(lambda: calls.append("clear"))
    backlog.lift()
    backlog.add(one)
    assert (calls, backlog.waiting) == (["clear"], ())
