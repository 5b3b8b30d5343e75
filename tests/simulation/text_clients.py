"""Clients of a text model in a simulation: over HTTP, and on threads of their own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from fastapi import Request, Response
from starlette.types import Message

from genserve.completion import Delta, FinishReason
from genserve.engine.delta_streams import DeltaStream
from genserve.engine.engine_request import LogitsRequest
from genserve.engine.engine_thread import EngineThread
from genserve.errors import GenserveError
from genserve.sampling.sampling_params import SamplingParams
from genserve.server.dialects.generation_handler import handle_generation
from genserve.server.http.sse_response import ClientLeft
from tests.simulation.simulated_logits import VOCAB_SIZE, row_after
from tests.simulation.text_requests import TextRequest
from tests.simulation.virtual_threads import SimpleQueue


@dataclass(slots=True, eq=False)
class Received:
    """What a client has received for one choice."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: object = None


@dataclass(slots=True, kw_only=True, eq=False)
class TextCall:
    """A running request, and what its client has received.

    Attributes:
        choices: the received parts of each choice.
        error: the error with which the request was rejected, or its stream ended.
        num_ends: how often the stream ended.
        left: the client has disconnected.
        problems: breaches of the protocol.
    """

    request: TextRequest
    choices: list[Received] = field(default_factory=list)
    error: GenserveError | None = None
    num_ends: int = 0
    left: bool = False
    began_s: float = 0.0
    ended_s: float = 0.0
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.choices = [Received() for _ in range(self.request.num_choices)]

    def take(self, delta: Mapping[str, Any]) -> None:
        choice = self.choices[delta["choice"]]
        if choice.finish_reason is not None:
            self.problems.append(f"choice {delta['choice']} continued after its end")
        choice.token_ids += delta["ids"]
        choice.text += delta["text"]
        choice.finish_reason = delta["finish"]
        choice.stop_reason = delta["stop"]


class Body:
    """Implements `GenerationBody` and, with it, `Frames`."""

    def __init__(self, request: TextRequest, *, model: str) -> None:
        self._request = request
        self.model_name = model
        self.num_choices = request.num_choices
        self.stream = request.stream
        self.return_progress = False

    def check(self) -> None:
        pass

    def prompts(self) -> Any:
        return [self._request]  # for `SimulatedTextModel`

    def params(self) -> SamplingParams:
        return self._request.params

    def names(self) -> Mapping[str, str]:
        return {}

    def ignored(self, params: SamplingParams) -> Iterable[str]:
        return ()

    def start(self, *, num_cached_tokens: int) -> bytes:
        return b""

    def delta(self, delta: Delta) -> bytes:
        return json.dumps(_as_dict(delta)).encode() + b"\n"

    def error(self, error: GenserveError) -> bytes:
        return json.dumps({"error": type(error).__name__}).encode() + b"\n"

    def end(self) -> bytes:
        return b'{"end": true}\n'

    def ping(self) -> bytes:
        return b": ping\n"


def _as_dict(delta: Delta) -> dict[str, Any]:
    return {
        "choice": delta.choice,
        "ids": delta.token_ids,
        "text": delta.text,
        "finish": delta.finish_reason,
        "stop": delta.stop_reason,
    }


class Connection:
    """The connection of one HTTP client, as a server's `receive` and `send`."""

    def __init__(self, call: TextCall, *, now_s: Callable[[], float]) -> None:
        self._call = call
        self._now_s = now_s
        self._gone = asyncio.Event()
        self._sent_body = False
        self._num_bodies = 0
        self._completed = False
        self.error_names: list[str] = []

    async def leave_at(self, when_s: float) -> None:
        await asyncio.sleep(max(0.0, when_s - self._now_s()))
        self._call.left = True
        self._gone.set()

    async def receive(self) -> Message:
        if not self._sent_body:     # the request's, which has been read
            self._sent_body = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        call = self._call
        if self._gone.is_set():
            return
        if self._completed:
            call.problems.append(f"{message['type']} after the end of the response")
        if message["type"] == "http.response.start":
            return
        self._num_bodies += 1
        for line in message.get("body", b"").splitlines():
            if line and not line.startswith(b":"):  # a ping
                self._read(json.loads(line))
        if not message.get("more_body", False):
            self._completed = True
            call.ended_s = self._now_s()
        if call.request.stalls:
            await self._gone.wait()
        elif call.request.read_s:
            await asyncio.sleep(call.request.read_s)

    def _read(self, event: Mapping[str, Any]) -> None:
        call = self._call
        if call.num_ends:
            call.problems.append("an event after the end of the stream")
        if "end" in event:
            call.num_ends += 1
        elif "error" in event:
            self.error_names.append(event["error"])
        elif self.error_names:
            call.problems.append("a delta after an error")
        else:
            call.take(event)

    def is_complete(self) -> bool:
        return self._completed


async def call_over_http(call: TextCall, services: Any, *, model: str, now_s: Callable[[], float]) -> None:
    """Send a request and read its answer to the end, or leave."""
    request = call.request
    await asyncio.sleep(request.arrives_s)
    call.began_s = now_s()
    connection = Connection(call, now_s=now_s)
    scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "query_string": b""}
    leaving = None
    if request.leaves_s is not None:
        leaving = asyncio.ensure_future(connection.leave_at(request.leaves_s))
    body = Body(request, model=model)
    http_request = Request(scope, connection.receive)
    try:
        await http_request.body()   # as the route has done
        response = await handle_generation(
            body,
            services,
            http_request,
            frames=lambda _submitted, body: body,
            answer=lambda _submitted, body, deltas: Response(b"".join(map(body.delta, deltas)) + body.end()),
        )
        await response(scope, connection.receive, connection.send)
        if not call.left and not connection.is_complete():
            call.problems.append("the response has no end")
        if not call.left and call.num_ends != 1:
            call.problems.append(f"the stream ended {call.num_ends} times")
        if connection.error_names:
            call.error = _StreamError(connection.error_names[0])
    except ClientLeft:
        if not call.left:
            call.problems.append("the server thinks that the client left")
    except GenserveError as error:
        call.error = error
        if call.num_ends or any(choice.token_ids for choice in call.choices):
            call.problems.append("an error was raised after the first byte")
    finally:
        call.ended_s = call.ended_s or now_s()
        if leaving is not None:
            leaving.cancel()


class _StreamError(GenserveError):
    """An error that was an event of a stream, by its name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def error_name(error: GenserveError) -> str:
    """Return the name of the class of an error, also of one that was an event."""
    return error.name if isinstance(error, _StreamError) else type(error).__name__


def call_on_thread(
    call: TextCall,
    engine: EngineThread,
    *,
    sleep: Callable[[float], None],
    now_s: Callable[[], float],
    leaves_after: int | None,
) -> None:
    """Read the deltas of a request on an ordinary thread, and stop after so many."""
    sleep(call.request.arrives_s)
    call.began_s = now_s()
    # Such a reader has no deadline.
    params = replace(call.request.params, max_time_ms=None)
    request = call.request.generation_request(params=params, arrived_s=now_s())
    try:
        with DeltaStream(engine, request) as stream:
            for count, delta in enumerate(stream, 1):
                call.take(_as_dict(delta))
                if count == leaves_after:
                    call.left = delta.finish_reason is None
                    break
            else:
                call.num_ends += 1
    except GenserveError as error:
        call.error = error
    call.ended_s = now_s()


class LogitsLoop:
    """A loop over logits, as in a model.py: it sends all token ids every time, and checks the row."""

    def __init__(self, engine: EngineThread, rng: Random, prompt: Sequence[int], *, max_length: int) -> None:
        self._engine = engine
        self._rng = rng
        self._token_ids = list(prompt)
        self._max_length = max_length
        self.errors: list[GenserveError] = []
        self.problems: list[str] = []
        self.num_asked = 0
        self.num_answered = 0
        self.num_cancelled = 0

    def run(self, *, num_calls: int, sleep: Callable[[float], None], cancel_rate: float) -> None:
        answers = SimpleQueue()
        for _ in range(num_calls):
            sleep(self._rng.choice([0.0, 0.00001, 0.001, 0.3]))
            request = LogitsRequest(
                self._token_ids, on_logits=answers.put, vocab_size=VOCAB_SIZE, max_length=self._max_length
            )
            try:
                self._engine.submit_logits([request])
            except GenserveError as error:
                self.errors.append(error)
                return
            self.num_asked += 1
            if self._rng.random() < cancel_rate:
                self.num_cancelled += 1
                self._engine.cancel(request)
                return
            answer = answers.get()
            self.num_answered += 1
            if isinstance(answer, GenserveError):
                self.errors.append(answer)
                return
            if answer.tolist() != row_after(self._token_ids).tolist():
                self.problems.append("a loop got the logits of other tokens")
            self._token_ids.append(int(answer.argmax()))


def is_deadline(received: Received) -> bool:
    """Whether the answer ended because its deadline had passed."""
    return received.finish_reason == FinishReason.LENGTH and received.stop_reason == "deadline"
