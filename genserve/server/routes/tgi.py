"""TGI's dialect: `/generate`, `/generate_stream`, `/` and `/info`, with TGI's statuses and error words."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from genserve.completion import Completion, Delta, FinishReason, Usage, join_choices, likeliest
from genserve.errors import GenserveError, InvalidRequest
from genserve.sampling.param_table import MAX_BEST_OF, MAX_STOP_STRINGS
from genserve.sampling.sampling_params import unused_parameters
from genserve.server.error_responses import renamed, tgi_error
from genserve.server.generation_handler import add_ignored_header
from genserve.server.request_body import StrictRoute
from genserve.server.routes.logprob_formats import LikelyTokens, prefill
from genserve.server.routes.tgi_fields import CompatibleBody, GenerateBody
from genserve.server.services import Open, Services, SharedServices
from genserve.server.sse_response import EventStream, event, read_all
from genserve.version import __version__

__all__ = ["router"]

router = APIRouter(route_class=StrictRoute, tags=["TGI"])

# TGI has no word for a text that was cut off because it went round in circles.
FINISH = {reason: reason.value for reason in FinishReason} | {FinishReason.REPETITION: "length"}

_NO_TOKEN: Mapping[str, Any] = {"id": 0, "text": "", "logprob": None, "special": True}


@router.post("/generate")
async def generate(body: GenerateBody, services: SharedServices, request: Request) -> Response:
    """Complete a prompt and answer with the whole text."""
    opened, answer, headers = await _generate(body, services, request)
    return _named(JSONResponse(answer, headers=headers), opened)


@router.post("/generate_stream")
async def generate_stream(body: GenerateBody, services: SharedServices) -> Response:
    """Complete a prompt and answer token by token, as server-sent events."""
    asked = body.parameters
    whole = {"best_of": (asked.best_of or 1) > 1, "decoder_input_details": asked.decoder_input_details}
    for name, wanted in whole.items():
        if wanted:
            field = f"parameters.{name}"
            raise InvalidRequest(f"{field} cannot be streamed", field=field, remedy="ask /generate")
    opened = await _open(body, services, logprobs=True)
    return _named(EventStream(opened.stream, TokenFrames(opened, body)), opened)


@router.post("/")
async def generate_or_stream(body: CompatibleBody, services: SharedServices, request: Request) -> Response:
    """Do as `/generate_stream` if `stream` is true, else as `/generate` with the answer in a list."""
    if body.stream:
        return await generate_stream(body, services)
    opened, answer, headers = await _generate(body, services, request)
    return _named(JSONResponse([answer], headers=headers), opened)


@router.get("/info")
async def info(services: SharedServices) -> dict[str, Any]:
    """Describe the server and its first model."""
    model = services.repository.generation_models[0] if services.repository.generation_models else None
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
            events += event(f'{{"index": {self._num_tokens}, "token": {_written(token)}, {top}{ending}}}')
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


def _written(token: Mapping[str, Any]) -> str:
    """Return what `json.dumps` writes; it is quick with texts alone, and this is once per token."""
    logprob = "null" if token["logprob"] is None else repr(token["logprob"])
    flag = "true" if token["special"] else "false"
    text = json.dumps(token["text"])
    return f'{{"id": {token["id"]}, "text": {text}, "logprob": {logprob}, "special": {flag}}}'


async def _open(body: GenerateBody, services: Services, *, logprobs: bool) -> Open:
    try:
        return await services.open(body.model, [body.inputs], body.parameters.params(logprobs=logprobs))
    except InvalidRequest as error:
        raise renamed(error, body.parameters.names()) from None


async def _generate(
    body: GenerateBody, services: Services, request: Request
) -> tuple[Open, dict[str, Any], dict[str, str]]:
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
    prefix = body.inputs if body.parameters.return_full_text else ""
    texts = [{"generated_text": prefix + completion.text} for completion in completions]
    answer: dict[str, Any] = texts[best]
    if details:
        told = [_details(one, choice, deltas, opened, body) for choice, one in enumerate(completions)]
        rest = {"best_of_sequences": [texts[place] | told[place] for place in others]} if others else {}
        answer = answer | {"details": told[best] | rest}
    return opened, answer, _headers(completions[best].usage, seconds=time.monotonic() - started_s)


def _named(response: Response, opened: Open) -> Response:
    """Add the header that names what nothing came of."""
    add_ignored_header(response, (f"parameters.{name}" for name in unused_parameters(opened.params)))
    return response


def _headers(usage: Usage, *, seconds: float) -> dict[str, str]:
    return {
        "x-compute-type": "cpu",
        "x-total-time": str(round(seconds * 1000)),
        "x-prompt-tokens": str(usage.prompt_tokens),
        "x-cached-tokens": str(usage.cached_tokens),
        "x-generated-tokens": str(usage.completion_tokens),
    }


def _details(
    completion: Completion, choice: int, all_deltas: list[Delta], opened: Open, body: GenerateBody
) -> dict[str, Any]:
    asked, deltas = body.parameters, [delta for delta in all_deltas if delta.choice == choice]
    tokenizer, scores = opened.model.tokenizer, completion.prompt_logprobs
    likely = LikelyTokens(tokenizer)
    details: dict[str, Any] = {
        "finish_reason": FINISH[completion.finish_reason],
        "stop_reason": completion.stop_reason,
        "generated_tokens": completion.usage.completion_tokens,
        "seed": opened.seeds[choice] if asked.draws else None,
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
