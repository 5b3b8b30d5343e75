"""Messages between ingress and replicas, as bytes and back."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import typing
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genserve import errors
from genserve.completion import Delta, PromptProgress
from genserve.deploy.calls.message_codec import UnreadableMessage, decoded, encoded
from genserve.deploy.replica_messages import MESSAGE_CLASSES
from genserve.engine.generation_request import GenerationRequest
from genserve.errors import GenserveError, InferenceError, Overloaded, Status
from genserve.inference import InferenceRequest, InferenceResponse
from genserve.tensor import DataType, Tensor


def crossed(message: Any) -> Any:
    return decoded(bytearray(b"".join(map(bytes, encoded(message)))))


def classes_of(hint: Any) -> Iterator[type]:
    """The classes of genserve that a value of this type consists of."""
    if isinstance(hint, type) and hint.__module__.startswith("genserve."):
        yield hint
        if dataclasses.is_dataclass(hint):
            fields = {field.name for field in dataclasses.fields(hint)} - {"cause"}     # which is not sent
            for name, of_field in typing.get_type_hints(hint).items():
                if name in fields:
                    yield from classes_of(of_field)
    for argument in typing.get_args(hint):
        yield from classes_of(argument)


@pytest.mark.parametrize(
    "message", [GenerationRequest, Delta, PromptProgress, InferenceRequest, InferenceResponse]
)
def test_the_classes_of_all_fields_can_be_read(message: type) -> None:
    assert set(classes_of(message)) <= set(MESSAGE_CLASSES)


@given(
    st.sampled_from([one for one in DataType if one is not DataType.BF16]),
    st.lists(st.integers(0, 4), max_size=3),
    st.booleans(),
)
def test_tensors_of_all_types_and_shapes_cross(data_type, shape, transposed):
    array = np.arange(int(np.prod(shape))).reshape(shape).astype(data_type.numpy)
    if data_type is DataType.BYTES:
        array = np.array([b"%d" % number for number in array.flat] or [], dtype=object).reshape(shape)
    other = np.arange(5, dtype=np.float64)
    sent = [Tensor("a", array.T if transposed else array, data_type=data_type), Tensor("b", other)]
    [first, second] = crossed(sent)
    assert (first.name, first.data_type, first.shape) == ("a", data_type, sent[0].shape)
    assert first.array.tolist() == sent[0].array.tolist()
    assert second.array.tolist() == other.tolist()
    assert second.array.flags.aligned
    assert second.array.flags.writeable


def test_an_array_is_sent_without_a_copy() -> None:
    array = np.zeros(1000)
    assert any(part.obj is array for part in encoded(array) if isinstance(part, memoryview))


def test_errors_cross_with_their_attributes() -> None:
    texts = {"message": "m", "remedy": "r", "field": "f"}
    attributes = {**texts, "retry_after_s": 2.0, "status": Status.INTERNAL}
    for kind in vars(errors).values():
        if not (isinstance(kind, type) and issubclass(kind, GenserveError)):
            continue
        error = kind.__new__(kind, "m")
        error.__dict__.update(attributes)
        arrived = crossed(error)
        assert type(arrived) is kind
        assert vars(arrived) == vars(error)
        assert str(arrived) == "m (r)"
    assert crossed(Overloaded("full", retry_after_s=2.0)).retry_after_s == 2.0
    assert crossed(InferenceError("x")).status is Status.INVALID_ARG


@pytest.mark.parametrize("function", [os.getpid, eval, pickle.loads, GenserveError.__init__])
def test_a_name_that_is_no_part_of_a_message_is_not_looked_up(function: Any) -> None:
    content = bytearray(4) + pickle.dumps(function)
    with pytest.raises(UnreadableMessage, match="is no part of a message"):
        decoded(bytearray(content))


@given(st.binary(max_size=64))
def test_damaged_messages_raise_one_error(content: bytes) -> None:
    with contextlib.suppress(UnreadableMessage):
        decoded(bytearray(content))
