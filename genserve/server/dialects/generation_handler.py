"""Generation handler: answers a generation request of any dialect, whole or as server-sent events.

A dialect brings the body of its requests (`GenerationBody`), the frames of its streams (`Frames`) and a
function that makes the whole answer.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import orjson
from fastapi import Request, Response
from fastapi.responses import JSONResponse

from genserve.completion import Delta
from genserve.engine.delta_streams import AsyncDeltaStream, EventLoopSink, opened
from genserve.engine.generation_request import GenerationRequest
from genserve.engine.input_queue import Reservation
from genserve.errors import Closed, InvalidRequest
from genserve.prompt import Chat, Prompt, Reasoning
from genserve.request_context import NO_KEY, RequestContext, current_request
from genserve.sampling.sampling_params import SamplingParams
from genserve.server.error_formats import named_as, renamed
from genserve.server.http.offload import answer_cost, offload_if_large
from genserve.server.http.request_body import json_cost
from genserve.server.http.sse_response import (
    PING,
    PING_S,
    EventStream,
    Frames,
    LoadingStream,
    while_connected,
)
from genserve.server.services import Services
from genserve.text.detokenizer import Detokenizer
from genserve.text.message_parser import MessageParser
from genserve.textmodel.text_model import TextModel, needs_grammar

_MAX_HEADER_CHARS = 1024
# Slices of a whole answer: a short list may have large objects, a long one has small ones.
_MAX_SHORT = 256
_SLICE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedRequest:
    """A request that the engine has accepted.

    Attributes:
        id: the id of the answer, without the prefix that a dialect writes.
        model: answers it.
        stream: the deltas of its answers; has one `GenerationRequest` for each prompt.
        prompt: the first prompt as the client wrote it.
        params: the sampling parameters, with the model's defaults.
        may_show_cached: whether the client may read the tokens of other prompts that its key has sent.
    """

    id: str
    model: TextModel
    stream: AsyncDeltaStream
    prompt: Prompt
    params: SamplingParams
    may_show_cached: bool

    @property
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        """The token ids of each prompt."""
        return tuple(request.prompt_token_ids for request in self.stream.requests)

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seed of each choice."""
        return tuple(seed for request in self.stream.requests for seed in request.seeds)

    @property
    def num_truncated(self) -> tuple[int, ...]:
        """For each prompt, how many tokens were cut off, as the request asked."""
        return tuple(request.num_truncated_tokens for request in self.stream.requests)

    def unused_reasoning(self, asked: Mapping[str, Reasoning]) -> list[str]:
        """Return the fields without effect on the reasoning; `asked` has what each by itself asks for."""
        return [name for name, reasoning in asked.items() if not self._follows(reasoning)]

    def _follows(self, asked: Reasoning) -> bool:
        if asked == Reasoning():
            return True
        if self.params.structured_outputs is not None:  # which leaves no place for it
            return self.model.reads_reasoning(Reasoning(enabled=False))
        is_met = self.model.reasons and (asked.budget is not None or asked.enabled is True)
        return is_met or self.model.reads_reasoning(asked)

    def message_parser(self) -> MessageParser | None:
        """Return a parser of one answer; None: all of the text is content."""
        begun = self.stream.requests[0].begins_reasoning
        return self.model.builder.message_parser(self.prompt, self.params, begun=begun)

    def detokenizer(self, *, prompt: int = 0) -> Detokenizer:
        """Return a fresh detokenizer of one answer to the prompt with this index, for its tokens' texts."""
        token_ids = self.stream.requests[prompt].prompt_token_ids
        return self.model.builder.detokenizer(self.prompt, self.params, token_ids=token_ids)


class GenerationBody(Protocol):
    """The body of a generation request, in its dialect's words."""

    @property
    def model_name(self) -> str | None:
        """The model's name; None: the only model."""

    @property
    def num_choices(self) -> int:
        """The number of answers to each prompt."""

    @property
    def stream(self) -> bool | None:
        """Whether to stream the answer."""

    @property
    def return_progress(self) -> bool | None:
        """Whether a stream reports how much of the prompt was read."""

    def check(self) -> None:
        """Raise InvalidRequest for a field that is not supported, or contradicts another."""

    def prompts(self) -> Sequence[Prompt]:
        """The prompts in their order; raises InvalidRequest."""

    def params(self) -> SamplingParams:
        """The sampling parameters; raises InvalidRequest."""

    def names(self) -> Mapping[str, str]:
        """The dialect's names of fields, by ours, for errors."""

    def ignored(self, submitted: SubmittedRequest) -> Iterable[str]:
        """The fields without effect on the answer, by the dialect's names.

        A tool, or a part of the messages, that is left out is its place and its type:
        `tools[2]=web_search_20250305`.
        """


_Body = TypeVar("_Body", bound=GenerationBody)


async def handle_generation(
    body: _Body,
    services: Services,
    request: Request,
    *,
    frames: Callable[[SubmittedRequest, _Body], Frames],
    answer: Callable[[SubmittedRequest, _Body, list[Delta]], Response],
    stream_response: type[EventStream] = EventStream,
    ping: bytes = PING,
) -> Response:
    """Answer a request: with `frames` as the deltas come, or with one `answer` of all deltas.

    Args:
        body: the request's body.
        services: the server's services.
        request: the request over HTTP.
        frames: makes the frames of a stream.
        answer: makes the whole answer, on a thread if it is long.
        stream_response: sends the frames.
        ping: a sign of life while the model loads.

    Raises:
        InvalidRequest: with the dialect's field names; see `GenerationBody`, `submit`.
        ClientLeft: the client has disconnected.
        GenserveError: see `submit`, and the model may fail. Once a stream has begun, errors are events of it.
    """
    prompts, params = await offload_if_large(json_cost(request), _read_body, body)
    _log_request(body.model_name, prompts)  # a model that does not exist has a span, too

    async def generated(_model: TextModel) -> Response:
        submitting = _submit(body, services, prompts, params)
        response: Response
        if body.stream:
            submitted = await while_connected(submitting, request.receive)
            current_request().streams = True
            response = stream_response(submitted.stream, frames(submitted, body))
            await response.begin(request.receive)
        else:
            # One task for both: a second one would be watched anew.
            submitted, deltas = await while_connected(_read_all(submitting), request.receive)
            response = await offload_if_large(answer_cost(deltas), answer, submitted, body, deltas)
        _add_headers(response, body, params, submitted)
        return response

    streams = stream_response if body.stream else None
    return await answer_when_loaded(services, body.model_name, generated, streams=streams, ping=lambda: ping)


def _log_request(model_name: str | None, prompts: Sequence[Prompt]) -> RequestContext:
    """Give the current request its model and its operation, and return it."""
    context = current_request()
    context.model = model_name or ""
    context.operation = "chat" if isinstance(prompts[0], Chat) else "text_completion"
    return context


async def answer_when_loaded(
    services: Services,
    model_name: str | None,
    answer: Callable[[TextModel], Awaitable[Response]],
    *,
    streams: type[EventStream] | None,
    ping: Callable[[], bytes] = lambda: PING,
    keep_alive_s: float | None = None,
) -> Response:
    """Return the answer of a text model, which is loaded first if it is loaded on demand.

    Args:
        services: the server's services.
        model_name: the model's name; None: the only one.
        answer: makes the answer of the loaded model.
        streams: the class of the answer if it is a stream, which begins with signs of life if the load takes
            long; None: it is whole.
        ping: returns a sign of life.
        keep_alive_s: see `OnDemandModels.use`.

    Raises:
        ClientLeft: the client has disconnected; others that wait still get the model.
        GenserveError: see `Services.text_model`, and `answer` may fail.
    """
    current_request().model = model_name or ""  # the line of a model that does not exist has its name, too
    if services.repository.on_demand is None:
        return await answer(services.repository.text_model(model_name))
    loading = asyncio.ensure_future(services.text_model(model_name, keep_alive_s=keep_alive_s))
    try:
        await asyncio.wait([loading], timeout=PING_S if streams else None)
    except asyncio.CancelledError:
        loading.cancel()
        raise
    if streams is not None and not loading.done():
        return LoadingStream(loading, answer, ping=ping, streams=streams)
    return await answer(loading.result())


def _add_headers(
    response: Response, body: GenerationBody, params: SamplingParams, submitted: SubmittedRequest
) -> None:
    """Add the headers that say what of the request had no effect, was lowered or was truncated."""
    # Names come from clients, and a header holds less than JSON does.
    names = [name for name in body.ignored(submitted) if name.isascii() and name.isprintable()]
    if names:
        response.headers["x-genserve-ignored"] = ",".join(names)[:_MAX_HEADER_CHARS]
        current_request().left_out = ",".join(name for name in names if "=" in name)
    if clamped := ",".join(_clamped(body, params, submitted)):
        response.headers["x-genserve-clamped"] = clamped[:_MAX_HEADER_CHARS]
    if any(submitted.num_truncated):
        counts = ",".join(map(str, submitted.num_truncated))
        response.headers["x-genserve-truncated"] = counts[:_MAX_HEADER_CHARS]


def _clamped(body: GenerationBody, params: SamplingParams, submitted: SubmittedRequest) -> Iterator[str]:
    """Yield the lengths of answers that were lowered to the room in the context: `max_tokens=2323`."""
    names = ["max_tokens", "min_tokens"] if "max_tokens" in params.stated else ["min_tokens"]
    for request in submitted.stream.requests:
        for name in names:
            length = getattr(request.params, name)
            if length < getattr(params, name):
                yield f"{body.names().get(name, name)}={length}"


def _read_body(body: GenerationBody) -> tuple[Sequence[Prompt], SamplingParams]:
    """Return the prompts and parameters of a body; raises InvalidRequest, with the dialect's field names."""
    body.check()
    with named_as(body.names):
        return body.prompts(), body.params()


async def _submit(
    body: GenerationBody, services: Services, prompts: Sequence[Prompt], params: SamplingParams
) -> SubmittedRequest:
    """Submit a request; raises the errors of `submit`, with the dialect's field names."""
    with named_as(body.names):
        return await submit(
            services,
            body.model_name,
            prompts,
            params,
            num_choices=body.num_choices,
            return_progress=bool(body.stream and body.return_progress),
        )


async def _read_all(submitting: Awaitable[SubmittedRequest]) -> tuple[SubmittedRequest, list[Delta]]:
    """Return a request and all deltas of its answer, which ends if this is cancelled."""
    submitted = await submitting
    async with submitted.stream as stream:
        return submitted, [delta async for deltas in stream for delta in deltas]


async def submit(
    services: Services,
    model_name: str | None,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    num_choices: int = 1,
    return_progress: bool = False,
) -> SubmittedRequest:
    """Validate a request completely and submit it to the engine.

    Each prompt has `num_choices` choices, or `params.best_of` if that is more; these are ranked by their
    log-probabilities, which the deltas then carry. Choices are in the order of the prompts.
    `return_progress`: see `GenerationRequest`.

    Raises:
        InvalidRequest: it has more choices than may run and wait; otherwise, see
            `TextModel.prepare`. With several prompts, `field` names the prompt.
        GenserveError: see `ServedModels.text_model`, `TextEngine.reserve`, `TextEngine.submit`.
    """
    services.check_running()
    logged = _log_request(model_name, prompts)
    model = services.repository.text_model(model_name)
    logged.model = model.name
    if params.best_of > num_choices:
        num_choices, params = params.best_of, replace(params, logprobs=True)
    _check_count(len(prompts), params, num_choices=num_choices, limit=model.engine.capacity)
    try:
        # The queue's limits come before the cost of tokenizing.
        with model.engine.reserve(
            len(prompts) * num_choices, priority=params.priority, share=logged.key
        ) as reservation:
            work = partial(
                _open,
                services.output_sink(),
                model,
                prompts,
                params,
                num_choices=num_choices,
                return_progress=return_progress,
                reservation=reservation,
            )
            compiles = any(needs_grammar(prompt, params) for prompt in prompts)
            stream = await opened(model.run_soon(work, compiles=compiles))
    except Closed:
        if services.repository.text_model(model_name) is model:
            raise
        # Another model has taken its place meanwhile.
        return await submit(
            services, model_name, prompts, params, num_choices=num_choices, return_progress=return_progress
        )
    logged.answers, logged.num_choices = stream.answers, num_choices
    answer_id = uuid.uuid4().hex
    services.answers.add(stream, logged, answer_id=answer_id)
    return SubmittedRequest(
        id=answer_id,
        model=model,
        stream=stream,
        prompt=prompts[0],
        params=stream.requests[0].params,
        # Without keys, everybody who can connect is one client.
        may_show_cached=logged.key != NO_KEY or services.is_local,
    )


def _check_count(num_prompts: int, params: SamplingParams, *, num_choices: int, limit: int) -> None:
    if params.return_receipt and num_prompts * num_choices > 1:
        raise InvalidRequest(
            "return_receipt is for one answer",
            field="return_receipt",
            remedy="send a request for each answer",
        )
    if num_prompts * num_choices > limit:
        name = "best_of" if params.best_of > 1 else "n"
        raise InvalidRequest(
            f"{num_prompts} prompts with {name} = {num_choices} make {num_prompts * num_choices} sequences; "
            f"at most {limit} may run and wait",
            field=name if num_choices > 1 else "prompt",
            remedy="send several requests, or raise --max-queue",
        )


def _open(
    sink: EventLoopSink,
    model: TextModel,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    num_choices: int,
    return_progress: bool,
    reservation: Reservation,
) -> AsyncDeltaStream:
    """Validate and submit a request, on a thread of the model."""
    reservation.check()
    requests: list[GenerationRequest] = []
    for index, prompt in enumerate(prompts):
        try:
            request = model.prepare(
                prompt,
                params,
                num_choices=num_choices,
                arrived_s=reservation.arrived_s,
                return_progress=return_progress,
            )
        except InvalidRequest as error:
            raise renamed(error, {"prompt": f"prompt[{index}]"} if len(prompts) > 1 else {}) from None
        requests.append(request)
    return sink.open(model.engine, *requests, reservation=reservation)


class AnswerResponse(JSONResponse):
    """A response with a JSON document, which is a tenth of the work of `JSONResponse`."""

    def render(self, content: Any) -> bytes:
        """Return the JSON text; takes time in proportion to it."""
        return json_bytes(content)


def json_bytes(document: Any) -> bytes:
    """Return a document as JSON, written part by part: orjson keeps other threads waiting while it writes.

    The parts are the objects in short lists, such as the choices of an answer, and slices of long ones.
    """
    if not isinstance(document, dict):
        return _written(document)
    if not any(isinstance(value, list) and len(value) > 1 for value in document.values()):
        return orjson.dumps(document)
    members = [orjson.dumps(name) + b":" + _written(value) for name, value in document.items()]
    return b"{" + b",".join(members) + b"}"


def _written(value: Any) -> bytes:
    if not isinstance(value, list) or not value or not isinstance(value[0], dict):
        return orjson.dumps(value)
    step = 1 if len(value) <= _MAX_SHORT else _SLICE
    parts = (value[start : start + step] for start in range(0, len(value), step))
    return b"[" + b",".join([orjson.dumps(part)[1:-1] for part in parts]) + b"]"
