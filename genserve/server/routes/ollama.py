"""Ollama's dialect: `/api/chat`, `/api/generate`, and what its clients ask about models."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NoReturn

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from genserve.completion import (
    Completion,
    Delta,
    FinishReason,
    MessageDelta,
    ToolCallDelta,
    Usage,
    join_deltas,
    joined_calls,
)
from genserve.errors import GenserveError, InferenceError, InvalidRequest, ModelNotFound, Status
from genserve.log import CURRENT_REQUEST
from genserve.prompt import Prompt, ToolCall
from genserve.redaction import redacted_error
from genserve.sampling.sampling_params import SamplingParams, unused_parameters
from genserve.server.error_responses import ErrorFormat, ErrorFormats, http_status, kserve_status, renamed
from genserve.server.generation_handler import SubmittedRequest, handle_generation
from genserve.server.request_body import StrictRoute, TolerantBody
from genserve.server.routes.logprob_formats import TokenScores
from genserve.server.routes.ollama_body import OllamaBody, OllamaChatBody, OllamaGenerateBody
from genserve.server.services import Services, SharedServices
from genserve.server.sse_response import EventStream, Frames, documented
from genserve.text.message_parser import arguments_so_far, parsed_message, read_delta
from genserve.textmodel.text_model import TextModel

router = APIRouter(prefix="/api", route_class=StrictRoute, tags=["Ollama"])

# The version of Ollama whose API this is; clients compare it with the one that they need.
_API_VERSION = "0.24.0"
_TAG = ":latest"
_NEVER = "2318-01-01T00:00:00Z"     # models stay loaded; Ollama writes such a year, too
# Ollama has no word for a text that was stopped because it repeats itself.
_DONE_REASONS = {
    FinishReason.END_OF_SEQUENCE: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.REPETITION: "length",
}
_REPOSITORY = "models come from the model repository: `genserve pull` and `genserve export` add some"


def ollama_error(error: GenserveError) -> dict[str, Any]:
    """Return the error body of Ollama's dialect; its clients show nothing but the message."""
    error = redacted_error(error)
    return {"error": f"{error.message}; {error.remedy}" if error.remedy else error.message}


def _status(error: GenserveError) -> int:
    return kserve_status(error) if isinstance(error, InferenceError) else http_status(error)


ERRORS: ErrorFormats = {"/api/": ErrorFormat(ollama_error, _status)}


class ModelFields(TolerantBody):
    """The name of a model."""

    model: str | None = Field(default=None, description="The name of the model.")
    name: str | None = Field(default=None, description="The older name of `model`.")
    stream: bool | None = Field(
        default=None, description="Answer in lines.", json_schema_extra={"default": True}
    )


@router.post("/chat", responses=documented("application/x-ndjson"))
async def chat(body: OllamaChatBody, services: SharedServices, request: Request) -> Response:
    """Answer a chat, in lines of JSON or whole."""
    return await _handle(body, services, request)


@router.post("/generate", responses=documented("application/x-ndjson"))
async def generate(body: OllamaGenerateBody, services: SharedServices, request: Request) -> Response:
    """Answer a prompt, in lines of JSON or whole."""
    return await _handle(body, services, request)


@router.get("/version")
async def version() -> dict[str, str]:
    """Return the version of Ollama whose API this is."""
    return {"version": _API_VERSION}


@router.get("/tags")
async def tags(services: SharedServices) -> dict[str, Any]:
    """List the models."""
    return {"models": [_listed(model) for model in services.repository.text_models]}


@router.get("/ps")
async def running(services: SharedServices) -> dict[str, Any]:
    """List the loaded models, which are all of them."""
    more = {"expires_at": _NEVER, "size_vram": 0}
    models = services.repository.text_models
    return {
        "models": [_listed(model) | more | {"context_length": model.max_length} for model in models]
    }


@router.post("/show")
async def show(body: ModelFields, services: SharedServices) -> dict[str, Any]:
    """Describe a model."""
    model = _model(services, body.model or body.name)
    template = model.tokenizer.chat_template
    family, defaults = _family(model), model.default_sampling_params.items()
    return {
        "modelfile": f"FROM {model.name}\n",
        "parameters": "\n".join(f"{name:<30} {value}" for name, value in defaults),
        "template": template.source if template else "{{ .Prompt }}",
        "details": _details(model),
        "model_info": {
            "general.architecture": family,
            "general.basename": model.name,
            f"{family}.context_length": model.max_length,
            f"{family}.vocab_size": model.vocab_size,
        },
        "capabilities": [
            "completion",
            *(["tools"] if template else []),
            *(["thinking"] if model.reasons else []),
        ],
        "modified_at": _written_time(model.loaded_s),
    }


@router.post("/pull", responses=documented("application/x-ndjson"))
async def pull(body: ModelFields, services: SharedServices) -> Response:
    """Confirm that a model is there; this server downloads none."""
    name = body.model or body.name
    try:
        _model(services, name)
    except ModelNotFound:
        problem = f"model {_shown(name)} not found: this server downloads none"
        raise ModelNotFound(problem, remedy=_REPOSITORY, field="model") from None
    done = {"status": "success"}
    if body.stream is False:
        return JSONResponse(done)
    return Response(json.dumps(done) + "\n", media_type=_LineStream.content_type)


def _reject(problem: str, *, remedy: str = _REPOSITORY) -> NoReturn:
    raise InferenceError(problem, status=Status.UNSUPPORTED, remedy=remedy)


@router.post("/push", include_in_schema=False)
@router.post("/create", include_in_schema=False)
@router.post("/copy", include_in_schema=False)
@router.delete("/delete", include_in_schema=False)
@router.post("/blobs/{digest}", include_in_schema=False)
async def change_models() -> Response:
    """Reject a change of the models."""
    _reject("this server changes no models")


@router.post("/embed", include_in_schema=False)
@router.post("/embeddings", include_in_schema=False)
async def embed() -> Response:
    """Reject a request for embeddings."""
    _reject("this server does not compute embeddings", remedy="it generates text: /api/chat, /api/generate")


def _model(services: Services, name: str | None) -> TextModel:
    """Return a model by its name, with or without the tag."""
    if name is not None and name not in services.repository.text_model_names:
        name = name.removesuffix(_TAG)
    try:
        return services.repository.text_model(name)
    except ModelNotFound as error:
        if name is None:
            raise
        raise ModelNotFound(f"model {_shown(name)} not found", remedy=error.remedy, field="model") from None


def _shown(name: str | None) -> str:
    """Return an unknown name for an error; a client may send any text."""
    return repr(name and name[:128])


def _listed(model: TextModel) -> dict[str, Any]:
    name = f"{model.name}{_TAG}"
    return {
        "name": name,
        "model": name,
        "modified_at": _written_time(model.loaded_s),
        "size": model.weights_bytes,
        "digest": hashlib.sha256(f"{name} {model.weights_bytes}".encode()).hexdigest(),
        "details": _details(model),
    }


def _details(model: TextModel) -> dict[str, Any]:
    family = _family(model)
    return {
        "parent_model": "",
        "format": "triton",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": model.precision,
    }


def _family(model: TextModel) -> str:
    return model.logits.metadata.get("genserve.family", "unknown")


def _written_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class _OllamaRequest:
    """One request, as `GenerationBody`: the body, and the model that it is for."""

    body: OllamaBody
    model: TextModel
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

    def check(self) -> None:
        self.body.check(self.model)

    def prompts(self) -> list[Prompt]:
        return [self.body.prompt(self.model)]

    def params(self) -> SamplingParams:
        return self.body.params()

    def names(self) -> Mapping[str, str]:
        return self.body.names()

    def ignored(self, params: SamplingParams) -> list[str]:
        names = self.body.options.names()
        return [*self.body.unused(), *(names.get(name, name) for name in unused_parameters(params))]

    def scores(self) -> TokenScores | None:
        """Return a reader of the log-probabilities of the answer; None: the request wants none."""
        return TokenScores(self.model.tokenizer.detokenizer()) if self.body.logprobs else None

    def fields(self, read: MessageDelta, calls: Sequence[ToolCall] = ()) -> str:
        """Return the fields of a part of the answer, or of all of it, as JSON without braces."""
        content, thinking = json.dumps(read.content), ""
        if read.reasoning:
            thinking = f',"thinking":{json.dumps(read.reasoning)}'
        if not isinstance(self.body, OllamaChatBody):
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
    generation = _OllamaRequest(body=body, model=_model(services, body.model))
    if body.is_empty:
        generation.check()
        try:
            generation.params()     # the options of a load request are validated, too
        except InvalidRequest as error:
            raise renamed(error, generation.names()) from None
        fields = f'{generation.fields(MessageDelta())},"done":true,"done_reason":"load"'
        return Response(f"{_line_head(generation)}{fields}}}", media_type="application/json")
    return await handle_generation(
        generation,
        services,
        request,
        frames=_LineFrames,
        answer=_answer,
        stream_response=_LineStream,
    )


def _line_head(generation: _OllamaRequest) -> str:
    """Return the beginning of an object of an answer."""
    name = json.dumps(generation.shown_name)
    return f'{{"model":{name},"created_at":"{_written_time(time.time())}",'


def _ending(reason: FinishReason, usage: Usage) -> str:
    """Return the last fields of an answer, as JSON without braces; times are in nanoseconds."""
    logged = CURRENT_REQUEST.get()
    total_s = first_token_s = 0.0
    if logged is not None:
        total_s = time.monotonic() - logged.started_s
        first_token_s = min(logged.first_token_s() or 0.0, total_s)
    counts = {
        "total_duration": round(total_s * 1e9),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": round(first_token_s * 1e9),
        "eval_count": usage.completion_tokens,
        "eval_duration": round((total_s - first_token_s) * 1e9),
    }
    return f'"done":true,"done_reason":"{_DONE_REASONS[reason]}",{_json(counts)[1:-1]}'


def _logprobs(scores: TokenScores | None, part: Delta | Completion) -> str:
    """Return the field of the log-probabilities, as JSON with a comma in front."""
    if scores is None:
        return ""
    listed = [token.as_dict() for token in scores.answer(part)]
    return f',"logprobs":{_json(listed)}' if listed else ""


def _answer(submitted: SubmittedRequest, generation: _OllamaRequest, deltas: list[Delta]) -> Response:
    completion = join_deltas(deltas)
    message = parsed_message(submitted.message_parser(), completion)
    read = MessageDelta(reasoning=message.reasoning_content, content=message.content)
    fields = generation.fields(read, message.tool_calls)
    ending = _ending(completion.finish_reason, completion.usage)
    logprobs = _logprobs(generation.scores(), completion)
    answer = f"{_line_head(generation)}{fields},{ending}{logprobs}}}"
    return Response(answer, media_type="application/json")


class _LineStream(EventStream):
    """A streamed answer in lines of JSON, which have no pings."""

    content_type = "application/x-ndjson"
    ping_s = 0


class _LineFrames(Frames):
    """The lines of a streamed answer."""

    def __init__(self, submitted: SubmittedRequest, generation: _OllamaRequest) -> None:
        self._generation = generation
        self._parser = submitted.message_parser()
        self._scores = generation.scores()
        self._calls: list[ToolCallDelta] = []   # clients expect whole calls

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
        assert delta.usage is not None
        ending = _ending(delta.finish_reason, delta.usage)
        return written + self._line(self._generation.fields(MessageDelta()), ending)

    def error(self, error: GenserveError) -> bytes:
        return f"{_json(ollama_error(error))}\n".encode()

    def _line(self, fields: str, ending: str) -> bytes:
        return f"{_line_head(self._generation)}{fields},{ending}}}\n".encode()
