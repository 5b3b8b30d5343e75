"""TGI's dialect: `/generate`, `/generate_stream`, `/` and `/info`, with TGI's statuses and error words.

`model` in the body is an addition, and so are parameters with vLLM's names. A parameter of TGI that is not
supported is rejected by name, unless it has its neutral value.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from pydantic import ConfigDict, Field

from genserve.completion import (
    Completion,
    Delta,
    FinishReason,
    PromptProgress,
    Usage,
    ends_with_stop_string,
    join_choices,
    likeliest,
)
from genserve.errors import GenserveError, InvalidRequest, require
from genserve.sampling.param_table import Range
from genserve.sampling.sampling_params import (
    DRAW_PARAMETERS,
    MAX_BEST_OF,
    MAX_STOP_STRINGS,
    PARAMETERS,
    SamplingParams,
    sampling_params,
    unused_parameters,
)
from genserve.server.access.access_control import INFERENCE, METADATA
from genserve.server.dialects.decoding_fields import COMMON, DecodingFields, parameter
from genserve.server.dialects.generation_handler import AnswerResponse, SubmittedRequest, handle_generation
from genserve.server.dialects.logprob_formats import TopTokenReader, tgi_prefill
from genserve.server.dialects.timings import prompt_progress, requested_fields, timings_fields
from genserve.server.error_formats import TGI_ERRORS, tgi_error
from genserve.server.http.request_body import Items, TolerantBody
from genserve.server.http.sse_response import Frames, documented, event
from genserve.server.route import Router, rules
from genserve.server.services import Services, SharedServices
from genserve.version import __version__

router = Router(tag="TGI", errors=TGI_ERRORS)

_NO_TOKEN: Mapping[str, Any] = {"id": 0, "text": "", "logprob": None, "special": True}


class Parameters(DecodingFields):
    """TGI's parameters, and vLLM's; unknown ones are ignored, as by TGI."""

    model_config = ConfigDict(extra="allow")

    adapter_id: str | None = Field(default=None, description="The name of an adapter, in place of `model`.")
    best_of: int | None = parameter("best_of", gt=0)
    decoder_input_details: bool | None = Field(
        default=None,
        description="Report the tokens of the prompt with their log-probabilities. Needs `details`.",
        json_schema_extra={"default": False},
    )
    details: bool | None = Field(
        default=None,
        description="Report the tokens of the answer with their log-probabilities, and how it ended.",
        json_schema_extra={"default": False},
    )
    do_sample: bool | None = Field(
        default=None,
        description="Draw tokens; otherwise the best one is taken, unless a parameter of the draw is given.",
        json_schema_extra=COMMON | {"default": False},
    )
    grammar: dict[str, Any] | None = Field(
        default=None,
        description='The form of the text: `{"type": "json", "value": SCHEMA}` or `{"type": "regex", '
        '"value": ...}`. `structured_outputs` has other forms.',
    )
    max_new_tokens: int | None = parameter(
        "max_tokens", description="This number of tokens ends the answer; without it, the end of the context."
    )
    return_full_text: bool | None = Field(
        default=None, description="The text begins with the prompt.", json_schema_extra={"default": False}
    )
    seed: int | None = parameter("seed")
    stop: Items[str] | None = parameter("stop")
    temperature: float | None = parameter(
        "temperature", default=1.0, gt=0.0, description="Divides the logits, if tokens are drawn."
    )
    top_k: int | None = parameter(
        "top_k", default=None, gt=0, description="Keeps this number of best tokens; all by default."
    )
    top_n_tokens: int | None = parameter(
        "top_logprobs", description="Report this number of most likely tokens, too. Needs `details`."
    )
    truncate: int | None = parameter(
        "truncate_prompt_tokens",
        gt=0,
        bounds=Range(1, 2**31 - 1),
        description="A longer prompt is truncated to this number of tokens; without it, it is rejected.",
    )

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn: if `do_sample` says so, or a parameter would have no effect otherwise."""
        given = ((getattr(self, name), neutral) for name, neutral in DRAW_PARAMETERS.items())
        return bool(self.do_sample) or any(value not in (None, neutral) for value, neutral in given)

    def names(self) -> Mapping[str, str]:
        """Return the names in this request by the names in error messages.

        A parameter with two names, TGI's and vLLM's, has the one that the request uses.
        """
        names = {name: f"parameters.{name}" for name in (*DecodingFields.model_fields, *PARAMETERS)}
        for name, row in PARAMETERS.items():
            if row.tgi is not None and (row.own_field or getattr(self, row.tgi) is not None):
                names[name] = f"parameters.{row.tgi}"
        return {**names, "prompt": "inputs"}

    def params(self, *, logprobs: bool) -> SamplingParams:
        """Return the sampling parameters.

        Raises:
            InvalidRequest: one is out of range, not supported, or contradicts another.
        """
        self._validate_together()
        truncate = {} if self.truncate is None else {"truncate_prompt_tokens": self.truncate}
        return sampling_params(
            {
                **self.given(),
                **truncate,
                "max_tokens": self.max_new_tokens,
                "temperature": self._temperature(),
                "logprobs": logprobs,
                "top_logprobs": self.top_n_tokens or 0,
                "prompt_logprobs": 0 if self.decoder_input_details else None,
                "best_of": self.best_of or 1,
                "structured_outputs": self.format_or(self.grammar, field="parameters.grammar"),
            }
        )

    def _validate_together(self) -> None:
        # Unknown fields are ignored, but vLLM's name of a parameter that TGI calls otherwise is a mistake.
        for name in (self.model_extra or {}).keys() & PARAMETERS.keys():
            own, field = PARAMETERS[name].tgi, f"parameters.{name}"
            raise InvalidRequest(
                f"{field} is not supported", field=field, remedy=f"use {own}" if own else "leave it out"
            )
        searching, several = bool(self.use_beam_search), (self.best_of or 1) > 1
        truncated_twice = None not in (self.truncate, self.truncate_prompt_tokens)
        for name, wrong, rule in (
            ("do_sample", searching and self.do_sample, "cannot be combined with use_beam_search"),
            ("best_of", several and not searching and not self.draws, "needs do_sample"),
            ("truncate", truncated_twice, "cannot be combined with truncate_prompt_tokens"),
        ):
            require(not wrong, f"parameters.{name}", rule)

    def _temperature(self) -> float:
        temperature = 1.0 if self.temperature is None else self.temperature
        if self.use_beam_search:  # any other temperature is rejected with it
            return 0.0 if temperature == 1.0 else temperature
        return temperature if self.draws else 0.0


class GenerateBody(TolerantBody):
    """Body of `POST /generate` and `POST /generate_stream`."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"inputs": "The sea is", "parameters": {"max_new_tokens": 16}}]}
    )

    inputs: str = Field(description="The prompt.")
    parameters: Parameters = Field(default=Parameters(), description="How the answer is generated.")
    model: str | None = Field(
        default=None,
        description="The name of a model; not needed if there is only one.",
        json_schema_extra=COMMON,
    )


class CompatibleBody(GenerateBody):
    """Body of `POST /`."""

    stream: bool = Field(
        default=False, description="Answer token by token, as server-sent events.", json_schema_extra=COMMON
    )


@router.post("/generate")
@rules(INFERENCE, rejects_early=True)
async def generate(body: GenerateBody, services: SharedServices, request: Request) -> Response:
    """Complete a prompt and answer with the whole text."""
    return await _handle(_TgiRequest(body=body), services, request)


@router.post("/generate_stream", response_class=Response, responses=documented("text/event-stream"))
@rules(INFERENCE, rejects_early=True)
async def generate_stream(body: GenerateBody, services: SharedServices, request: Request) -> Response:
    """Complete a prompt and answer token by token, as server-sent events."""
    return await _handle(_TgiRequest(body=body, stream=True), services, request)


@router.post("/", responses=documented("text/event-stream"))
@rules(INFERENCE, rejects_early=True)
async def generate_or_stream(body: CompatibleBody, services: SharedServices, request: Request) -> Response:
    """Do as `/generate_stream` if `stream` is true, else as `/generate` with the answer in a list."""
    return await _handle(_TgiRequest(body=body, stream=body.stream, in_list=True), services, request)


@router.get("/info")
@rules(METADATA)
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
    in_list: bool = False  # a whole answer is a list of one object
    started_s: float = field(default_factory=time.monotonic)
    num_choices: int = 1

    @property
    def model_name(self) -> str | None:
        return self.body.parameters.adapter_id or self.body.model

    @property
    def return_progress(self) -> bool | None:
        return self.body.parameters.return_progress

    @property
    def has_details(self) -> bool:
        return bool(self.body.parameters.details)

    def check(self) -> None:
        parameters = self.body.parameters
        named_twice = bool(parameters.adapter_id and self.body.model)
        require(not named_twice, "parameters.adapter_id", "cannot be combined with model")
        if self.stream:
            for name, neutral in (("best_of", 1), ("decoder_input_details", False)):
                if getattr(parameters, name) not in (None, neutral):
                    place = f"parameters.{name}"
                    raise InvalidRequest(f"{place} cannot be streamed", field=place, remedy="use /generate")
        elif not self.has_details:
            for name in ("top_n_tokens", "decoder_input_details", "logprobs_mode", "return_receipt"):
                if getattr(parameters, name) not in (None, False, 0, "raw"):
                    place = f"parameters.{name}"
                    raise InvalidRequest(f"{place} needs parameters.details", field=place)

    def prompts(self) -> list[str]:
        return [self.body.inputs]

    def params(self) -> SamplingParams:
        return self.body.parameters.params(logprobs=self.stream or self.has_details)

    def names(self) -> Mapping[str, str]:
        return self.body.parameters.names()

    def ignored(self, submitted: SubmittedRequest) -> list[str]:
        unknown = self.body.parameters.model_extra or {}
        names = (f"parameters.{name}" for name in (*unknown, *unused_parameters(submitted.params)))
        return [*(self.body.model_extra or {}), *names]


async def _handle(generation: _TgiRequest, services: Services, request: Request) -> Response:
    return await handle_generation(generation, services, request, frames=_TokenFrames, answer=_answer)


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


class _TokenFrames(Frames):
    """The events of a streamed generation: one per token, and no `[DONE]`."""

    def __init__(self, submitted: SubmittedRequest, generation: _TgiRequest) -> None:
        body = generation.body
        self._submitted = submitted
        self._sampling = body.parameters.draws
        self._text: list[str] = [body.inputs] if body.parameters.return_full_text else []
        self._num_tokens = 0
        self._top_tokens = _top_tokens(submitted) if body.parameters.top_n_tokens else None

    def delta(self, delta: Delta) -> bytes:
        """Return an event for each token; see `_tokens` for their texts."""
        self._text.append(delta.text)
        events = b""
        # A decoding loop may end its sequence without a last token; the event of the ending needs one.
        no_token = {**_NO_TOKEN, "text": delta.text, "special": not delta.text}
        tokens = _tokens(delta, self._submitted) or [no_token]
        top_tokens = self._top_tokens.read(delta) if self._top_tokens else []
        for index, token in enumerate(tokens):
            self._num_tokens += 1
            last = delta.finish_reason is not None and index == len(tokens) - 1
            ending = self._ending(delta) if last else '"generated_text": null, "details": null'
            top = f'"top_tokens": {json.dumps(top_tokens[index])}, ' if top_tokens else ""
            events += event(f'{{"index": {self._num_tokens}, "token": {_token_json(token)}, {top}{ending}}}')
        return events

    def progress(self, progress: PromptProgress) -> bytes:
        """Return an event with an empty special token, which clients leave out of the text."""
        written = {
            "index": 0,
            "token": {**_NO_TOKEN, "logprob": 0.0},
            "generated_text": None,
            "details": None,
            "prompt_progress": prompt_progress(progress),
        }
        return event(json.dumps(written))

    def error(self, error: GenserveError) -> bytes:
        return event(json.dumps(tgi_error(error)))

    def _ending(self, delta: Delta) -> str:
        details = {
            "finish_reason": _finish_reason(delta),
            "stop_reason": delta.stop_reason,
            "generated_tokens": delta.usage.completion_tokens if delta.usage else self._num_tokens,
            "input_length": len(self._submitted.prompts[0]),
            "cached_tokens": delta.usage.cached_tokens if delta.usage else 0,
            "seed": self._submitted.seeds[0] if self._sampling else None,
            **(timings_fields([delta.usage]) if delta.usage else {}),
            **(requested_fields(self._submitted, [delta.usage]) if delta.usage else {}),
        }
        return f'"generated_text": {json.dumps("".join(self._text))}, "details": {json.dumps(details)}'


def _token_json(token: Mapping[str, Any]) -> str:
    """Return what `json.dumps` writes; it is quick with texts alone, and this is once per token."""
    logprob = "null" if token["logprob"] is None else repr(token["logprob"])
    flag = "true" if token["special"] else "false"
    text = json.dumps(token["text"])
    return f'{{"id": {token["id"]}, "text": {text}, "logprob": {logprob}, "special": {flag}}}'


def _headers(usage: Usage, *, seconds: float) -> dict[str, str]:
    times_s: dict[str, float] = {"x-total-time": seconds}
    if (timings := usage.timings) is not None:
        inference_s = timings.prefill_s + timings.decode_s
        times_s |= {
            "x-queue-time": timings.queue_s,
            "x-inference-time": inference_s,
            "x-time-per-token": inference_s / max(1, usage.completion_tokens),
        }
    return {
        "x-compute-type": "cpu",
        **{name: str(round(1000 * time_s)) for name, time_s in times_s.items()},
        "x-prompt-tokens": str(usage.prompt_tokens),
        "x-cached-tokens": str(usage.cached_tokens),
        "x-generated-tokens": str(usage.completion_tokens),
    }


def _finish_reason(part: Delta | Completion) -> str | None:
    """Return TGI's word; it has none for a text that repeats itself."""
    if part.finish_reason is FinishReason.STOP:
        return "stop_sequence" if ends_with_stop_string(part) else "eos_token"
    return part.finish_reason and "length"


def _details(
    completion: Completion, deltas: list[Delta], submitted: SubmittedRequest, body: GenerateBody
) -> dict[str, Any]:
    parameters, choice = body.parameters, deltas[0].choice
    tokenizer = submitted.model.tokenizer
    scored_prompt = []
    if parameters.decoder_input_details:
        scored_prompt = tgi_prefill(tokenizer, submitted.prompts[0], completion.prompt_logprobs)
    details: dict[str, Any] = {
        "finish_reason": _finish_reason(completion),
        "stop_reason": completion.stop_reason,
        "generated_tokens": completion.usage.completion_tokens,
        "seed": submitted.seeds[choice] if parameters.draws else None,
        "prefill": scored_prompt,
        "tokens": [token for delta in deltas for token in _tokens(delta, submitted)],
        **timings_fields([completion.usage]),
        **requested_fields(submitted, [completion.usage]),
    }
    if parameters.top_n_tokens:
        top_tokens = _top_tokens(submitted)
        details["top_tokens"] = [top for delta in deltas for top in top_tokens.read(delta)]
    return details


def _top_tokens(submitted: SubmittedRequest) -> TopTokenReader:
    return TopTokenReader(submitted.detokenizer(), special_ids=submitted.model.tokenizer.eos_token_ids)


def _tokens(delta: Delta, submitted: SubmittedRequest) -> list[dict[str, Any]]:
    """Return TGI's token objects; the text of a delta goes to its last token, if possible not a special one.

    A token with text is not special, since clients leave out the text of special tokens.
    """
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
    if tokens and delta.text:
        last = next((token for token in reversed(tokens) if not token["special"]), tokens[-1])
        last |= {"text": delta.text, "special": False}
    return tokens
