"""Generation request: what goes into the engine of a text model, and what comes out of it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from genserve.completion import Delta, FinishReason, Timings, Usage
from genserve.errors import GenserveError
from genserve.prompt import Prompt
from genserve.request_context import NO_KEY, KeyShare
from genserve.sampling.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GenerationRequest:
    """A valid prompt and what is to be generated for it; vLLM's EngineCoreRequest.

    It can be pickled, and is sent to the replica of a deployment as it is. Two requests are never equal.

    Attributes:
        id: the id of the client's request, for logs.
        model: the name of the text model.
        share: the share of the client's API key, which competes with other keys for the engine.
        prompt: the prompt as the client wrote it; the grammar of tool calls follows from it.
        prompt_token_ids: the prompt as the model reads it, truncated as the request asks.
        params: the sampling parameters, with the defaults of the model.
        seeds: a seed for each choice; several choices are independent, or are the answers of one beam search.
        begins_reasoning: whether the prompt ends within reasoning, which the answer continues.
        num_truncated_tokens: tokens of the prompt that were cut off, as the request asked.
        arrived_s: the time at which `params.max_time_ms` begins, by the clock of the engine.
        resumed_token_ids: the first tokens of each choice, which another engine generated and the caller has
            received; empty: the answers begin.
        ends_reasoning: whether reasoning is ended at the first token that the caller has not received.
        return_progress: whether the caller wants a `PromptProgress` after each step that reads the prompt.
        adapter: the name of the adapter of the model that answers; None: the model itself.
        is_checked: whether another process with the same model has made all that the request needs, its
            grammar included, so that a grammar needs no trial.
    """

    id: str = ""
    model: str = ""
    share: KeyShare = NO_KEY
    prompt: Prompt
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seeds: tuple[int, ...]
    begins_reasoning: bool = False
    num_truncated_tokens: int = 0
    arrived_s: float = 0.0
    resumed_token_ids: tuple[tuple[int, ...], ...] = ()
    ends_reasoning: bool = False
    return_progress: bool = False
    adapter: str | None = None
    is_checked: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        """The number of tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_choices(self) -> int:
        """The number of answers."""
        return len(self.seeds)

    @property
    def is_resumed(self) -> bool:
        """Whether the caller has received a part of an answer."""
        return any(self.resumed_token_ids)

    @property
    def deadline_s(self) -> float | None:
        """When the engine ends the answers, by its clock; None: never."""
        limit_ms = self.params.max_time_ms
        return None if limit_ms is None else self.arrived_s + limit_ms / 1000

    def rest(self, *, elapsed_s: float, received: Sequence[Sequence[int]] = ()) -> GenerationRequest:
        """Return the request for what is missing of the answers.

        Args:
            elapsed_s: the time that has passed of `params.max_time_ms`, of which 1 ms remains at least.
            received: the token ids of each choice that the caller has; empty: the caller has none.
        """
        params = self.params
        if params.max_time_ms is not None:
            left_ms = math.ceil(params.max_time_ms - 1000 * elapsed_s)
            params = replace(params, max_time_ms=max(1, left_ms))
        return replace(self, params=params, resumed_token_ids=tuple(map(tuple, received)))


class GenerationOutput(NamedTuple):
    """A new part of one choice of a request. A last delta or an error is the last output of its choice."""

    request: GenerationRequest
    choice: int
    content: Delta | GenserveError      # the `choice` of a delta is 0 here
    started_s: float | None = None      # when the first step of the choice began; None: unknown


class OutputSink(Protocol):
    """Receives the outputs of each step: one call per step and sink, not one per token."""

    def deliver(self, outputs: Sequence[GenerationOutput]) -> None:
        """Receive the outputs; called on the engine's thread, must not block."""


class AnswerRecord:
    """What a caller has received of one choice, for logs, spans and the limits of API keys.

    Attributes:
        request: the request that the choice belongs to.
        num_cached_tokens: tokens of the prompt that were in the prefix cache.
        num_new_tokens: tokens of the answer so far.
        finish_reason: why the answer ended; None: the answer still runs, or was cancelled, or failed.
        usage: the usage of the answer that has ended.
        started_s: when the first step of the choice began, `time.monotonic()`; None: unknown.
        first_token_s, last_token_s: when its first and its last token so far came; None: it has no token.
    """

    __slots__ = (
        "finish_reason",
        "first_token_s",
        "last_token_s",
        "num_cached_tokens",
        "num_new_tokens",
        "request",
        "started_s",
        "usage",
    )

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.num_cached_tokens = 0
        self.num_new_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.usage: Usage | None = None
        self.started_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.request.num_prompt_tokens

    @property
    def timings(self) -> Timings | None:
        """How long it took: as the engine says, or so far; None: it has not started, or that is unknown."""
        if self.usage is not None:
            return self.usage.timings
        if self.started_s is None:
            return None
        now_s = time.monotonic()
        first_token_s = now_s if self.first_token_s is None else self.first_token_s
        return Timings(
            queue_s=self.started_s - self.request.arrived_s,
            prefill_s=first_token_s - self.started_s,
            decode_s=(self.last_token_s or first_token_s) - first_token_s,
        )

    def add(self, output: GenerationOutput) -> None:
        """Count an output of the choice."""
        delta = output.content
        if isinstance(delta, GenserveError):
            return
        if delta.token_ids:
            self.last_token_s = time.monotonic()
            if self.first_token_s is None:
                self.first_token_s = self.last_token_s
                self.num_cached_tokens = delta.cached_tokens
            self.num_new_tokens += len(delta.token_ids)
        if self.started_s is None:
            self.started_s = output.started_s
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.usage = delta.usage
            self.num_cached_tokens = 0 if delta.usage is None else delta.usage.cached_tokens
