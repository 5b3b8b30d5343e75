"""OpenAI completions: `/v1/completions`, the older route, whose prompts are plain text or token ids.

A prompt is text or token ids, or there is a list of such; the choices of prompt p are numbered
`p * n` and on. With `echo` and `logprobs` a prompt is scored; `max_tokens: 0` requests nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from fastapi import Request
from fastapi.responses import Response
from pydantic import ConfigDict, Field, ValidationError, WrapValidator

from genserve.completion import Completion, Delta, FinishReason
from genserve.errors import InvalidRequest
from genserve.prompt import COMPLETION_TOKENS
from genserve.sampling.param_table import Range
from genserve.sampling.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from genserve.server.access.access_control import INFERENCE
from genserve.server.dialects.decoding_fields import parameter
from genserve.server.dialects.generation_handler import AnswerResponse, SubmittedRequest, handle_generation
from genserve.server.dialects.logprob_formats import CompletionLogprobs, prompt_logprobs
from genserve.server.dialects.openai.protocol import OpenAIBody, OpenAIFrames, choose, head, usage_fields
from genserve.server.error_formats import OPENAI_ERRORS
from genserve.server.http.request_body import Items
from genserve.server.http.sse_response import documented
from genserve.server.route import Router, rules
from genserve.server.services import SharedServices
from genserve.text.tokenizer import Tokenizer

router = Router(prefix="/v1", tag="OpenAI", errors=OPENAI_ERRORS)


def _one_of_four(value: Any, validate: Callable[[Any], Any]) -> Any:
    """Report one error for a bad prompt, not one for each of the four types."""
    try:
        return validate(value)
    except ValidationError:
        raise ValueError("must be text, token ids, or a list of texts or of lists of token ids") from None


# A text, its token ids, or a list of such.
Texts = Annotated[str | Items[str] | Items[int] | Items[Items[int]], WrapValidator(_one_of_four)]


class CompletionBody(OpenAIBody):
    """Body of `POST /v1/completions`."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"prompt": "The sea is", "max_tokens": 16}]})
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"suffix": ("",)}

    prompt: Texts = Field(description="A text, its token ids, or a list of such; each gets its own answers.")
    max_tokens: int | None = parameter(
        "max_tokens",
        default=COMPLETION_TOKENS,
        bounds=Range(0),
        description="This number of tokens ends the answer. 0: only the prompt is scored; needs `echo`.",
    )
    echo: bool | None = Field(
        default=None,
        description="The answer begins with the prompt; with `logprobs`, the prompt is scored, too.",
        json_schema_extra={"default": False},
    )
    logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="Report the log-probability of each token of the answer, and those of this number of "
        "most likely tokens in its place.",
    )

    def prompts(self) -> list[str] | list[list[int]]:
        """See `GenerationBody`."""
        match self.prompt:
            case []:
                raise InvalidRequest("prompt is empty", field="prompt", remedy="give at least one token")
            case str():
                return [self.prompt]
            case [int(), *_]:
                return [[*self.prompt]]
            case _:
                return [*self.prompt]

    @property
    def answerless(self) -> bool:
        """Whether only the prompt is requested."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def scores(self) -> int | None:
        """The number of most likely tokens to return per token of the prompt; None: no log-probabilities."""
        of_echo = self.logprobs if self.echo else None
        return of_echo if self.prompt_logprobs is None else self.prompt_logprobs

    def params(self) -> SamplingParams:
        """See `GenerationBody`."""
        if self.echo and self.truncate_prompt_tokens is not None:
            raise InvalidRequest("echo cannot be combined with truncate_prompt_tokens", field="echo")
        return self.sampling(
            max_tokens=1 if self.answerless else self.max_tokens,
            logprobs=self.logprobs is not None,
            # As in vLLM, the requested tokens replace the most likely ones.
            top_logprobs=0 if self.logprob_token_ids else self.logprobs or 0,
            prompt_logprobs=self.scores,
        )

    @property
    def defaults(self) -> Mapping[str, Any]:
        """See `OpenAIFields`."""
        return {**super().defaults, "max_tokens": COMPLETION_TOKENS}

    def names(self) -> dict[str, str]:
        """See `GenerationBody`."""
        by_echo = self.prompt_logprobs is None and self.echo
        return super().names() | ({"prompt_logprobs": "echo"} if by_echo else {})

    def echoes(self, tokenizer: Tokenizer) -> list[str]:
        """Return the text before the answers of each prompt: with `echo`, the prompt."""
        if not self.echo:
            return [""] * len(self.prompts())
        return [p if isinstance(p, str) else tokenizer.decode(p) for p in self.prompts()]

    def requested_part(self, delta: Delta) -> Delta:
        """Return the delta; without its token if only the prompt is requested."""
        if not self.answerless:
            return delta
        usage = replace(delta.usage, completion_tokens=0) if delta.usage else None
        finish_reason = delta.finish_reason and FinishReason.LENGTH
        scored = Delta(text="", token_ids=(), prompt_logprobs=delta.prompt_logprobs, choice=delta.choice)
        return replace(scored, finish_reason=finish_reason, usage=usage)


@router.post("/completions", responses=documented("text/event-stream"))
@rules(INFERENCE, rejects_early=True)
async def completions(body: CompletionBody, services: SharedServices, request: Request) -> Response:
    """Complete prompts, whole or as server-sent events."""
    return await handle_generation(body, services, request, frames=_CompletionFrames, answer=_answer)


class _CompletionFrames(OpenAIFrames):
    """The chunks of a streamed completion."""

    no_fields = '"text": "", "logprobs": null, "finish_reason": null'

    def __init__(self, submitted: SubmittedRequest, body: CompletionBody) -> None:
        self._requested_part = body.requested_part
        self._choices = _choices(submitted, body)
        super().__init__(submitted, body, kind="text_completion", id_prefix="cmpl")

    def delta(self, delta: Delta) -> bytes:
        delta = self._requested_part(delta)
        fields = self._choices[delta.choice].part(delta)
        self.count(delta)
        if delta.finish_reason is not None:
            return self.last_chunk(delta, _written(fields))
        return self.chunk(delta.choice, _written(fields)) if any(fields.values()) else b""


def _written(fields: Mapping[str, Any]) -> str:
    """Return the JSON without braces; field by field, since `json.dumps` is fast only for strings."""
    return ", ".join(
        f'"{name}": {"null" if value is None else json.dumps(value)}' for name, value in fields.items()
    )


class ChoiceWriter:
    """Writes one choice, whole or in parts."""

    def __init__(self, submitted: SubmittedRequest, body: CompletionBody, *, prompt: int, echo: str) -> None:
        tokenizer, prompt_ids = submitted.model.tokenizer, submitted.prompts[prompt]
        self._echo = echo
        self._token_ids = bool(body.return_token_ids)
        self._prompt_ids = prompt_ids
        self._first = True
        self._scored = tokenizer if body.prompt_logprobs is not None else None
        self._logprobs = None
        if body.logprobs is not None:
            self._logprobs = CompletionLogprobs(
                tokenizer.detokenizer(shown=tokenizer.special_tokens_in([echo])),
                prompt_ids if body.echo else (),
                answer=submitted.detokenizer(prompt=prompt),
                by_id=bool(body.return_tokens_as_token_ids),
            )

    def part(self, part: Delta | Completion) -> dict[str, Any]:
        """Return the fields of the next delta, or of a whole completion, except the index."""
        text, self._echo = self._echo + part.text, ""
        fields: dict[str, Any] = {
            "text": text,
            "logprobs": self._logprobs.part(part) if self._logprobs else None,
            "finish_reason": part.finish_reason,
        }
        if part.finish_reason:
            fields["stop_reason"] = part.stop_reason
        if self._token_ids:
            fields["token_ids"] = list(part.token_ids)
        if self._token_ids and self._first:
            fields["prompt_token_ids"] = list(self._prompt_ids)
        if self._scored:
            fields["prompt_logprobs"] = prompt_logprobs(self._scored, self._prompt_ids, part.prompt_logprobs)
        self._first = False
        return fields


def _choices(submitted: SubmittedRequest, body: CompletionBody) -> list[ChoiceWriter]:
    return [
        ChoiceWriter(submitted, body, prompt=prompt, echo=echo)
        for prompt, echo in enumerate(body.echoes(submitted.model.tokenizer))
        for _ in range(body.num_choices)
    ]


def _answer(submitted: SubmittedRequest, body: CompletionBody, deltas: list[Delta]) -> Response:
    completions, usages = choose(body, [body.requested_part(delta) for delta in deltas])
    writers = _choices(submitted, body)
    choices = [
        {"index": index} | writer.part(completion)
        for index, (writer, completion) in enumerate(zip(writers, completions, strict=True))
    ]
    answer = head(submitted, "text_completion", id_prefix="cmpl")
    usage = usage_fields(submitted, usages, num_drawn=body.num_drawn)
    return AnswerResponse(answer | {"choices": choices, **usage})
