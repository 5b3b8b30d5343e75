"""Messages: what the ingress of a deployment and the replicas of its models send each other.

All can be pickled.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from genserve.completion import Delta
from genserve.inference import InferenceRequest, InferenceResponse
from genserve.prompt import Prompt
from genserve.sampling.sampling_params import SamplingParams

# A response, or None, and whether it is the last; see `OnResponse`.
InferenceItem: TypeAlias = tuple[InferenceResponse | None, bool]

# The methods of `ModelReplica` that all replicas are asked.
Broadcast: TypeAlias = Literal["status", "describe", "report"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationCall:
    """One sequence to generate, or all answers of one beam search.

    Attributes:
        model: the name of the text model.
        prompt: as the request has it; the grammar of tool calls follows from it.
        prompt_token_ids: of the prompt, truncated as the request asks.
        begins_reasoning: whether the prompt ends within reasoning.
        params: with the model's defaults.
        seeds: one for each answer; several are the answers of a beam search.
        deadline_ms: time that is left; None: unlimited.
        request_id: of the client's request, for logs.
        resumed_token_ids: of the answers so far, one tuple for each seed, which the client has; empty: they
            begin.
    """

    model: str
    prompt: Prompt
    prompt_token_ids: tuple[int, ...]
    begins_reasoning: bool = False
    params: SamplingParams
    seeds: tuple[int, ...]
    deadline_ms: int | None = None
    request_id: str = ""
    resumed_token_ids: tuple[tuple[int, ...], ...] = ()


class ReplicaSet(Protocol):
    """The replicas of one model, as the ingress calls them; each call goes to one of them.

    Closing an iterator, or cancelling who reads it, cancels the call at the replica.
    """

    def generate(self, call: GenerationCall) -> AsyncIterator[Sequence[Delta]]:
        """Yield the deltas of a call, those of one or several steps at a time, at least one.

        `Delta.choice` is the index of the seed. It ends when each answer has had its last delta.

        Raises:
            ReplicaLost: the replica died.
            Overloaded: its queue is full.
            GenserveError: whatever the replica raised.
        """

    async def broadcast(self, method: Broadcast) -> list[Any]:
        """Return what a method of `ModelReplica` returns at each replica that answers, in no order."""

    def infer(self, request: InferenceRequest) -> AsyncIterator[InferenceItem]:
        """Yield the responses to a request; the last item is the final one.

        Raises:
            ReplicaLost: the replica died.
            GenserveError: the replica rejected the request.
        """
