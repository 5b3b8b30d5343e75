"""OpenAI protocol: what the bodies and the answers of its routes have in common.

A field that OpenAI knows and this server does not honour is refused by name, unless its value asks for
nothing. A field that nobody knows is ignored, and named in the header `x-genserve-ignored`, as is a field
without effect.
"""

from __future__ import annotations

import json
import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import ConfigDict, Field

from genserve.completion import Completion, Delta, FinishReason, Usage, likeliest
from genserve.errors import GenserveError, InvalidRequest
from genserve.prompt import Prompt
from genserve.sampling.param_table import MAX_BEST_OF, MAX_TOP_LOGPROBS
from genserve.sampling.sampling_params import SamplingParams, sampling_params, unused_parameters
from genserve.server.decoding_fields import DecodingFields, Texts
from genserve.server.error_responses import openai_error, renamed
from genserve.server.generation_handler import add_ignored_header
from genserve.server.request_body import Body
from genserve.server.services import Open, Services
from genserve.server.sse_response import EventStream, Frames, event, read_all
from genserve.text.detokenizer import Detokenizer
from genserve.text.tokenizer import Tokenizer

__all__ = ["FINISH", "Chunks", "OpenAIBody", "StreamOptions", "best_choices", "head", "respond", "usage"]


# What huggingface_hub's InferenceClient writes for "the model at this URL".
_ANY_MODEL = frozenset({"dummy", "tgi"})
# Labels for OpenAI's own bookkeeping; they change nothing in an answer.
_INERT = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
_REMEDIES = {
    "chat_template": "a template is a program, and none comes over the wire: "
    "put chat_template.jinja into the model's tokenizer stage",
}
MAX_CHOICES = 128


class StreamOptions(Body):
    """Options of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: bool | None = None     # padding against traffic analysis: never added


class OpenAIBody(DecodingFields):
    """Base of the bodies of `/v1`; extras beyond OpenAI's have vLLM's names.

    Attributes:
        neutral: known and not honoured: the values with which a client asks for nothing.
    """

    model_config = ConfigDict(extra="allow")
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    best_of: int | None = Field(default=None, ge=1, le=MAX_BEST_OF)
    stop: Texts = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: int | None = None
    logprob_token_ids: list[int] | None = None
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    response_format: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @abstractmethod
    def prompts(self) -> Sequence[Prompt]:
        """The prompts in their order; raises InvalidRequest."""

    @abstractmethod
    def params(self) -> SamplingParams:
        """The sampling parameters; raises InvalidRequest."""

    def sampling(self, *, max_tokens: int | None, **others: Any) -> SamplingParams:
        """The sampling parameters that both routes have, and others; raises InvalidRequest."""
        return sampling_params(
            {
                **self.said(),
                "max_tokens": max_tokens,
                "temperature": self._default_temperature if self.temperature is None else self.temperature,
                "best_of": self.num_drawn if self.num_drawn > self.num_choices else 1,
                "top_k": self.top_k or 0,
                "stop": self.stop,
                # OpenAI's seeds are signed.
                "seed": None if self.seed is None else self.seed % 2**64,
                "logprob_token_ids": self.logprob_token_ids,
                "prompt_logprobs": self.prompt_logprobs,
                "structured_outputs": self.form_beside(self.response_format, field="response_format"),
                **others,
            }
        )

    def detokenizer(self, tokenizer: Tokenizer) -> Detokenizer:
        """A fresh detokenizer for an answer, as the request wants its text."""
        return tokenizer.detokenizer(
            skip_special_tokens=self.skip_special_tokens is not False,
            spaces_between_special_tokens=self.spaces_between_special_tokens is not False,
        )

    @property
    def _default_temperature(self) -> float:
        return 0.0 if self.use_beam_search else 1.0

    @property
    def num_choices(self) -> int:
        """How many answers to each prompt are returned."""
        return self.n or 1

    @property
    def num_drawn(self) -> int:
        """How many answers to each prompt are made, of which the likeliest are returned."""
        return self.best_of or self.num_choices

    def names(self) -> dict[str, str]:
        """Our names of what can be wrong, and this request's."""
        return {"structured_outputs": "response_format"} if self.structured_outputs is None else {}

    @property
    def model_name(self) -> str | None:
        """The model's name; None: the only one."""
        return None if self.model in _ANY_MODEL else self.model

    @property
    def wants_usage(self) -> bool:
        """Whether a stream shall end with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def check(self) -> None:
        """Refuse what we do not honour.

        Raises:
            InvalidRequest: a field asks for something that OpenAI has and we do not, or two contradict.
        """
        for name, value in (self.model_extra or {}).items():
            if name in self.neutral and value is not None and value not in self.neutral[name]:
                remedy = _REMEDIES.get(name, "leave it out")
                raise InvalidRequest(f"{name} is not supported", field=name, remedy=remedy)
        if self.num_drawn < self.num_choices:
            raise InvalidRequest("best_of must be at least n", field="best_of")
        if self.stream and self.num_drawn > self.num_choices:
            raise InvalidRequest("best_of cannot be streamed", field="best_of", remedy="leave stream out")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream: true", field="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs needs stream: false", field="prompt_logprobs")

    def unknown(self) -> list[str]:
        """The fields that nobody knows."""
        return [name for name in self.model_extra or {} if name not in self.neutral and name not in _INERT]


_Asked = TypeVar("_Asked", bound=OpenAIBody)

FINISH = {
    FinishReason.END_OF_SEQUENCE: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.REPETITION: "repetition",
}


def head(opened: Open, kind: str, *, id_prefix: str) -> dict[str, Any]:
    """Return the fields that every answer, and every chunk of one, begins with."""
    return {
        "id": f"{id_prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": opened.model.name,
        "system_fingerprint": f"genserve-{opened.model.precision}",
    }


def usage(usages: Sequence[Usage], *, n: int) -> dict[str, Any]:
    """Return the usage of a request whose choices, `n` to each prompt, had these; a prompt counts once."""
    prompt_tokens = sum(one.prompt_tokens for one in usages[::n])
    completion_tokens = sum(one.completion_tokens for one in usages)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in usages[::n])},
    }


def best_choices(completions: Sequence[Completion], *, n: int, num_drawn: int) -> list[Completion]:
    """Return, of so many answers to each prompt, the `n` likeliest, the best first; if `n`, all in order."""
    if num_drawn == n:
        return list(completions)
    blocks = [completions[start : start + num_drawn] for start in range(0, len(completions), num_drawn)]
    return [block[place] for block in blocks for place in likeliest(block)[:n]]


async def respond(
    body: _Asked,
    services: Services,
    request: Request,
    *,
    frames: Callable[[Open, _Asked], Frames],
    answer: Callable[[Open, _Asked, list[Delta]], dict[str, Any]],
) -> Response:
    """Answer in the way that was asked for: in `frames` as they come, or with one `answer` of all deltas.

    Raises:
        InvalidRequest: in the words of the body; see `OpenAIBody.check`, `Services.open`.
        ClientLeft, GenserveError: see `Services.open`, `read_all`; a stream that has begun carries what
            goes wrong as an event.
    """
    body.check()
    try:
        opened = await services.open(body.model_name, body.prompts(), body.params(), n=body.num_choices)
    except InvalidRequest as error:
        raise renamed(error, body.names()) from None
    response: Response
    if body.stream:
        response = EventStream(opened.stream, frames(opened, body))
    else:
        response = JSONResponse(answer(opened, body, await read_all(opened.stream, request)))
    add_ignored_header(response, [*body.unknown(), *unused_parameters(opened.params)])
    return response


class Chunks:
    """The events of one streamed answer, but its deltas: `Frames` of both routes are made of it.

    All that does not change is written once.
    """

    def __init__(self, opened: Open, body: OpenAIBody, *, kind: str, id_prefix: str) -> None:
        """Begin an answer; see `head`."""
        self._head = json.dumps(head(opened, kind, id_prefix=id_prefix))[:-1]
        # Where the last chunk is the usage, the others say that it comes.
        self._with_usage = body.wants_usage
        self._after = '}], "usage": null}\n\n' if self._with_usage else "}]}\n\n"
        self._n = body.num_choices
        self._usages: list[Usage | None] = [None] * len(opened.seeds)

    def chunk(self, choice: int, fields: str, *, beside: str = "") -> bytes:
        """Return a chunk of one choice; its fields behind `index`, and those `beside` it, are JSON."""
        return f'data: {self._head}{beside}, "choices": [{{"index": {choice}, {fields}{self._after}'.encode()

    def ending(self, delta: Delta) -> bytes:
        """Return what follows the last delta of a choice: nothing, or behind the last of all the usage."""
        self._usages[delta.choice] = delta.usage
        usages = [one for one in self._usages if one is not None]
        if not self._with_usage or len(usages) < len(self._usages):
            return b""
        return event(f'{self._head}, "choices": [], "usage": {json.dumps(usage(usages, n=self._n))}}}')

    def start(self) -> bytes:
        """See `Frames`: nothing."""
        return b""

    def error(self, error: GenserveError) -> bytes:
        """See `Frames`."""
        return event(json.dumps(openai_error(error)))

    def end(self) -> bytes:
        """See `Frames`."""
        return event("[DONE]")
