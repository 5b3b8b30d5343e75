"""OpenAI protocol: the common part of the bodies and answers of OpenAI's routes.

A field of OpenAI's that would change what an answer is, and that this server does not support, is rejected
by name, unless its value asks for nothing. All other fields (`service_tier`, `verbosity`, fields that nobody
knows) are ignored, and named in the header `x-genserve-ignored`, as is a parameter without effect.
"""

from __future__ import annotations

import json
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import ConfigDict, Field

from genserve.completion import Completion, Delta, PromptProgress, Usage, join_choices, likeliest
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
from genserve.server.dialects.decoding_fields import COMMON, DecodingFields, Texts, parameter
from genserve.server.dialects.generation_handler import SubmittedRequest
from genserve.server.dialects.timings import prompt_progress, requested_fields, timings_fields
from genserve.server.error_formats import openai_error
from genserve.server.http.request_body import Items, TolerantBody
from genserve.server.http.sse_response import Frames, event

# What huggingface_hub's InferenceClient writes for "the model at this URL".
_ANY_MODEL = frozenset({"dummy", "tgi"})
MAX_CHOICES = 128
_SEEDS = Range(-(2**63), 2**64 - 1)     # OpenAI's are signed


class StreamOptions(TolerantBody):
    """Options of a streamed answer."""

    include_usage: bool = Field(default=False, description="Send the usage in the last chunk.")
    continuous_usage_stats: bool = Field(       # vLLM's
        default=False, description="With `include_usage`: each chunk has the usage so far."
    )
    include_obfuscation: Any = Field(
        default=None, description="Without effect: no padding against traffic analysis is added."
    )

    @property
    def unused(self) -> list[str]:
        """The options without effect."""
        obfuscation = [] if self.include_obfuscation is None else ["include_obfuscation"]
        return [f"stream_options.{name}" for name in (*obfuscation, *(self.model_extra or {}))]


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

    def ignored(self, submitted: SubmittedRequest) -> list[str]:
        """Return the fields and the sampling parameters without effect."""
        extra = [name for name in self.model_extra or {} if name not in self.unsupported]
        options = self.stream_options.unused if self.stream_options else []
        return [*extra, *options, *unused_parameters(submitted.params)]


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
    timings_per_token: bool | None = Field(      # llama.cpp's
        default=None,
        description="In a stream, each chunk has the `timings` so far.",
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


def choose(body: OpenAIBody, deltas: Sequence[Delta]) -> tuple[list[Completion], list[Usage]]:
    """Return the completions of a whole answer, chosen from all that were drawn, and the usage of all."""
    drawn = join_choices(deltas)
    completions = _best(drawn, n=body.num_choices, num_drawn=body.num_drawn)
    return completions, [completion.usage for completion in drawn]


def usage_fields(
    submitted: SubmittedRequest, usages: Sequence[Usage], *, num_drawn: int, num_reasoning_tokens: int = 0
) -> dict[str, Any]:
    """Return the fields `usage`, `timings`, `receipt` and `cache_match` of an answer that has ended.

    Args:
        submitted: the request.
        usages: those of its choices.
        num_drawn: how many choices each prompt has.
        num_reasoning_tokens: how many tokens of the choices are reasoning.
    """
    details = {"reasoning_tokens": num_reasoning_tokens}
    timings = timings_fields(usages, num_drawn=num_drawn)
    if drafted := timings.get("timings", {}).get("draft_n", 0):
        accepted = timings["timings"]["draft_n_accepted"]
        details |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
    given = {name: count for name, count in details.items() if count}
    usage = _usage(usages, num_drawn=num_drawn) | ({"completion_tokens_details": given} if given else {})
    return {"usage": usage, **timings, **requested_fields(submitted, usages)}


def head(submitted: SubmittedRequest, kind: str, *, id_prefix: str) -> dict[str, Any]:
    """Return the first fields of an answer, and of each of its chunks."""
    return {
        "id": f"{id_prefix}-{submitted.id}",
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


def _best(completions: Sequence[Completion], *, n: int, num_drawn: int) -> list[Completion]:
    """Return the `n` likeliest of the `num_drawn` completions of each prompt, the best first."""
    if num_drawn == n:
        return list(completions)
    by_prompt = [completions[start : start + num_drawn] for start in range(0, len(completions), num_drawn)]
    return [drawn[choice] for drawn in by_prompt for choice in likeliest(drawn)[:n]]


def _members(fields: Mapping[str, Any]) -> str:
    """Return members of a JSON object, each with a comma in front."""
    return f", {json.dumps(fields)[1:-1]}" if fields else ""


class OpenAIFrames(Frames):
    """Base of both routes' `Frames`: everything except `delta`. Text that does not change is encoded once.

    Attributes:
        no_fields: the fields of a choice to which nothing is added; see `chunk`.
    """

    no_fields: ClassVar[str]

    def __init__(self, submitted: SubmittedRequest, body: OpenAIBody, *, kind: str, id_prefix: str) -> None:
        """Begin a streamed answer whose chunks are objects of a `kind`."""
        self._submitted = submitted
        self._head = json.dumps(head(submitted, kind, id_prefix=id_prefix))[:-1]
        # If the last chunk is the usage, all others have the field too.
        self._with_usage = body.wants_usage
        self._tail = '}], "usage": null}\n\n' if self._with_usage else "}]}\n\n"
        self._num_choices = body.num_choices
        self._usages: list[Usage | None] = [None] * len(submitted.seeds)
        self._num_reasoning_tokens = 0
        # What each chunk has of the choices so far, if the request asks for it.
        self._wants_running_usage = body.wants_running_usage
        self._timed_answers = submitted.stream.answers if body.timings_per_token else []
        self._running_usages: list[Usage] = []
        if body.wants_running_usage or body.timings_per_token:
            lengths = [len(ids) for ids in submitted.prompts for _ in range(self._num_choices)]
            self._running_usages = [Usage(prompt_tokens=n, completion_tokens=0) for n in lengths]

    def start(self, *, num_cached_tokens: int) -> bytes:
        """See `Frames`."""
        self._running_usages = [
            replace(usage, cached_tokens=num_cached_tokens) for usage in self._running_usages
        ]
        return b""

    def chunk(self, choice: int, fields: str, *, top_fields: str = "") -> bytes:
        """Return a chunk with one choice.

        Args:
            choice: its index.
            fields: the choice's fields after `index`, as JSON without braces.
            top_fields: more fields of the chunk, as JSON with a comma in front.
        """
        tail = self._running_tail(choice) if self._running_usages else self._tail
        return f'data: {self._head}{top_fields}, "choices": [{{"index": {choice}, {fields}{tail}'.encode()

    def _running_tail(self, choice: int) -> str:
        usage, fields = self._running_usages[choice], ""
        if self._with_usage:
            written = _usage([usage], num_drawn=1) if self._wants_running_usage else None
            fields = f', "usage": {json.dumps(written)}'
        if self._timed_answers:
            timed = replace(usage, timings=self._timed_answers[choice].timings)
            fields += _members(timings_fields([timed]))
        return f"}}]{fields}}}\n\n"

    def progress(self, progress: PromptProgress) -> bytes:
        """See `Frames`."""
        reported = _members({"prompt_progress": prompt_progress(progress)})
        return self.chunk(progress.choice, self.no_fields, top_fields=reported)

    def count(self, delta: Delta) -> None:
        """Add the tokens of a delta to the usage so far, before its chunks are written."""
        if self._running_usages:
            usage = self._running_usages[delta.choice]
            self._running_usages[delta.choice] = replace(
                usage,
                completion_tokens=usage.completion_tokens + len(delta.token_ids),
                cached_tokens=usage.cached_tokens if usage.completion_tokens else delta.cached_tokens,
            )

    def last_chunk(self, delta: Delta, fields: str, *, num_reasoning_tokens: int = 0) -> bytes:
        """Return the last chunk of a choice; after that of all choices the usage, if requested, and timings.

        Args:
            delta: the last delta of the choice.
            fields: see `chunk`.
            num_reasoning_tokens: how many tokens of the choice are reasoning.
        """
        self._usages[delta.choice] = delta.usage
        self._num_reasoning_tokens += num_reasoning_tokens
        usages = [usage for usage in self._usages if usage is not None]
        if len(usages) < len(self._usages):
            return self.chunk(delta.choice, fields)
        if not self._with_usage:
            has_timings = bool(self._timed_answers)
            total = {} if has_timings else timings_fields(usages, num_drawn=self._num_choices)
            total |= requested_fields(self._submitted, usages)
            return self.chunk(delta.choice, fields, top_fields=_members(total))
        num_reasoning = self._num_reasoning_tokens
        total = usage_fields(
            self._submitted, usages, num_drawn=self._num_choices, num_reasoning_tokens=num_reasoning
        )
        return self.chunk(delta.choice, fields) + event(f'{self._head}, "choices": []{_members(total)}}}')

    def error(self, error: GenserveError) -> bytes:
        """See `Frames`."""
        return event(json.dumps(openai_error(error)))

    def end(self) -> bytes:
        """See `Frames`."""
        return event("[DONE]")
