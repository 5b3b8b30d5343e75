"""TGI's dialect: `/generate`, `/generate_stream`, `/` and `/info`, with TGI's statuses and error words.

`model` in the body is ours, and so are parameters by vLLM's names; a parameter of TGI's that we do not
honour is refused by name, unless its value asks for nothing.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from genserve.errors import GenserveError, InvalidRequest
from genserve.request import Completion, Delta, FinishReason, join_choices, likeliest
from genserve.sampling.checks import MAX_BEST_OF, require
from genserve.sampling.params import SamplingParams, sampling_params
from genserve.sampling.stages import DRAWING
from genserve.server.body import Body, StrictRoute
from genserve.server.decoding_fields import DecodingFields
from genserve.server.faults import renamed, tgi_error
from genserve.server.routes.tgi_scores import LikelyTokens, prefill
from genserve.server.services import Open, Services, SharedServices
from genserve.server.sse import EventStream, event, read_all
from genserve.version import __version__

__all__ = ["router"]

router = APIRouter(route_class=StrictRoute, tags=["TGI"])

# Our names of what can be wrong, and this dialect's.
_NAMES = {name: f"parameters.{name}" for name in DecodingFields.model_fields} | {
    **{option.name: f"parameters.{option.name}" for option in fields(SamplingParams)},
    "prompt": "inputs",
    "max_tokens": "parameters.max_new_tokens",
    "top_logprobs": "parameters.top_n_tokens",
}
# TGI has no word for a text that was cut off because it went round in circles.
FINISH = {reason: reason.value for reason in FinishReason} | {FinishReason.REPETITION: "length"}

_NO_TOKEN: Mapping[str, Any] = {"id": 0, "text": "", "logprob": None, "special": True}


class Parameters(DecodingFields):
    """TGI's parameters, and vLLM's."""

    adapter_id: str | None = None
    best_of: int | None = Field(default=None, gt=0)
    decoder_input_details: bool | None = None
    details: bool | None = None
    do_sample: bool | None = None
    grammar: dict[str, Any] | None = None
    max_new_tokens: int | None = None
    return_full_text: bool | None = None
    seed: int | None = None
    stop: list[str] | None = None
    temperature: float | None = Field(default=None, gt=0.0)
    top_k: int | None = Field(default=None, gt=0)
    top_n_tokens: int | None = None
    truncate: int | None = Field(default=None, gt=0)

    @property
    def draws(self) -> bool:
        """Whether to draw: TGI does if it is told to, or if a parameter has no meaning otherwise."""
        given = ((getattr(self, name), neutral) for name, neutral in DRAWING.items())
        return bool(self.do_sample) or any(value not in (None, neutral) for value, neutral in given)

    def names(self) -> Mapping[str, str]:
        """Our names of what can be wrong, and this request's."""
        return _NAMES if self.grammar is None else {**_NAMES, "structured_outputs": "parameters.grammar"}

    def params(self, *, logprobs: bool) -> SamplingParams:
        """The sampling parameters.

        Raises:
            InvalidRequest: out of range, or asks for something that TGI has and we do not.
        """
        self._require_coherence()
        truncate = {} if self.truncate is None else {"truncate_prompt_tokens": self.truncate}
        return sampling_params(
            {
                **self.said(),
                **truncate,
                "max_tokens": self.max_new_tokens,
                "temperature": self._temperature(),
                "top_k": self.top_k or 0,
                "stop": self.stop,
                "seed": self.seed,
                "logprobs": logprobs,
                "top_logprobs": self.top_n_tokens or 0,
                "prompt_logprobs": 0 if self.decoder_input_details else None,
                "best_of": self.best_of or 1,
                "structured_outputs": self.form_beside(self.grammar, field="parameters.grammar"),
            }
        )

    def _require_coherence(self) -> None:
        searching, several = bool(self.use_beam_search), (self.best_of or 1) > 1
        cuts = None not in (self.truncate, self.truncate_prompt_tokens)
        for name, wrong, rule in (
            ("adapter_id", self.adapter_id is not None, "is not supported"),
            ("do_sample", searching and self.do_sample, "cannot be combined with use_beam_search"),
            ("best_of", several and not searching and not self.draws, "needs do_sample"),
            ("truncate", cuts, "cannot be combined with truncate_prompt_tokens"),
        ):
            require(not wrong, f"parameters.{name}", rule)

    def _temperature(self) -> float:
        temperature = 1.0 if self.temperature is None else self.temperature
        if self.use_beam_search:  # what draws beside it is refused by its own name
            return 0.0 if temperature == 1.0 else temperature
        return temperature if self.draws else 0.0


class GenerateBody(Body):
    """Body of `POST /generate` and `POST /generate_stream`."""

    inputs: str
    parameters: Parameters = Parameters()
    model: str | None = None


class CompatibleBody(GenerateBody):
    """Body of `POST /`."""

    stream: bool = False


@router.post("/generate")
async def generate(body: GenerateBody, services: SharedServices, request: Request) -> Response:
    """Complete a prompt and answer with the whole text."""
    return JSONResponse(*await _generate(body, services, request))


@router.post("/generate_stream")
async def generate_stream(body: GenerateBody, services: SharedServices) -> Response:
    """Complete a prompt and answer token by token, as server-sent events."""
    if (body.parameters.best_of or 1) > 1:
        field = "parameters.best_of"
        raise InvalidRequest(f"{field} cannot be streamed", field=field, remedy="ask /generate")
    if body.parameters.decoder_input_details:
        field = "parameters.decoder_input_details"
        raise InvalidRequest(f"{field} cannot be streamed", field=field, remedy="ask /generate")
    opened = await _open(body, services, logprobs=True)
    return EventStream(opened.stream, TokenFrames(opened, body))


@router.post("/")
async def generate_or_stream(body: CompatibleBody, services: SharedServices, request: Request) -> Response:
    """Do as `/generate_stream` if `stream` is true, else as `/generate` with the answer in a list."""
    if body.stream:
        return await generate_stream(body, services)
    answer, status, headers = await _generate(body, services, request)
    return JSONResponse([answer], status, headers)


@router.get("/info")
async def info(services: SharedServices) -> dict[str, Any]:
    """Describe the server and its first model."""
    model = services.repository.generation_models[0] if services.repository.generation_models else None
    return {
        "model_id": model.name if model else None,
        "max_concurrent_requests": (model.num_slots if model else 0) + services.settings.max_queue,
        "max_stop_sequences": 16,
        "max_best_of": MAX_BEST_OF,
        "max_input_tokens": model.max_length - 1 if model else 0,
        "max_total_tokens": model.max_length if model else 0,
        "max_batch_size": model.num_slots if model else 0,
        "router": "genserve",
        "version": __version__,
    }


class TokenFrames:
    """The events of a streamed generation: one per token, and no `[DONE]`."""

    def __init__(self, opened: Open, body: GenerateBody) -> None:
        self._opened = opened
        self._sampling = body.parameters.draws
        self._text: list[str] = [body.inputs] if body.parameters.return_full_text else []
        self._num_tokens = 0
        self._likely = LikelyTokens(opened.model.tokenizer) if body.parameters.top_n_tokens else None

    def start(self) -> bytes:
        """See `Frames`."""
        return b""

    def delta(self, delta: Delta) -> bytes:
        """See `Frames`. Where a delta has several tokens, the last one carries the text."""
        self._text.append(delta.text)
        events = b""
        # A decoding loop may end its sequence without a last token; the event of the ending needs one.
        tokens = _tokens(delta, self._opened) or [{**_NO_TOKEN, "text": delta.text}]
        likely = self._likely.read(delta) if self._likely else []
        for index, token in enumerate(tokens):
            self._num_tokens += 1
            last = delta.finish_reason is not None and index == len(tokens) - 1
            ending = self._ending(delta) if last else '"generated_text": null, "details": null'
            top = f'"top_tokens": {json.dumps(likely[index])}, ' if likely else ""
            events += event(f'{{"index": {self._num_tokens}, "token": {json.dumps(token)}, {top}{ending}}}')
        return events

    def error(self, error: GenserveError) -> bytes:
        """See `Frames`."""
        return event(json.dumps(tgi_error(error)))

    def end(self) -> bytes:
        """See `Frames`."""
        return b""

    def _ending(self, delta: Delta) -> str:
        details = {
            "finish_reason": delta.finish_reason and FINISH[delta.finish_reason],
            "stop_reason": delta.stop_reason,
            "generated_tokens": delta.usage.completion_tokens if delta.usage else self._num_tokens,
            "input_length": len(self._opened.prompts[0]),
            "cached_tokens": delta.usage.cached_tokens if delta.usage else 0,
            "seed": self._opened.seeds[0] if self._sampling else None,
        }
        return f'"generated_text": {json.dumps("".join(self._text))}, "details": {json.dumps(details)}'


async def _open(body: GenerateBody, services: Services, *, logprobs: bool) -> Open:
    try:
        return await services.open(body.model, [body.inputs], body.parameters.params(logprobs=logprobs))
    except InvalidRequest as error:
        raise renamed(error, body.parameters.names()) from None


async def _generate(
    body: GenerateBody, services: Services, request: Request
) -> tuple[dict[str, Any], int, dict[str, str]]:
    started_s = time.monotonic()
    details = bool(body.parameters.details)
    for name in () if details else ("top_n_tokens", "decoder_input_details", "logprobs_mode"):
        if getattr(body.parameters, name) not in (None, False, 0, "raw"):
            field = f"parameters.{name}"
            raise InvalidRequest(f"{field} needs parameters.details", field=field)
    opened = await _open(body, services, logprobs=details)
    deltas = await read_all(opened.stream, request)
    completions = join_choices(deltas)
    best, *others = likeliest(completions)
    completion = completions[best]
    prefix = body.inputs if body.parameters.return_full_text else ""
    answer: dict[str, Any] = {"generated_text": prefix + completion.text}
    if details:
        seeds: tuple[int | None, ...] = opened.seeds if body.parameters.draws else (None,)
        told = [
            _details(one, [d for d in deltas if d.choice == choice], opened, body.parameters) | {"seed": seed}
            for choice, (one, seed) in enumerate(zip(completions, seeds, strict=True))
        ]
        answer["details"] = told[best]
        if others:
            texts = [{"generated_text": prefix + completions[place].text} for place in others]
            rest = [text | told[place] for text, place in zip(texts, others, strict=True)]
            answer["details"] = told[best] | {"best_of_sequences": rest}
    headers = {
        "x-compute-type": "cpu",
        "x-total-time": str(round((time.monotonic() - started_s) * 1000)),
        "x-prompt-tokens": str(completion.usage.prompt_tokens),
        "x-cached-tokens": str(completion.usage.cached_tokens),
        "x-generated-tokens": str(completion.usage.completion_tokens),
    }
    return answer, 200, headers


def _details(
    completion: Completion, deltas: list[Delta], opened: Open, asked: Parameters
) -> dict[str, Any]:
    tokenizer, scores = opened.model.tokenizer, completion.prompt_logprobs
    likely = LikelyTokens(tokenizer)
    details: dict[str, Any] = {
        "finish_reason": FINISH[completion.finish_reason],
        "stop_reason": completion.stop_reason,
        "generated_tokens": completion.usage.completion_tokens,
        "prefill": prefill(tokenizer, opened.prompts[0], scores) if asked.decoder_input_details else [],
        "tokens": [token for delta in deltas for token in _tokens(delta, opened)],
    }
    if asked.top_n_tokens:
        details["top_tokens"] = [top for delta in deltas for top in likely.read(delta)]
    return details


def _tokens(delta: Delta, opened: Open) -> list[dict[str, Any]]:
    """Return TGI's token objects; the text of a delta goes to its last token."""
    special = opened.model.tokenizer.eos_token_ids
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
