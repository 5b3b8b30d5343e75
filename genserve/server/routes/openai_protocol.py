"""OpenAI protocol: the common part of the bodies and answers of OpenAI's routes.

A field of OpenAI's that would change what an answer is, and that this server does not support, is rejected
by name, unless its value asks for nothing. All other fields (`service_tier`, `reasoning_effort`, fields that
nobody knows) are ignored, and named in the header `x-genserve-ignored`, as is a parameter without effect.
"""

from __future__ import annotations

import json
import time
import uuid
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import ConfigDict, Field

from genserve.completion import Completion, Delta, FinishReason, Usage, join_choices, likeliest
from genserve.errors import GenserveError, InvalidRequest
from genserve.prompt import Prompt
from genserve.sampling.param_table import Range
from genserve.sampling.sampling_params import (
    MAX_BEST_OF,
    MAX_TOP_LOGPROBS,
    SamplingParams,
    sampling_params,
    unused_parameters,
)
from genserve.server.decoding_fields import COMMON, DecodingFields, Texts, parameter
from genserve.server.error_responses import openai_error
from genserve.server.generation_handler import SubmittedRequest
from genserve.server.request_body import Body, Items
from genserve.server.sse_response import Frames, event
from genserve.text.detokenizer import Detokenizer
from genserve.text.tokenizer import Tokenizer

# What huggingface_hub's InferenceClient writes for "the model at this URL".
_ANY_MODEL = frozenset({"dummy", "tgi"})
MAX_CHOICES = 128
_SEEDS = Range(-(2**63), 2**64 - 1)     # OpenAI's are signed
FINISH_REASONS = {
    FinishReason.END_OF_SEQUENCE: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.REPETITION: "repetition",
}


class StreamOptions(Body):
    """Options of a streamed answer."""

    include_usage: bool = Field(default=False, description="Send the usage in the last chunk.")
    continuous_usage_stats: bool = Field(       # vLLM's
        default=False, description="With `include_usage`: each chunk has the usage so far."
    )
    include_obfuscation: bool | None = Field(
        default=None, description="Without effect: no padding against traffic analysis is added."
    )


# Fields of chats and Responses.
ParallelToolCalls: TypeAlias = Annotated[
    bool | None,
    Field(description="Whether one answer may have several calls.", json_schema_extra={"default": True}),
]
ChatTemplateKwargs: TypeAlias = Annotated[
    dict[str, Any] | None, Field(description="Variables of the model's chat template.")
]


class OpenAIFields(DecodingFields):
    """Base of the bodies of `/v1`; extras beyond OpenAI's have vLLM's names.

    Attributes:
        unsupported: the fields that are not supported, with the values that have no effect.
        remedies: what to do instead of giving such a field, if leaving it out is not enough.
    """

    model_config = ConfigDict(extra="allow")
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    remedies: ClassVar[Mapping[str, str]] = {}

    model: str | None = Field(
        default=None,
        description="The name of a model, as `/v1/models` lists them; not needed if there is only one.",
        json_schema_extra=COMMON,
    )
    temperature: float | None = parameter("temperature", default=1.0)
    stop: Texts = parameter("stop")
    seed: int | None = parameter("seed", bounds=_SEEDS, ge=_SEEDS.low, le=_SEEDS.high)
    stream: bool | None = Field(
        default=None,
        description="Send the answer as server-sent events while it is generated.",
        json_schema_extra=COMMON | {"default": False},
    )
    stream_options: StreamOptions | None = Field(
        default=None, description="Options of a streamed answer. Needs `stream`."
    )
    top_k: int | None = parameter("top_k", bounds=Range(-1, 2**31 - 1))

    @abstractmethod
    def params(self) -> SamplingParams:
        """See `GenerationBody`."""

    def sampling(self, **others: Any) -> SamplingParams:
        """Return the sampling parameters of these fields, and others; raises InvalidRequest."""
        return sampling_params(
            {
                **self.given(),
                **({} if self.temperature is None else {"temperature": self.temperature}),
                "seed": None if self.seed is None else self.seed % 2**64,
                **others,
            },
            defaults=self.defaults,
        )

    def detokenizer(self, tokenizer: Tokenizer) -> Detokenizer:
        """Return a fresh detokenizer for an answer, with the request's options."""
        return tokenizer.detokenizer(
            skip_special_tokens=self.skip_special_tokens is not False,
            spaces_between_special_tokens=self.spaces_between_special_tokens is not False,
        )

    @property
    def defaults(self) -> Mapping[str, Any]:
        """The dialect's defaults, for what neither the request nor the model gives."""
        return {} if self.use_beam_search else {"temperature": 1.0}

    @property
    def model_name(self) -> str | None:
        """The model's name; None: the only model."""
        # Hugging Face's JavaScript client writes the URL of the server.
        is_url = self.model is not None and self.model.startswith(("http://", "https://"))
        return None if self.model in _ANY_MODEL or is_url else self.model

    def check(self) -> None:
        """Reject unsupported fields.

        Raises:
            InvalidRequest: a field of OpenAI's is not supported, or two fields contradict each other.
        """
        for name, value in (self.model_extra or {}).items():
            if name in self.unsupported and value is not None and value not in self.unsupported[name]:
                remedy = self.remedies.get(name, "leave it out")
                raise InvalidRequest(f"{name} is not supported", field=name, remedy=remedy)
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream: true", field="stream_options")

    def ignored(self, params: SamplingParams) -> list[str]:
        """Return the fields and the sampling parameters without effect."""
        extra = (name for name in self.model_extra or {} if name not in self.unsupported)
        return [*extra, *unused_parameters(params)]


class OpenAIBody(OpenAIFields):
    """Base of the bodies of chats and completions, which can ask for several answers."""

    max_tokens: int | None = parameter("max_tokens")
    n: int | None = Field(
        default=None,
        ge=1,
        le=MAX_CHOICES,
        description="How many answers are returned per prompt.",
        json_schema_extra={"default": 1},
    )
    best_of: int | None = parameter("best_of", ge=1, le=MAX_BEST_OF)
    logprob_token_ids: Items[int] | None = parameter("logprob_token_ids")
    prompt_logprobs: int | None = parameter("prompt_logprobs", ge=0, le=MAX_TOP_LOGPROBS)
    response_format: dict[str, Any] | None = Field(
        default=None,
        description='The form of the text: `{"type": "json_schema", "json_schema": {"name": ..., "schema": '
        '...}}`, `{"type": "json_object"}` or `{"type": "text"}`. `structured_outputs` has other forms.',
        json_schema_extra=COMMON,
    )
    return_token_ids: bool | None = Field(
        default=None,
        description="Return the token ids of the prompt and of the answer, too.",
        json_schema_extra={"default": False},
    )
    return_tokens_as_token_ids: bool | None = Field(
        default=None,
        description="In log-probabilities, write tokens as `token_id:ID` instead of their text.",
        json_schema_extra={"default": False},
    )

    @abstractmethod
    def prompts(self) -> Sequence[Prompt]:
        """See `GenerationBody`."""

    def sampling(self, **others: Any) -> SamplingParams:
        """Return the sampling parameters of both routes, and others; raises InvalidRequest."""
        return super().sampling(
            best_of=self.num_drawn if self.num_drawn > self.num_choices else 1,
            structured_outputs=self.format_or(self.response_format, field="response_format"),
            **others,
        )

    @property
    def num_choices(self) -> int:
        """The number of answers to return per prompt."""
        return self.n or 1

    @property
    def num_drawn(self) -> int:
        """The number of answers to draw per prompt, of which the likeliest are returned."""
        return self.best_of or self.num_choices

    def names(self) -> dict[str, str]:
        """See `GenerationBody`."""
        return {"structured_outputs": "response_format"} if self.structured_outputs is None else {}

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_running_usage(self) -> bool:
        """Whether each chunk of a stream has the usage so far."""
        options = self.stream_options
        return options is not None and options.include_usage and options.continuous_usage_stats

    def check(self) -> None:
        """See `OpenAIFields`."""
        super().check()
        if self.num_drawn < self.num_choices:
            raise InvalidRequest("best_of must be at least n", field="best_of")
        if self.stream and self.num_drawn > self.num_choices:
            raise InvalidRequest("best_of cannot be streamed", field="best_of", remedy="leave stream out")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs needs stream: false", field="prompt_logprobs")


def choose(body: OpenAIBody, deltas: Sequence[Delta]) -> tuple[list[Completion], dict[str, Any]]:
    """Return the completions of a whole answer, chosen from all that were drawn, and the usage."""
    drawn = join_choices(deltas)
    completions = _best(drawn, n=body.num_choices, num_drawn=body.num_drawn)
    return completions, _usage([completion.usage for completion in drawn], num_drawn=body.num_drawn)


def head(submitted: SubmittedRequest, kind: str, *, id_prefix: str) -> dict[str, Any]:
    """Return the first fields of an answer, and of each of its chunks."""
    return {
        "id": f"{id_prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": submitted.model.name,
        "system_fingerprint": f"genserve-{submitted.model.precision}",
    }


def _usage(usages: Sequence[Usage], *, num_drawn: int) -> dict[str, Any]:
    """Return the usage of a request from that of its choices, `num_drawn` per prompt; prompts count once."""
    prompt_tokens = sum(usage.prompt_tokens for usage in usages[::num_drawn])
    completion_tokens = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages[::num_drawn])},
    }


def reasoning_usage(num_tokens: int) -> dict[str, Any]:
    """Return the field of the usage for the tokens of reasoning, if there are any."""
    return {"completion_tokens_details": {"reasoning_tokens": num_tokens}} if num_tokens else {}


def _best(completions: Sequence[Completion], *, n: int, num_drawn: int) -> list[Completion]:
    """Return the `n` likeliest of the `num_drawn` completions of each prompt, the best first."""
    if num_drawn == n:
        return list(completions)
    by_prompt = [completions[start : start + num_drawn] for start in range(0, len(completions), num_drawn)]
    return [drawn[choice] for drawn in by_prompt for choice in likeliest(drawn)[:n]]


class OpenAIFrames(Frames):
    """Base of both routes' `Frames`: everything except `delta`. Text that does not change is encoded once."""

    def __init__(self, submitted: SubmittedRequest, body: OpenAIBody, *, kind: str, id_prefix: str) -> None:
        """Begin a streamed answer whose chunks are objects of a `kind`."""
        self._head = json.dumps(head(submitted, kind, id_prefix=id_prefix))[:-1]
        # If the last chunk is the usage, all others have the field too.
        self._with_usage = body.wants_usage
        self._tail = '}], "usage": null}\n\n' if self._with_usage else "}]}\n\n"
        self._num_choices = body.num_choices
        self._usages: list[Usage | None] = [None] * len(submitted.seeds)
        self._num_reasoning_tokens = 0
        self._running_usages: list[Usage] = []      # by choice, if each chunk has the usage so far
        if body.wants_running_usage:
            lengths = [len(ids) for ids in submitted.prompts for _ in range(self._num_choices)]
            self._running_usages = [Usage(prompt_tokens=n, completion_tokens=0) for n in lengths]

    def chunk(self, choice: int, fields: str, *, top_fields: str = "") -> bytes:
        """Return a chunk with one choice.

        Args:
            choice: its index.
            fields: of the choice, after `index`, as JSON without braces.
            top_fields: of the chunk, as JSON with a comma in front.
        """
        tail = self._tail
        if self._running_usages:
            tail = f'}}], "usage": {json.dumps(_usage([self._running_usages[choice]], num_drawn=1))}}}\n\n'
        return f'data: {self._head}{top_fields}, "choices": [{{"index": {choice}, {fields}{tail}'.encode()

    def count(self, delta: Delta) -> None:
        """Add the tokens of a delta to the usage so far, before its chunks are written."""
        if self._running_usages:
            usage = self._running_usages[delta.choice]
            num_tokens = usage.completion_tokens + len(delta.token_ids)
            self._running_usages[delta.choice] = replace(usage, completion_tokens=num_tokens)

    def ending(self, delta: Delta, *, num_reasoning_tokens: int = 0) -> bytes:
        """Return the event after the last delta of a choice: after that of all choices, the usage."""
        self._usages[delta.choice] = delta.usage
        self._num_reasoning_tokens += num_reasoning_tokens
        usages = [usage for usage in self._usages if usage is not None]
        if not self._with_usage or len(usages) < len(self._usages):
            return b""
        total = _usage(usages, num_drawn=self._num_choices) | reasoning_usage(self._num_reasoning_tokens)
        return event(f'{self._head}, "choices": [], "usage": {json.dumps(total)}}}')

    def error(self, error: GenserveError) -> bytes:
        """See `Frames`."""
        return event(json.dumps(openai_error(error)))

    def end(self) -> bytes:
        """See `Frames`."""
        return event("[DONE]")
