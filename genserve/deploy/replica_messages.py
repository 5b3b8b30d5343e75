"""Messages: what the ingress of a deployment and the replicas of its models send each other.

All messages can be pickled. Messages of calls consist of `MESSAGE_CLASSES`, arrays and Python's own types.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar

from genserve import errors
from genserve.completion import (
    CacheMatch,
    CacheMatchEnd,
    Delta,
    FinishReason,
    PromptProgress,
    Timings,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)
from genserve.deploy.replica.replica_load import ReplicaLoad
from genserve.engine.generation_request import GenerationRequest
from genserve.errors import GenserveError
from genserve.inference import InferenceRequest, InferenceResponse, RequestFlags
from genserve.prompt import Chat, Message, Reasoning, TextFormat, Tool, ToolCall
from genserve.request_context import KeyShare
from genserve.sampling.plugin_call import PluginCall
from genserve.sampling.repetition_detection import RepetitionDetection
from genserve.sampling.sampling_params import SamplingParams
from genserve.sampling.structured_outputs import JsonOptions, StructuredOutputs
from genserve.tensor import DataType, Tensor

# A response, or None, and whether it is the last; see `OnResponse`.
InferenceItem: TypeAlias = tuple[InferenceResponse | None, bool]

# The methods of `ModelReplica` that all replicas are asked.
Broadcast: TypeAlias = Literal["status", "describe", "report"]


RequestT = TypeVar("RequestT", GenerationRequest, InferenceRequest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[RequestT]):
    """A request to a replica.

    Attributes:
        identity: a value that stands for what the ingress serves, by which it has validated the request and
            will read the answer; a replica with another identity refuses the call.
        request: a generation has the choices of one prompt; `arrived_s` is of the clock of the ingress.
    """

    identity: str
    request: RequestT


_ERRORS = (
    one for one in vars(errors).values() if isinstance(one, type) and one.__module__ == errors.__name__
)
# The classes in the fields of calls and of their items; a new class in such a field needs an entry.
MESSAGE_CLASSES: tuple[Callable[..., object], ...] = (
    Call, GenerationRequest, KeyShare, SamplingParams, StructuredOutputs, JsonOptions, PluginCall,
    RepetitionDetection,
    Chat, Message, Reasoning, TextFormat, Tool, ToolCall,
    Delta, PromptProgress, FinishReason, Usage, Timings, TokenLogprob, ToolCallDelta,
    CacheMatch, CacheMatchEnd,
    InferenceRequest, InferenceResponse, RequestFlags, Tensor, DataType,
    *_ERRORS, errors.restored,
)  # fmt: skip


def plain_error(error: GenserveError) -> GenserveError:
    """Return an error that the ingress can read: without classes and attributes of a model's own."""
    kind = next(one for one in type(error).__mro__ if one in MESSAGE_CLASSES)
    assert issubclass(kind, GenserveError)
    plain = kind.__new__(kind, error.message)
    plain.__dict__.update({name: value for name, value in vars(error).items() if type(value) in _PLAIN})
    return plain


_PLAIN = (NoneType, bool, int, float, str, errors.Status)   # the types of the attributes of genserve's errors


class ReplicaSet(Protocol):
    """The replicas of one model, as the ingress calls them; each call goes to one of them.

    Closing an iterator, or cancelling who reads it, cancels the call at the replica.
    """

    def generate(self, call: Call[GenerationRequest]) -> AsyncIterator[Sequence[Delta]]:
        """Yield the deltas of a call; an item has at least one, and all deltas of one or several steps.

        It ends when each choice of the request has had its last delta.

        Raises:
            ReplicaLost: the replica died.
            VersionReplaced: no replica has the identity of the call.
            Overloaded: its queue is full.
            GenserveError: whatever the replica raised.
        """

    def load(self, identity: str) -> ReplicaLoad:
        """Return the work of the replicas with an identity that can be called, as far as it is known now."""

    async def broadcast(self, method: Broadcast) -> list[Any]:
        """Return what a method of `ModelReplica` returns at each replica that answers, in no order."""

    def infer(self, call: Call[InferenceRequest]) -> AsyncIterator[InferenceItem]:
        """Yield the responses to a request; the last item is the final one.

        Raises:
            ReplicaLost: the replica died.
            VersionReplaced: no replica has the identity of the call.
            GenserveError: the replica rejected the request.
        """
