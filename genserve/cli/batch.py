"""Batch: sends many requests at the same time, to the server at a URL or to a model in this process.

A model in this process is called over HTTP too: the server's application answers without a socket. So a line
means the same as the same body means to a server, and all lines share the steps of one engine.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import orjson
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from genserve.cli.batch_files import (
    AnswerFile,
    AnswerStream,
    BatchLine,
    answer_document,
    error_row,
    has_failed,
)
from genserve.cli.console import make_console
from genserve.cli.flags import RemoteServer
from genserve.cli.model_choice import bring_model, choose_remote
from genserve.cli.opened_models import loading
from genserve.client import api_calls
from genserve.client.api_calls import ApiCall, ApiRequest
from genserve.client.connection import LIMITS, Connection, connection, tls_verification, with_retries
from genserve.client.reply_errors import error_of_reply, unreachable_at
from genserve.completion import Completion
from genserve.errors import GenserveError, InvalidRequest, Unreachable
from genserve.log import at_level
from genserve.prompt import read_chat
from genserve.sampling.sampling_options import SamplingOptions

_MAX_RETRIES = 8
_TIMEOUT_S = 24 * 3600      # a busy server may take long to answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The requests, and the options that they share."""

    lines: Sequence[BatchLine]
    options: SamplingOptions        # for lines that do not state them; OpenAI's lines do not get them
    max_concurrency: int


@dataclass(slots=True)
class BatchResult:
    """The progress of a batch."""

    num_answers: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    elapsed_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second."""
        return self.num_tokens / self.elapsed_s if self.elapsed_s else 0.0


def run_batch(
    batch: Batch,
    answers: AnswerFile | AnswerStream,
    *,
    model: str | None,
    repository: Path | None,
    remote: RemoteServer | None,
    max_model_len: str | None = None,
) -> BatchResult:
    """Answer the lines that have no answer yet; a failure is written as a line too.

    Args:
        batch: the lines, and the parameters that they share.
        answers: where the answers are written.
        model: the name of the model; None: the only or the default model.
        repository: the folder of local models; None: the store.
        remote: the server that has the model; None: it is local.
        max_model_len: the context length of a local model, as `--max-model-len` has it.

    Raises:
        GenserveError: the model cannot be loaded, the server cannot be reached (the answers so far stay), or
            an answer cannot be written.
    """
    result = BatchResult()
    waiting = [line for line in batch.lines if line.id not in answers.done]
    if remote:
        target = _server(model, remote=remote)
    else:
        target = _local(batch, model, repository=repository, max_model_len=max_model_len)
    shown = _shown(result, num_lines=len(batch.lines), answers=answers)
    with closing(answers), target as server, shown as advance:

        async def work(http: httpx2.AsyncClient, lines: Iterator[BatchLine]) -> None:
            for line in lines:
                row, num_tokens = await _answer(line, batch=batch, server=server, http=http)
                answers.add(row)
                advance(has_failed(row), num_tokens)

        async def run() -> None:
            lines = iter(waiting)   # shared by all tasks, so each line is sent once
            async with (
                httpx2.AsyncClient(limits=LIMITS, transport=server.transport, verify=server.verify) as http,
                asyncio.TaskGroup() as tasks,
            ):
                for _ in range(min(batch.max_concurrency, len(waiting))):
                    tasks.create_task(work(http, lines))

        try:
            asyncio.run(run())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None    # one is enough, since all other tasks were cancelled
        answers.finish()
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class _Server:
    """The server that answers the lines."""

    connection: Connection
    model: str                  # for lines that name no model
    is_chosen: bool             # the command line chose the model, which replaces the model of OpenAI's lines
    transport: httpx2.AsyncBaseTransport | None = None  # None: the network
    verify: ssl.SSLContext | bool = True                # httpx2's argument


@contextmanager
def _server(model: str | None, *, remote: RemoteServer) -> Iterator[_Server]:
    with remote.client() as client:
        name = choose_remote(model, client.models())
    yield _Server(
        connection=_connection(remote.url),
        model=name,
        is_chosen=model is not None,
        verify=tls_verification(remote.verify),
    )


@contextmanager
def _local(
    batch: Batch, model: str | None, *, repository: Path | None, max_model_len: str | None
) -> Iterator[_Server]:
    """Load a model, and run the application of a server without a socket."""
    folder, name = bring_model(model, repository=repository)
    with loading(name):
        from genserve.generation_metrics import Metrics
        from genserve.repository.options import RepositoryOptions
        from genserve.repository.repository import Repository
        from genserve.server.app import create_app
        from genserve.server.kserve.state import KServeState
        from genserve.server.services import Services
        from genserve.settings import ServerSettings, read_max_model_len

        options = RepositoryOptions(
            max_queue=batch.max_concurrency, max_model_len=read_max_model_len(max_model_len or "auto")
        )
        models = Repository([folder], options=options)
        with ExitStack() as undo:
            undo.callback(models.close)
            models.start([name])
            for error in models.errors.values():
                raise error
            undo.pop_all()
    settings = ServerSettings(model_repository=(folder,))
    services = Services(settings=settings, repository=models, metrics=Metrics())
    app = create_app(services, KServeState(settings))
    try:
        with at_level("genserve.server", logging.CRITICAL):     # failures are rows of the output
            yield _Server(
                connection=_connection("http://localhost"),
                model=name,
                is_chosen=model is not None,
                transport=httpx2.ASGITransport(app=app, raise_app_exceptions=False),
            )
    finally:
        models.close()


def _connection(url: str) -> Connection:
    return connection(url, api_key=None, timeout_s=_TIMEOUT_S, max_retries=_MAX_RETRIES)


async def _answer(
    line: BatchLine, *, batch: Batch, server: _Server, http: httpx2.AsyncClient
) -> tuple[dict[str, Any], int]:
    """Return the row of an answer and its number of tokens; raises Unreachable if no line can be answered."""
    try:
        if line.error is not None:
            raise line.error
        if line.is_openai:
            reply = await _send(_openai_request(line, server), server=server, http=http)
            return _openai_row(line, reply)
        call = _call(line, batch=batch, server=server)
        reply = await _send(call.request, server=server, http=http)
        if not reply.is_success:
            raise _error_of(reply)
        completion = call.read(reply.headers, reply.content)
    except Unreachable:
        raise
    except GenserveError as error:
        return error_row(line, error), 0
    return {"id": line.id, **answer_document(completion)}, completion.usage.completion_tokens


def _call(line: BatchLine, *, batch: Batch, server: _Server) -> ApiCall[Completion]:
    """Return the request of a line with a prompt or messages.

    Raises:
        InvalidRequest: the line has neither or both, or a parameter is unknown or invalid.
    """
    options: dict[str, Any] = {**batch.options, **line.fields}
    prompt, messages = options.pop("prompt", None), options.pop("messages", None)
    tools, choice = options.pop("tools", None), options.pop("tool_choice", None)
    model = options.pop("model", None) or server.model
    if (prompt is None) == (messages is None):
        raise InvalidRequest("a line needs either prompt or messages", remedy="or OpenAI's body and url")
    if messages is not None:
        chat = read_chat(messages, tools=tools, tool_choice=choice)
        return api_calls.chat(chat, model=model, options=options)
    if not isinstance(prompt, str):
        raise InvalidRequest("prompt must be text", field="prompt")
    call = api_calls.complete(prompt, n=1, model=model, options=options)
    return ApiCall(request=call.request, read=lambda headers, body: call.read(headers, body)[0])


def _openai_request(line: BatchLine, server: _Server) -> ApiRequest:
    """Return the request of a line in OpenAI's batch format; raises InvalidRequest if the line is invalid."""
    body, path = line.fields["body"], line.fields.get("url")
    if not isinstance(path, str) or not path.startswith("/v1/"):
        raise InvalidRequest("a line with a body needs a url that begins with /v1/", field="url")
    if not isinstance(body, dict):
        raise InvalidRequest("the body of a line must be an object", field="body")
    if line.fields.get("method", "POST") != "POST":
        raise InvalidRequest("the method of a line must be POST", field="method")
    if body.get("stream"):
        raise InvalidRequest("a batch has no streams", remedy="leave out stream", field="stream")
    model = server.model if server.is_chosen else body.get("model", server.model)
    return ApiRequest(method="POST", path=path, body=orjson.dumps(body | {"model": model}))


def _openai_row(line: BatchLine, reply: httpx2.Response) -> tuple[dict[str, Any], int]:
    try:
        body = orjson.loads(reply.content)
    except ValueError:
        body = reply.text
    usage = body.get("usage") if isinstance(body, dict) else None
    usage = usage if isinstance(usage, dict) else {}
    request_id = reply.headers.get("x-request-id", "")
    response = {"status_code": reply.status_code, "request_id": request_id, "body": body}
    row = {"id": f"batch_req_{line.id}", "custom_id": line.id, "response": response, "error": None}
    return row, usage.get("completion_tokens") or usage.get("output_tokens") or 0


async def _send(request: ApiRequest, *, server: _Server, http: httpx2.AsyncClient) -> httpx2.Response:
    """Return the reply, after retries if the server is overloaded; raises Unreachable without a reply."""
    reply: httpx2.Response | None = None

    async def send_once() -> httpx2.Response:
        nonlocal reply
        reply = None
        with unreachable_at(server.connection.url(request)):
            reply = await http.send(server.connection.build(http, request))
        if not reply.is_success:
            raise _error_of(reply)
        return reply

    try:
        return await with_retries(send_once, max_retries=_MAX_RETRIES)
    except GenserveError:
        if reply is None:
            raise
        return reply


def _error_of(reply: httpx2.Response) -> GenserveError:
    return error_of_reply(
        status=reply.status_code, headers=reply.headers, body=reply.content, url=str(reply.url)
    )


@contextmanager
def _shown(
    result: BatchResult, *, num_lines: int, answers: AnswerFile | AnswerStream
) -> Iterator[Callable[[bool, int], None]]:
    """Show the progress of a batch on a terminal; yield a function that counts an answer."""
    console = make_console(stderr=True)
    columns = (
        TextColumn("{task.completed}/{task.total}"),
        BarColumn(30),
        TextColumn("{task.fields[speed]:.0f} tokens/s, {task.fields[failed]} failed, left"),
        TimeRemainingColumn(),
    )
    start_s = time.monotonic()
    hidden = not console.is_terminal or console.is_dumb_terminal or answers.is_on_terminal
    with Progress(*columns, console=console, disable=hidden, transient=True) as bar:
        task = bar.add_task("", total=num_lines, completed=len(answers.done), speed=0.0, failed=0)

        def advance(has_failed: bool, num_tokens: int) -> None:
            result.num_failed += has_failed
            result.num_answers += not has_failed
            result.num_tokens += num_tokens
            result.elapsed_s = time.monotonic() - start_s
            bar.update(task, advance=1, speed=result.tokens_per_s, failed=result.num_failed)

        yield advance
