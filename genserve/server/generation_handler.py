"""Generation handler: answers a generation request of any dialect, whole or as server-sent events.

A dialect brings the body of its requests (`GenerationBody`), the frames of its streams (`Frames`) and a
function that makes the whole answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import orjson
from fastapi import Request, Response
from fastapi.responses import JSONResponse
from starlette.types import Receive

from genserve.completion import Delta
from genserve.errors import Closed, InvalidRequest, ModelNotReady
from genserve.generation.delta_streams import AsyncDeltaStream
from genserve.generation.engine_request import TokenSequence
from genserve.generation.request_inbox import Reservation
from genserve.log import CURRENT_REQUEST, LoggedRequest
from genserve.prompt import Chat, Prompt
from genserve.sampling.sampling_params import SamplingParams
from genserve.server.error_responses import renamed
from genserve.server.offload import answer_cost, offload_if_large
from genserve.server.services import Services
from genserve.server.sse_response import EventStream, Frames, read_all, while_connected
from genserve.text.message_parser import MessageParser
from genserve.textmodel.text_model import TextModel, needs_grammar

_MAX_HEADER_CHARS = 1024
# Delay before the client of a request that is being prepared is watched: nearly all are prepared sooner, and
# to watch costs two tasks.
_WATCH_DELAY_S = 0.05
# Slices of a whole answer: a short list may have large objects, a long one has small ones.
_MAX_SHORT = 256
_SLICE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedRequest:
    """A request that the engine has accepted."""

    model: TextModel
    stream: AsyncDeltaStream
    prompt: Prompt                          # the first one, as the request has it
    prompts: tuple[tuple[int, ...], ...]    # token ids, by prompt
    seeds: tuple[int, ...]                  # by choice
    params: SamplingParams                  # with the model's defaults
    begins_reasoning: bool                  # the first prompt ends within reasoning

    def message_parser(self) -> MessageParser | None:
        """Return a parser of one answer; None: all of the text is content."""
        return self.model.message_parser(self.prompt, self.params, begun=self.begins_reasoning)


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

    def check(self) -> None:
        """Raise InvalidRequest for a field that is not supported, or contradicts another."""

    def prompts(self) -> Sequence[Prompt]:
        """The prompts in their order; raises InvalidRequest."""

    def params(self) -> SamplingParams:
        """The sampling parameters; raises InvalidRequest."""

    def names(self) -> Mapping[str, str]:
        """The dialect's names of fields, by ours, for errors."""

    def ignored(self, params: SamplingParams) -> Iterable[str]:
        """The fields without effect on the answer, by the dialect's names."""


_Body = TypeVar("_Body", bound=GenerationBody)


async def handle_generation(
    body: _Body,
    services: Services,
    request: Request,
    *,
    frames: Callable[[SubmittedRequest, _Body], Frames],
    answer: Callable[[SubmittedRequest, _Body, list[Delta]], Response],
    stream_response: type[EventStream] = EventStream,
) -> Response:
    """Answer a request: with `frames` as the deltas come, or with one `answer` of all deltas.

    Args:
        body: of the request.
        services: of the server.
        request: the request over HTTP.
        frames: makes the frames of a stream.
        answer: makes the whole answer, on a thread if it is long.
        stream_response: sends the frames.

    Raises:
        InvalidRequest: with the dialect's field names; see `GenerationBody`, `submit`.
        ClientLeft, GenserveError: see `submit`, `read_all`. Once a stream has begun, errors are events of it.
    """
    body.check()
    try:
        submitted = await submit(
            services,
            body.model_name,
            body.prompts(),
            body.params(),
            num_choices=body.num_choices,
            receive=request.receive,
        )
    except InvalidRequest as error:
        raise renamed(error, body.names()) from None
    response: Response
    if body.stream:
        if logged := CURRENT_REQUEST.get():
            logged.streams = True
        response = stream_response(submitted.stream, frames(submitted, body))
    else:
        deltas = await read_all(submitted.stream, request)
        response = await offload_if_large(answer_cost(deltas), answer, submitted, body, deltas)
    # Names come from clients, and a header holds less than JSON does.
    names = (name for name in body.ignored(submitted.params) if name.isascii() and name.isprintable())
    if ignored := ",".join(names):
        response.headers["x-genserve-ignored"] = ignored[:_MAX_HEADER_CHARS]
    return response


async def submit(
    services: Services,
    model_name: str | None,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    num_choices: int = 1,
    receive: Receive | None = None,
) -> SubmittedRequest:
    """Validate a request completely and submit it to the engine.

    With `receive`, of the ASGI protocol, it gives up when the client disconnects.

    Each prompt has `num_choices` choices, or `params.best_of` if that is more; these are ranked by their
    log-probabilities, which the deltas then carry. Choices are in the order of the prompts.

    Raises:
        InvalidRequest: it has more choices than may run and wait; otherwise, see
            `TextModel.prepare_choices`. With several prompts, `field` names the prompt.
        ClientLeft: the client has disconnected.
        GenserveError: see `Repository.text_model`, `EngineThread.reserve`, `EngineThread.submit`.
    """
    if services.draining:
        raise ModelNotReady("the server is stopping", remedy="try again on another server")
    logged = CURRENT_REQUEST.get() or LoggedRequest(id="")
    logged.model = model_name or ""
    logged.operation = "chat" if isinstance(prompts[0], Chat) else "text_completion"
    model = services.repository.text_model(model_name)
    logged.model = model.name
    if params.best_of > num_choices:
        num_choices, params = params.best_of, replace(params, logprobs=True)
    _check_count(len(prompts), params, num_choices=num_choices, limit=model.engine.capacity)
    try:
        # The queue's limits come before the cost of tokenizing.
        with model.engine.reserve(len(prompts) * num_choices, priority=params.priority) as reservation:
            prepare = partial(
                _prepare, model, prompts, params, num_choices=num_choices, reservation=reservation
            )
            compiles = any(needs_grammar(prompt, params) for prompt in prompts)
            future = model.run_soon(prepare, compiles=compiles)
            sequences = await _prepared(asyncio.wrap_future(future), receive)
            # Copied before the engine's thread appends to them.
            prompt_ids = tuple(tuple(sequence.token_ids) for sequence in sequences[::num_choices])
            stream = services.output_sink().open(model.engine, *sequences, reservation=reservation)
    except Closed:
        if services.repository.text_model(model_name) is model:
            raise
        # Another model has taken its place meanwhile.
        return await submit(services, model_name, prompts, params, num_choices=num_choices, receive=receive)
    logged.answers, logged.num_choices = sequences, num_choices
    return SubmittedRequest(
        model=model,
        stream=stream,
        prompt=prompts[0],
        prompts=prompt_ids,
        seeds=tuple(sequence.sampling.seed for sequence in sequences),
        params=sequences[0].params,
        begins_reasoning=sequences[0].begins_reasoning,
    )


async def _prepared(
    preparing: asyncio.Future[list[TokenSequence]], receive: Receive | None
) -> list[TokenSequence]:
    """Wait for the sequences of a request; cancels the wait for a thread if the client disconnects."""
    done, _ = await asyncio.wait({preparing}, timeout=_WATCH_DELAY_S)
    if done or receive is None:
        return await preparing
    sequences = await while_connected(preparing, receive)
    assert sequences is not None
    return sequences


def _check_count(num_prompts: int, params: SamplingParams, *, num_choices: int, limit: int) -> None:
    if num_prompts * num_choices > limit:
        name = "best_of" if params.best_of > 1 else "n"
        raise InvalidRequest(
            f"{num_prompts} prompts with {name} = {num_choices} make {num_prompts * num_choices} sequences; "
            f"at most {limit} may run and wait",
            field=name if num_choices > 1 else "prompt",
            remedy="send several requests, or raise --max-queue",
        )


def _prepare(
    model: TextModel,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    num_choices: int,
    reservation: Reservation,
) -> list[TokenSequence]:
    reservation.check()
    sequences: list[TokenSequence] = []
    for index, prompt in enumerate(prompts):
        try:
            sequences += model.prepare_choices(
                prompt, params, num_choices=num_choices, arrived_s=reservation.arrived_s
            )
        except InvalidRequest as error:
            raise renamed(error, {"prompt": f"prompt[{index}]"} if len(prompts) > 1 else {}) from None
    return sequences


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
    members = (orjson.dumps(name) + b":" + _written(value) for name, value in document.items())
    return b"{" + b",".join(members) + b"}"


def _written(value: Any) -> bytes:
    if not isinstance(value, list) or not value or not isinstance(value[0], dict):
        return orjson.dumps(value)
    step = 1 if len(value) <= _MAX_SHORT else _SLICE
    parts = (value[start : start + step] for start in range(0, len(value), step))
    return b"[" + b",".join([orjson.dumps(part)[1:-1] for part in parts]) + b"]"
