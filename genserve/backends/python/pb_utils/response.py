"""Response: what a model answers to one request."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from genserve import inference as inner
from genserve.backends.python.pb_utils.error import (
    TritonError,
    TritonModelException,
    error_of,
    inference_error,
)
from genserve.backends.python.pb_utils.tensor import Tensor

if TYPE_CHECKING:
    from genserve.backends.python.calls import Answers

__all__ = ["InferenceResponse", "ResponseIterator", "checked_parameters", "parameters_json"]


class InferenceResponse:
    """Output tensors, or an error; if both are given, the error wins."""

    __slots__ = ("_error", "_parameters", "_tensors")

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, inner.Parameter] | None = None,
    ) -> None:
        """Answer.

        Args:
            output_tensors: those that were not asked for, or that the config does not declare, are left out.
            error: in place of tensors.
            parameters: of the response: booleans, integers and strings.

        Raises:
            TritonModelException: a tensor is None, or a parameter of another type.
        """
        self._tensors = list(output_tensors)
        for tensor in self._tensors:
            if tensor is None:
                raise TritonModelException("Output tensor for inference response should not be empty.")
            if not isinstance(tensor, Tensor):
                raise TypeError(f"InferenceResponse(output_tensors: list of Tensor), got {type(tensor)}")
        if error is not None and not isinstance(error, TritonError):
            raise TypeError(f"InferenceResponse(error: TritonError), got {type(error)}")
        self._error = error
        self._parameters: Mapping[str, inner.Parameter] = checked_parameters(parameters) if parameters else {}

    @classmethod
    def _of(cls, response: inner.InferenceResponse) -> InferenceResponse:
        self = cls.__new__(cls)
        self._tensors = [Tensor._of(tensor) for tensor in response.outputs]
        self._error = None if response.error is None else error_of(response.error)
        self._parameters = response.parameters
        return self

    def _unwrapped(self, requested: Sequence[str]) -> inner.InferenceResponse:
        if self._error is not None:
            return inner.InferenceResponse(error=inference_error(self._error))
        outputs = tuple(tensor._wrapped for tensor in self._tensors if tensor._wrapped.name in requested)
        return inner.InferenceResponse(outputs=outputs, parameters=self._parameters)

    def output_tensors(self) -> list[Tensor]:
        """The tensors; of an answer to a BLS call, none if it has an error."""
        return self._tensors

    def has_error(self) -> bool:
        """Whether it is an error."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """The error."""
        return self._error

    def parameters(self) -> str:
        """The parameters of the response, as JSON."""
        return parameters_json(self._parameters)


class ResponseIterator:
    """The responses of one BLS call, as they come; once all have come, they can be read again."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._coming = map(InferenceResponse._of, answers)
        self._come: list[InferenceResponse] = []
        self._again: Iterator[InferenceResponse] | None = None

    def __iter__(self) -> ResponseIterator:
        if self._again is not None:
            self._again = iter(self._come)
        return self

    def __next__(self) -> InferenceResponse:
        if self._again is not None:
            return next(self._again)
        try:
            response = next(self._coming)
        except StopIteration:
            self._again = iter(())
            raise
        self._come.append(response)
        return response

    def cancel(self) -> None:
        """Tell the model that no more responses are wanted."""
        self._answers.cancel()


def checked_parameters(parameters: Mapping[str, inner.Parameter]) -> dict[str, inner.Parameter]:
    """Return parameters as they may be sent.

    Raises:
        TritonModelException: a key that is no string, a value that is not a boolean, integer or string, or
            an integer that no protocol can send.
    """
    for key, value in parameters.items():
        if not isinstance(key, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(key)}")
        if not isinstance(value, (bool, int, str)):
            raise TritonModelException(
                f"Expect parameters values to have type bool/int/str, found type {type(value)}"
            )
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise TritonModelException(
                f"Expect parameters values of type int to fit in 64 bits with their sign: '{key}' does not"
            )
    return dict(parameters)


def parameters_json(parameters: Mapping[str, inner.Parameter]) -> str:
    """Return parameters as models read them."""
    return json.dumps(dict(parameters), separators=(",", ":"), ensure_ascii=False) if parameters else "{}"
