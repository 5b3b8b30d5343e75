"""Ollama's dialect: `/api/chat`, `/api/generate`, and what its clients ask about models."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from pydantic import Field

from genserve.completion import (
    Completion,
    Delta,
    FinishReason,
    MessageDelta,
    PromptProgress,
    Timings,
    ToolCallDelta,
    join_deltas,
    joined_calls,
)
from genserve.errors import (
    ContextLengthExceeded,
    GenserveError,
    InferenceError,
    ModelNotFound,
)
from genserve.prompt import Prompt, ToolCall
from genserve.redaction import redacted_error
from genserve.repository.on_demand import LoadedModel
from genserve.repository.served_encoders import ListedEncoder
from genserve.repository.served_models import ListedModel, not_found
from genserve.repository.text_stages import TextStages
from genserve.request_context import current_request
from genserve.sampling.sampling_params import SamplingParams, unused_parameters
from genserve.server.access.access_control import INFERENCE, METADATA
from genserve.server.dialects.generation_handler import (
    SubmittedRequest,
    answer_when_loaded,
    handle_generation,
)
from genserve.server.dialects.logprob_formats import (
    UNKNOWN_LOGPROB,
    ContentScores,
    TokenScores,
    content_scores,
)
from genserve.server.dialects.ollama.body import (
    OllamaBody,
    OllamaChatBody,
    OllamaGenerateBody,
    keep_alive_seconds,
)
from genserve.server.dialects.timings import prompt_progress, requested_fields
from genserve.server.error_formats import ErrorFormat, full_message, named_as
from genserve.server.error_statuses import http_status, kserve_status
from genserve.server.http.request_body import TolerantBody
from genserve.server.http.sse_response import EventStream, Frames, documented
from genserve.server.route import Router, rules
from genserve.server.services import Services, SharedServices
from genserve.text.message_parser import arguments_so_far, parsed_message, read_delta
from genserve.text.tokenizer import Tokenizer
from genserve.text.tool_formats import HARMONY
from genserve.textmodel.logits_config import LogitsNames, context_length, read_parity, version_files
from genserve.textmodel.reasoning_tokens import ReasoningTokens
from genserve.textmodel.text_model import TextModel
from genserve.textmodel.tool_calling import ToolCalling

# The version of Ollama whose API this is; clients compare it with the one that they need.
_API_VERSION = "0.24.0"
TAG = ":latest"
_PLAIN_TEMPLATE = "{{ .Prompt }}"  # of a model without a chat template
_NEVER = "2318-01-01T00:00:00Z"  # models stay loaded; Ollama writes such a year, too
# Ollama has no word for a passed deadline, nor for a text that repeats itself: `stop_reason` has ours.
_DONE_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.REPETITION: "length",
}


def ollama_error(error: GenserveError) -> dict[str, Any]:
    """Return the error body of Ollama's dialect; its clients show nothing but the message."""
    error = redacted_error(error)
    if isinstance(error, ContextLengthExceeded) and error.num_tokens is not None:
        over = error.num_tokens + 1 - (error.max_length or 0)  # the answer needs one
        # Ollama's words, in which clients look for the length of a chat.
        return {"error": f"prompt too long; exceeded max context length by {over} tokens; {error.remedy}"}
    return {"error": full_message(error)}


def _status(error: GenserveError) -> int:
    return kserve_status(error) if isinstance(error, InferenceError) else http_status(error)


OLLAMA_ERRORS = ErrorFormat(ollama_error, _status)
router = Router(prefix="/api", tag="Ollama", errors=OLLAMA_ERRORS)


class ModelFields(TolerantBody):
    """The name of a model."""

    model: str | None = Field(default=None, description="The name of the model.")
    name: str | None = Field(default=None, description="The older name of `model`.")
    stream: bool | None = Field(
        default=None, description="Answer in lines.", json_schema_extra={"default": True}
    )


@router.post("/chat", responses=documented("application/x-ndjson"))
@rules(INFERENCE)
async def chat(body: OllamaChatBody, services: SharedServices, request: Request) -> Response:
    """Answer a chat, in lines of JSON or whole."""
    return await _handle(body, services, request)


@router.post("/generate", responses=documented("application/x-ndjson"))
@rules(INFERENCE)
async def generate(body: OllamaGenerateBody, services: SharedServices, request: Request) -> Response:
    """Answer a prompt, in lines of JSON or whole."""
    return await _handle(body, services, request)


@router.get("/version")
@rules(METADATA)
async def version() -> dict[str, str]:
    """Return the version of Ollama whose API this is."""
    return {"version": _API_VERSION}


@router.get("/tags")
@rules(METADATA)
async def tags(services: SharedServices) -> dict[str, Any]:
    """List the models."""
    return {"models": await asyncio.to_thread(_all_listed, services)}


@router.get("/ps")
@rules(METADATA)
async def running(services: SharedServices) -> dict[str, Any]:
    """List the loaded models; without a time at which they leave, that is in three centuries."""
    return {"models": await asyncio.to_thread(_all_listed, services, only_loaded=True)}


@router.post("/show")
@rules(METADATA)
async def show(body: ModelFields, services: SharedServices) -> dict[str, Any]:
    """Describe a model; one that is not loaded, by its files."""
    name = _known(services, body.model or body.name)
    for listed in services.repository.encoders.listed():
        if listed.model.name == name:
            return await asyncio.to_thread(_described_encoder, listed)
    if services.repository.on_demand is not None:
        name = name or services.repository.only_text_model_name()
        stages = services.repository.text_stages(name)
        # Clients describe all models that they list, and none of them is to leave for that.
        if stages is not None and services.repository.table.get(name) is None:
            return await asyncio.to_thread(_shown_files, services, name, stages)
    model = await _model(services, name)
    return _description(
        model.name,
        model.tokenizer,
        defaults=model.default_sampling_params,
        details=_details(model),
        sizes={"context_length": model.max_length, "vocab_size": model.vocab_size},
        reasons=model.reasons,
        written_s=model.loaded_s,
    )


def _shown_files(services: Services, name: str, stages: TextStages) -> dict[str, Any]:
    """Describe a model that is not loaded."""
    folder, weights = stages["tokenizer"].latest_version(), stages["logits"].latest_version()
    logits, decoder = stages["logits"].config, stages["decoder"].config
    assert logits is not None
    assert decoder is not None
    output = next(spec for spec in logits.outputs if spec.name == LogitsNames.of(logits).logits)
    tokenizer, options = Tokenizer.from_folder(folder), services.repository.options
    max_length = min(filter(None, (context_length(logits), options.max_model_len)), default=0)
    reasoning = ReasoningTokens(tokenizer, reasoning_format=decoder.parameters.get("reasoning_format"))
    return _description(
        name,
        tokenizer,
        defaults=options.default_sampling_params(folder),
        details=_described("unknown", read_parity(weights).get("precision", "unknown")),
        sizes={"context_length": max_length, "vocab_size": output.dims[-1]},
        reasons=reasoning.has_marks or ToolCalling(tokenizer, tool_format=None).tool_format is HARMONY,
        written_s=weights.stat().st_mtime,
    )


def _description(
    name: str,
    tokenizer: Tokenizer,
    *,
    defaults: Mapping[str, Any],
    details: Mapping[str, Any],
    sizes: Mapping[str, int],
    reasons: bool,
    written_s: float,
) -> dict[str, Any]:
    template = tokenizer.chat_template
    capabilities = ["completion", *(["tools"] if template else []), *(["thinking"] if reasons else [])]
    return {
        **_facts(name, details=details, sizes=sizes, capabilities=capabilities, written_s=written_s),
        "parameters": "\n".join(f"{name:<30} {value}" for name, value in defaults.items()),
        "template": template.source if template else _PLAIN_TEMPLATE,
    }


def _described_encoder(listed: ListedEncoder) -> dict[str, Any]:
    model = listed.model
    written_s, details = _of_files(listed.weights)
    sizes = {"context_length": model.max_length or 0, "embedding_length": model.size}
    return {
        **_facts(
            model.name, details=details, sizes=sizes, capabilities=[model.capability], written_s=written_s
        ),
        "parameters": "",
        "template": _PLAIN_TEMPLATE,
    }


def _facts(
    name: str,
    *,
    details: Mapping[str, Any],
    sizes: Mapping[str, int],
    capabilities: Sequence[str],
    written_s: float,
) -> dict[str, Any]:
    """Return the fields of the description of any model."""
    family = details["family"]
    return {
        "modelfile": f"FROM {name}\n",
        "details": details,
        "model_info": {
            "general.architecture": family,
            "general.basename": name,
            **{f"{family}.{of}": size for of, size in sizes.items() if size > 0},  # others are unknown
        },
        "capabilities": capabilities,
        "modified_at": _written_time(written_s),
    }


async def _model(services: Services, name: str | None) -> TextModel:
    """Return a model by its name, with or without the tag."""
    try:
        return await services.text_model(_known(services, name))
    except ModelNotFound as error:
        raise _not_found(name, error) from None


def _known(services: Services, name: str | None) -> str | None:
    return name and local_name(services, name)


def local_name(services: Services, name: str) -> str:
    """Return the name of a model in the repository, by any of its names: `qwen3:0.6b` is qwen3-0.6b.

    A name that is unknown stays as it is, without its tag.
    """
    entries, exact, new = services.repository.lifecycle.entries, name.removesuffix(TAG), new_name(name)
    return new if exact not in entries and new in entries else exact


def new_name(name: str) -> str:
    """Return the name that a new model gets in the repository, for a name of Ollama's."""
    return pulled_name(name).rpartition("/")[2].replace(":", "-").lower()


def pulled_name(name: str) -> str:
    """Return the name by which a model is pulled, for a name of Ollama's."""
    return name.removesuffix(TAG).removeprefix("hf.co/").removeprefix("huggingface.co/")


def _not_found(name: str | None, error: ModelNotFound) -> ModelNotFound:
    if name is None:
        return error
    return ModelNotFound(f"model {_shown(name)} not found", remedy=error.remedy, field="model")


def _shown(name: str | None) -> str:
    """Return an unknown name for an error; a client may send any text."""
    return repr(name and name[:128])


def _all_listed(services: Services, *, only_loaded: bool = False) -> list[dict[str, Any]]:
    """Return the models; with `only_loaded` those that are, their memory, and until when they are loaded."""
    listed, encoders = services.repository.listed_models, services.repository.encoders.listed()
    if not only_loaded:
        return [*map(_listed, listed), *map(_listed_encoder, encoders)]
    texts = [
        _listed(one) | _memory(one.loaded, one.model.max_length) | {"size": one.memory_bytes}
        for one in listed if one.model
    ]  # fmt: skip
    ready = [one for one in encoders if one.is_ready]
    return texts + [_listed_encoder(one) | _memory(one.loaded, one.model.max_length) for one in ready]


def _memory(loaded: LoadedModel | None, max_length: int | None) -> dict[str, Any]:
    fields: dict[str, Any] = {"expires_at": _NEVER, "size_vram": 0, "context_length": max_length or 0}
    if loaded is not None:
        fields["size"] = loaded.size_bytes
        if loaded.remaining_s < math.inf:
            fields["expires_at"] = _written_time(time.time() + loaded.remaining_s)
    return fields


def _listed(listed: ListedModel) -> dict[str, Any]:
    model = listed.model
    if model is None:
        row = _row_of_files(listed.name, listed.weights)
        if listed.base is not None:
            row["details"]["parent_model"] = f"{listed.base}{TAG}"
        return row
    return _row(
        listed.name, size_bytes=model.weights_bytes, written_s=model.loaded_s, details=_details(model)
    )


def _listed_encoder(listed: ListedEncoder) -> dict[str, Any]:
    return _row_of_files(listed.model.name, listed.weights)


def _row_of_files(name: str, weights: Path) -> dict[str, Any]:
    """Return the row of a model by the files of its weights."""
    size_bytes = sum(file.stat().st_size for file in version_files(weights))
    written_s, details = _of_files(weights)
    return _row(name, size_bytes=size_bytes, written_s=written_s, details=details)


def _of_files(weights: Path) -> tuple[float, dict[str, Any]]:
    """Return when weights were written, seconds since 1970, and the details of their model."""
    written_s = weights.stat().st_mtime if weights.exists() else 0.0
    return written_s, _described("unknown", read_parity(weights).get("precision", "unknown"))


def _row(name: str, *, size_bytes: int, written_s: float, details: Mapping[str, Any]) -> dict[str, Any]:
    name = f"{name}{TAG}"
    return {
        "name": name,
        "model": name,
        "modified_at": _written_time(written_s),
        "size": size_bytes,
        "digest": hashlib.sha256(f"{name} {size_bytes}".encode()).hexdigest(),
        "details": details,
    }


def _details(model: TextModel) -> dict[str, Any]:
    described = _described(_family(model), model.precision)
    return described if model.base is None else described | {"parent_model": f"{model.base.name}{TAG}"}


def _described(family: str, precision: str) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "triton",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": precision,
    }


def _family(model: TextModel) -> str:
    return model.logits.metadata.get("genserve.family", "unknown")


def _written_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class _OllamaRequest:
    """One request, as `GenerationBody`: the body, the model that it is for, and whether that never leaves."""

    body: OllamaBody
    model: TextModel
    stays_loaded: bool
    num_choices: int = 1

    @property
    def model_name(self) -> str:
        return self.model.name

    @property
    def shown_name(self) -> str:
        return self.body.model or self.model.name

    @property
    def stream(self) -> bool:
        return self.body.stream is not False

    @property
    def return_progress(self) -> bool | None:
        return self.body.options.return_progress

    def check(self) -> None:
        self.body.check(self.model)

    def prompts(self) -> list[Prompt]:
        return [self.body.prompt(self.model)]

    def params(self) -> SamplingParams:
        return self.body.params()

    def names(self) -> Mapping[str, str]:
        return self.body.names()

    def ignored(self, submitted: SubmittedRequest) -> list[str]:
        names = self.body.options.names()
        reasoning = submitted.unused_reasoning({"think": self.body.reasoning})
        unused = (names.get(name, name) for name in unused_parameters(submitted.params))
        keep_alive = ["keep_alive"] if self.stays_loaded and self.body.keep_alive is not None else []
        return [*keep_alive, *self.body.unused(), *reasoning, *unused]

    def scores(self, submitted: SubmittedRequest) -> ContentScores | TokenScores | None:
        """Return a reader of the log-probabilities of the answer; None: the request wants none.

        As in Ollama's runner, they are those of all its text, thinking and calls included, but not of a stop
        or of the token that ends it.
        """
        return content_scores(submitted, None) if self.body.logprobs else None

    def fields(self, read: MessageDelta, calls: Sequence[ToolCall] = ()) -> str:
        """Return the fields of a part of the answer, or of all of it, as JSON without braces."""
        return _fields(self.body, read, calls)


def _fields(body: OllamaBody, read: MessageDelta, calls: Sequence[ToolCall] = ()) -> str:
    """Return the fields of a part of an answer as JSON without braces."""
    content, thinking = json.dumps(read.content), ""
    if read.reasoning:
        thinking = f',"thinking":{json.dumps(read.reasoning)}'
    if not isinstance(body, OllamaChatBody):
        return f'"response":{content}{thinking}'
    called = ""
    if calls:
        called = f',"tool_calls":{_json([_call(index, call) for index, call in enumerate(calls)])}'
    return f'"message":{{"role":"assistant","content":{content}{thinking}{called}}}'


def _call(index: int, call: ToolCall) -> dict[str, Any]:
    arguments = arguments_so_far(call.arguments)
    return {"id": call.id, "function": {"index": index, "name": call.name, "arguments": arguments}}


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


async def _handle(body: OllamaBody, services: Services, request: Request) -> Response:
    name, keep_alive_s = _known(services, body.model), keep_alive_seconds(body.keep_alive)
    on_demand = services.repository.on_demand
    if on_demand is not None:
        with named_as(body.names):
            body.params()  # an invalid request loads nothing
        if body.is_empty and keep_alive_s == 0:
            leaving = name or services.repository.only_text_model_name()
            if leaving not in services.repository.lifecycle.entries:
                raise _not_found(body.model, not_found(leaving, services.repository.text_model_names))
            on_demand.release(leaving)
            return _without_text(body, name, reason="unload")

    async def answer(model: TextModel) -> Response:
        generation = _OllamaRequest(body=body, model=model, stays_loaded=on_demand is None)
        if not body.is_empty:
            return await handle_generation(
                generation,
                services,
                request,
                frames=_LineFrames,
                answer=_answer,
                stream_response=_LineStream,
            )
        generation.check()
        with named_as(body.names):
            body.params()  # the options of a load request are validated, too
        return _without_text(body, model.name, reason="load")

    try:
        return await answer_when_loaded(
            services,
            name,
            answer,
            streams=None if body.stream is False or body.is_empty else _LineStream,
            ping=lambda: _line(body, body.model or "", MessageDelta()),
            keep_alive_s=keep_alive_s,
        )
    except ModelNotFound as error:
        raise _not_found(body.model, error) from None


def _without_text(body: OllamaBody, name: str | None, *, reason: str) -> Response:
    """Return the answer to a request that only loads or unloads a model."""
    fields = f'{_fields(body, MessageDelta())},"done":true,"done_reason":"{reason}"'
    return Response(f"{_line_head(body.model or name or '')}{fields}}}", media_type="application/json")


def _line(body: OllamaBody, name: str, read: MessageDelta) -> bytes:
    """Return a line of a stream before its last one."""
    return f'{_line_head(name)}{_fields(body, read)},"done":false}}\n'.encode()


def _line_head(name: str) -> str:
    """Return the beginning of an object of an answer; `name` is the model's, as the request has it."""
    return f'{{"model":{json.dumps(name)},"created_at":"{_written_time(time.time())}",'


def _ending(submitted: SubmittedRequest, part: Delta | Completion) -> str:
    """Return the last fields of an answer, as JSON without braces; times are in nanoseconds."""
    assert part.finish_reason is not None
    assert part.usage is not None
    usage, reason = part.usage, _DONE_REASONS[part.finish_reason]
    stopped = ""
    if reason == "length" and part.stop_reason is not None:
        stopped = f',"stop_reason":{json.dumps(part.stop_reason)}'
    request, timings = current_request(), usage.timings
    total_s = time.monotonic() - request.started_s
    if timings is None:
        first_token_s = min(request.first_token_s() or 0.0, total_s)
        timings = Timings(queue_s=0.0, prefill_s=first_token_s, decode_s=total_s - first_token_s)
    measured = {
        "total_duration": round(total_s * 1e9),
        # A loaded model may be busy.
        "load_duration": round((request.load_s + timings.queue_s) * 1e9),
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": round(timings.prefill_s * 1e9),
        "eval_count": usage.completion_tokens,
        "eval_duration": round(timings.decode_s * 1e9),
        **requested_fields(submitted, [usage]),
    }
    return f'"done":true,"done_reason":"{reason}"{stopped},{_json(measured)[1:-1]}'


def _logprobs(scores: ContentScores | TokenScores | None, part: Delta | Completion) -> str:
    """Return the field of the log-probabilities, as JSON with a comma in front."""
    if scores is None:
        return ""
    listed = [token.as_dict(unknown=UNKNOWN_LOGPROB) for token in scores.answer(part)]
    return f',"logprobs":{_json(listed)}' if listed else ""


def _answer(submitted: SubmittedRequest, generation: _OllamaRequest, deltas: list[Delta]) -> Response:
    completion = join_deltas(deltas)
    message = parsed_message(submitted.message_parser(), completion)
    read = MessageDelta(reasoning=message.reasoning_content, content=message.content)
    fields = generation.fields(read, message.tool_calls)
    ending = _ending(submitted, completion)
    logprobs = _logprobs(generation.scores(submitted), completion)
    answer = f"{_line_head(generation.shown_name)}{fields},{ending}{logprobs}}}"
    return Response(answer, media_type="application/json")


class _LineStream(EventStream):
    """A streamed answer in lines of JSON."""

    content_type = "application/x-ndjson"

    @staticmethod
    def framed_error(document: bytes) -> bytes:
        return document + b"\n"


class _LineFrames(Frames):
    """The lines of a streamed answer."""

    def __init__(self, submitted: SubmittedRequest, generation: _OllamaRequest) -> None:
        self._submitted = submitted
        self._generation = generation
        self._parser = submitted.message_parser()
        self._scores = generation.scores(submitted)
        self._calls: list[ToolCallDelta] = []  # clients expect whole calls

    def delta(self, delta: Delta) -> bytes:
        read = read_delta(self._parser, delta)
        logprobs = _logprobs(self._scores, delta)
        written = b""
        if read.content or read.reasoning or logprobs:
            written = self._line(self._generation.fields(read), f'"done":false{logprobs}')
        self._calls += read.tool_calls
        if delta.finish_reason is None:
            return written
        if calls := joined_calls(self._calls):
            written += self._line(self._generation.fields(MessageDelta(), calls), '"done":false')
        return written + self._line(self._generation.fields(MessageDelta()), _ending(self._submitted, delta))

    def error(self, error: GenserveError) -> bytes:
        return f"{_json(ollama_error(error))}\n".encode()

    def progress(self, progress: PromptProgress) -> bytes:
        reported = f'"prompt_progress":{_json(prompt_progress(progress))}'
        return self._line(self._generation.fields(MessageDelta()), f'"done":false,{reported}')

    def ping(self) -> bytes:
        """Return a part without text: Ollama's clients cannot parse an empty line."""
        return _line(self._generation.body, self._generation.shown_name, MessageDelta())

    def _line(self, fields: str, ending: str) -> bytes:
        return f"{_line_head(self._generation.shown_name)}{fields},{ending}}}\n".encode()
