from __future__ import annotations

from typing import Annotated

import pytest
from pydantic import Field, TypeAdapter, ValidationError

from genserve.errors import (
    Closed,
    ContextLengthExceeded,
    InferenceError,
    ModelFailed,
    ModelNotFound,
    Overloaded,
    Status,
    closest,
    status_of,
    suggestion,
    validation_message,
)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InferenceError("no", status=Status.ALREADY_EXISTS), Status.ALREADY_EXISTS),
        (ContextLengthExceeded("too long"), Status.INVALID_ARG),
        (ModelNotFound("no such model"), Status.NOT_FOUND),
        (Overloaded("full", retry_after_s=1), Status.UNAVAILABLE),
        (Closed("gone"), Status.UNAVAILABLE),
        (ModelFailed("nan"), Status.INTERNAL),
    ],
)
def test_an_error_has_its_own_code_or_that_of_its_nearest_ancestor(error, status) -> None:
    assert status_of(error) is status


def test_inference_error_of_a_genserve_error_is_the_error_itself() -> None:
    error = ModelFailed("nan")
    assert InferenceError.of(error) is error


def test_inference_error_of_another_exception_is_internal() -> None:
    error = InferenceError.of(KeyError("x"))
    assert isinstance(error, InferenceError)
    assert (error.status, error.message) == (Status.INTERNAL, "KeyError: 'x'")


def test_the_remedy_for_an_unknown_name_is_the_nearest_or_the_list() -> None:
    assert suggestion("pyton", known=["onnxruntime", "python"]) == "did you mean python?"
    assert suggestion("vllm", known=["onnxruntime", "python"]) == "known there: onnxruntime, python"
    assert suggestion("vllm", known=[]) == "known there: none"
    assert suggestion("Python", known=["onnxruntime", "python"]) == "did you mean python?"


def test_a_name_that_resembles_none_has_no_closest() -> None:
    assert closest("smolm2", known=["smollm2", "qwen"]) == "smollm2"
    assert closest("tea", known=["smollm2", "qwen"]) is None


def test_a_list_of_a_wrong_length_is_described_without_words_of_pydantic() -> None:
    with pytest.raises(ValidationError) as raised:
        TypeAdapter(Annotated[list[int], Field(min_length=1)]).validate_python([])
    assert validation_message(raised.value.errors()[0]) == "must have at least 1 item"
