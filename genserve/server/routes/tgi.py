"""TGI's dialect: `/generate`, `/generate_stream`, `/` and `/info`, with TGI's statuses and error words."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from genserve.completion import Completion, Delta, FinishReason, Usage, join_choices, likeliest
from genserve.errors import GenserveError, InvalidRequest
from genserve.sampling.sampling_params import MAX_BEST_OF, MAX_STOP_STRINGS, SamplingParams, unused_parameters
from genserve.server.error_responses import TGI_ERRORS, ErrorFormats, tgi_error
from genserve.server.generation_handler import SubmittedRequest, handle_generation
from genserve.server.json_response import AnswerResponse
from genserve.server.request_body import StrictRoute
from genserve.server.routes.logprob_formats import TopTokenReader, tgi_prefill
from genserve.server.routes.tgi_fields import CompatibleBody, GenerateBody
from genserve.server.services import Services, SharedServices
from genserve.server.sse_response import documented, event
from genserve.version import __version__

router = APIRouter(route_class=StrictRoute, tags=["TGI"])
ERRORS: ErrorFormats = {"/": TGI_ERRORS}

# TGI has no word for a text that was stopped because it repeats itself.
FINISH_REASONS = {reason: reason.value for reason in FinishReason} | {FinishReason.REPETITION: "length"}

_NO_TOKEN: Mapping[str, Any] = {"id": 0, "text": "", "logprob": None, "special": True}


@router.post("/generate")
async def generate(body: GenerateBody, services: SharedServices, request: Request) -> Response:
    """Complete a prompt and answer with the whole text."""
    return await _handle(_TgiRequest(body=body), services, request)


@router.post("/generate_stream", response_class=Response, responses=documented("text/event-stream"))
async def generate_stream(body: GenerateBody, services: SharedServices, request: Request) -> Response:
    """Complete a prompt and answer token by token, as server-sent events."""
    return await _handle(_TgiRequest(body=body, stream=True), services, request)


@router.post("/", responses=documented("text/event-stream"))
async def generate_or_stream(body: CompatibleBody, services: SharedServices, request: Request) -> Response:
    """Do as `/generate_stream` if `stream` is true, else as `/generate` with the answer in a list."""
    return await _handle(_TgiRequest(body=body, stream=body.stream, in_list=True), services, request)


@router.get("/info")
async def info(services: SharedServices) -> dict[str, Any]:
    """Describe the server and its first model."""
    model = services.repository.text_models[0] if services.repository.text_models else None
    return {
        "model_id": model.name if model else None,
        "max_concurrent_requests": (model.max_num_seqs if model else 0) + services.settings.max_queue,
        "max_stop_sequences": MAX_STOP_STRINGS,
        "max_best_of": MAX_BEST_OF,
        "max_input_tokens": model.max_length - 1 if model else 0,
        "max_total_tokens": model.max_length if model else 0,
        "max_batch_size": model.max_num_seqs if model else 0,
        "router": "genserve",
        "version": __version__,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _TgiRequest:
    """One request, as `GenerationBody`: the body, and how its route answers."""

    body: GenerateBody
    stream: bool = False
    in_list: bool = False       # a whole answer is a list of one object
    started_s: float = field(default_factory=time.monotonic)
    num_choices: int = 1

    @property
    def model_name(self) -> str | None:
        return self.body.model

    @property
    def has_details(self) -> bool:
        return bool(self.body.parameters.details)

    def check(self) -> None:
        parameters = self.body.parameters
        if self.stream:
            for name, neutral in (("best_of", 1), ("decoder_input_details", False)):
                if getattr(parameters, name) not in (None, neutral):
                    place = f"parameters.{name}"
                    raise InvalidRequest(f"{place} cannot be streamed", field=place, remedy="use /generate")
        elif not self.has_details:
            for name in ("top_n_tokens", "decoder_input_details", "logprobs_mode"):
                if getattr(parameters, name) not in (None, False, 0, "raw"):
                    place = f"parameters.{name}"
                    raise InvalidRequest(f"{place} needs parameters.details", field=place)

    def prompts(self) -> list[str]:
        return [self.body.inputs]

    def params(self) -> SamplingParams:
        return self.body.parameters.params(logprobs=self.stream or self.has_details)

    def names(self) -> Mapping[str, str]:
        return self.body.parameters.names()

    def ignored(self, params: SamplingParams) -> list[str]:
        return [f"parameters.{name}" for name in unused_parameters(params)]


async def _handle(generation: _TgiRequest, services: Services, request: Request) -> Response:
    return await handle_generation(generation, services, request, frames=TokenFrames, answer=_answer)


def _answer(submitted: SubmittedRequest, generation: _TgiRequest, deltas: list[Delta]) -> Response:
    completions = join_choices(deltas)
    best, *others = likeliest(completions)
    prefix = generation.body.inputs if generation.body.parameters.return_full_text else ""
    texts = [{"generated_text": prefix + completion.text} for completion in completions]
    answer: dict[str, Any] = texts[best]
    if generation.has_details:
        by_choice = [[delta for delta in deltas if delta.choice == n] for n in range(len(completions))]
        details = [
            _details(completion, of_choice, submitted, generation.body)
            for completion, of_choice in zip(completions, by_choice, strict=True)
        ]
        rest = {"best_of_sequences": [texts[place] | details[place] for place in others]} if others else {}
        answer = answer | {"details": details[best] | rest}
    headers = _headers(completions[best].usage, seconds=time.monotonic() - generation.started_s)
    return AnswerResponse([answer] if generation.in_list else answer, headers=headers)


class TokenFrames:
    """The events of a streamed generation: one per token, and no `[DONE]`."""

    def __init__(self, submitted: SubmittedRequest, generation: _TgiRequest) -> None:
        body = generation.body
        self._submitted = submitted
        self._sampling = body.parameters.draws
        self._text: list[str] = [body.inputs] if body.parameters.return_full_text else []
        self._num_tokens = 0
        self._top_tokens = TopTokenReader(submitted.model.tokenizer) if body.parameters.top_n_tokens else None

    def start(self) -> bytes:
        """See `Frames`."""
        return b""

    def delta(self, delta: Delta) -> bytes:
        """See `Frames`. Where a delta has several tokens, the last one carries the text."""
        self._text.append(delta.text)
        events = b""
        # A decoding loop may end its sequence without a last token; the event of the ending needs one.
        tokens = _tokens(delta, self._submitted) or [{**_NO_TOKEN, "text": delta.text}]
        top_tokens = self._top_tokens.read(delta) if self._top_tokens else []
        for index, token in enumerate(tokens):
            self._num_tokens += 1
            last = delta.finish_reason is not None and index == len(tokens) - 1
            ending = self._ending(delta) if last else '"generated_text": null, "details": null'
            top = f'"top_tokens": {json.dumps(top_tokens[index])}, ' if top_tokens else ""
            events += event(f'{{"index": {self._num_tokens}, "token": {_token_json(token)}, {top}{ending}}}')
        return events

    def error(self, error: GenserveError) -> bytes:
        """See `Frames`."""
        return event(json.dumps(tgi_error(error)))

    def end(self) -> bytes:
        """See `Frames`."""
        return b""

    def _ending(self, delta: Delta) -> str:
        details = {
            "finish_reason": delta.finish_reason and FINISH_REASONS[delta.finish_reason],
            "stop_reason": delta.stop_reason,
            "generated_tokens": delta.usage.completion_tokens if delta.usage else self._num_tokens,
            "input_length": len(self._submitted.prompts[0]),
            "cached_tokens": delta.usage.cached_tokens if delta.usage else 0,
            "seed": self._submitted.seeds[0] if self._sampling else None,
        }
        return f'"generated_text": {json.dumps("".join(self._text))}, "details": {json.dumps(details)}'


def _token_json(token: Mapping[str, Any]) -> str:
    """Return what `json.dumps` writes; it is quick with texts alone, and this is once per token."""
    logprob = "null" if token["logprob"] is None else repr(token["logprob"])
    flag = "true" if token["special"] else "false"
    text = json.dumps(token["text"])
    return f'{{"id": {token["id"]}, "text": {text}, "logprob": {logprob}, "special": {flag}}}'


def _headers(usage: Usage, *, seconds: float) -> dict[str, str]:
    return {
        "x-compute-type": "cpu",
        "x-total-time": str(round(seconds * 1000)),
        "x-prompt-tokens": str(usage.prompt_tokens),
        "x-cached-tokens": str(usage.cached_tokens),
        "x-generated-tokens": str(usage.completion_tokens),
    }


def _details(
    completion: Completion, deltas: list[Delta], submitted: SubmittedRequest, body: GenerateBody
) -> dict[str, Any]:
    parameters, choice = body.parameters, deltas[0].choice
    tokenizer = submitted.model.tokenizer
    top_tokens = TopTokenReader(tokenizer)
    scored_prompt = []
    if parameters.decoder_input_details:
        scored_prompt = tgi_prefill(tokenizer, submitted.prompts[0], completion.prompt_logprobs)
    details: dict[str, Any] = {
        "finish_reason": FINISH_REASONS[completion.finish_reason],
        "stop_reason": completion.stop_reason,
        "generated_tokens": completion.usage.completion_tokens,
        "seed": submitted.seeds[choice] if parameters.draws else None,
        "prefill": scored_prompt,
        "tokens": [token for delta in deltas for token in _tokens(delta, submitted)],
    }
    if parameters.top_n_tokens:
        details["top_tokens"] = [top for delta in deltas for top in top_tokens.read(delta)]
    return details


def _tokens(delta: Delta, submitted: SubmittedRequest) -> list[dict[str, Any]]:
    """Return TGI's token objects; the text of a delta goes to its last token."""
    special = submitted.model.tokenizer.eos_token_ids
    tokens: list[dict[str, Any]] = [
        {
            "id": token_id,
            "text": "",
            # JSON has no NaN: a decoding loop that picks for itself leaves no probability.
            "logprob": None if math.isnan(logprob) else logprob,
            "special": token_id in special,
        }
        for token_id, logprob in zip(delta.token_ids, delta.logprobs, strict=True)
    ]
    if tokens:
        tokens[-1]["text"] = delta.text
    return tokens
