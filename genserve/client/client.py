"""Clients of a genserve server over HTTP: `Client` for threads, `AsyncClient` for an event loop."""

from __future__ import annotations

import random
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Generator, Mapping, Sequence
from contextlib import aclosing, closing
from typing import Any, Self, TypeVar, Unpack

import httpx2

from genserve.client import api_calls, reply_errors
from genserve.client.api_calls import Decision, ModelCard
from genserve.client.connection import LIMITS, connection, retry_wait_s, tls_verification, with_retries
from genserve.completion import Completion, Delta, Stream, join_deltas
from genserve.errors import GenserveError
from genserve.prompt import Messages, Prompts, ToolChoice, Tools, read_chat
from genserve.sampling.sampling_options import SamplingOptions

Answer = TypeVar("Answer")


class AsyncStream:
    """The asynchronous `Stream`: an async iterator over the deltas of one answer, for one task."""

    def __init__(self, deltas: AsyncGenerator[Delta, None]) -> None:
        # The generator holds the connection in a `with` block: it is released at the last delta, by an
        # error, by `close`, and by garbage collection.
        self._deltas = deltas
        self._read: list[Delta] = []

    @property
    def text_stream(self) -> AsyncIterator[str]:
        """The texts of the deltas that have any."""
        return (delta.text async for delta in self if delta.text)

    async def final(self) -> Completion:
        """Read the remaining deltas and return the whole answer.

        Raises:
            StreamBroken: the stream was closed, or broke, before its last delta.
        """
        async for _ in self:
            pass
        return join_deltas(self._read)

    async def close(self) -> None:
        """Stop the answer, on the server too. A second call does nothing."""
        await self._deltas.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        delta = await anext(self._deltas)
        self._read.append(delta)
        return delta

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_raised: object) -> None:
        await self.close()


class OpeningStream(Coroutine[Any, Any, AsyncStream]):
    """A stream that is being opened: `await` it, or enter it with `async with`, which closes it at the end.

    Do either once. Both raise the error of a rejected request.
    """

    def __init__(self, opening: Coroutine[Any, Any, AsyncStream]) -> None:
        self._opening = opening

    def __await__(self) -> Generator[Any, None, AsyncStream]:
        return self._opening.__await__()

    def send(self, value: Any) -> Any:
        """Resume the coroutine, as `Coroutine` specifies."""
        return self._opening.send(value)

    def throw(self, *raised: Any) -> Any:
        """Raise an exception where the coroutine waits, as `Coroutine` specifies."""
        return self._opening.throw(*raised)

    def close(self) -> None:
        """Cancel the coroutine, even if it was never awaited, as `Coroutine` specifies."""
        self._opening.close()

    async def __aenter__(self) -> AsyncStream:
        self._stream = await self._opening
        return self._stream

    async def __aexit__(self, *_raised: object) -> None:
        await self._stream.close()


class Client:
    """A genserve server over HTTP; the methods for texts are those of `genserve.LLM`.

        with Client("http://127.0.0.1:8000") as client:
            print(client.chat("What is a triton?", max_tokens=64).text)

    Thread-safe. Options are the fields of `SamplingParams`.

    Every call raises:
        InvalidRequest: the request is invalid; `field` names the place.
        Unauthenticated, Forbidden: the server requires another key, or does not allow the request.
        ModelNotFound, ModelNotReady: the server does not have the model, or it is not loaded.
        Overloaded: the server rejected the request and all retries.
        ModelFailed: the model failed.
        Unreachable: the server did not answer, or its certificate is not trusted.
        Closed: this client was closed.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        timeout_s: float = 600,
        max_retries: int = 2,
        verify: ssl.SSLContext | bool = True,
        http_client: httpx2.Client | None = None,
    ) -> None:
        """Configure the client; the first call connects.

        Args:
            base_url: the server's address; None: GENSERVE_BASE_URL, or http://127.0.0.1:8000.
            api_key: the API key; None: GENSERVE_API_KEY, or no key.
            timeout_s: raise Unreachable after this time without a byte from the server.
            max_retries: how often to repeat a request that is rejected because of load, or cannot connect.
            verify: how to verify the certificate of an https server. True: with the system's authorities, or
                the authorities in SSL_CERT_FILE. A context, such as
                `ssl.create_default_context(cafile="ca.pem")`: with this context. False: not at all.
            http_client: sends the requests instead of a new client; `close` does not close it.
        """
        self._connection = connection(base_url, api_key=api_key, timeout_s=timeout_s, max_retries=max_retries)
        self._http = http_client or httpx2.Client(limits=LIMITS, verify=tls_verification(verify))
        self._owns_http = http_client is None
        self._closed = False

    def generate(
        self, prompt: str, *, model: str | None = None, **options: Unpack[SamplingOptions]
    ) -> Completion:
        """Complete a prompt. Without `model`, the server must have exactly one."""
        return self._call(api_calls.generate(prompt, model=model, options=options))

    def stream(self, prompt: str, *, model: str | None = None, **options: Unpack[SamplingOptions]) -> Stream:
        """Complete a prompt, delta by delta. An error before the first delta is raised here."""
        return self._stream(api_calls.generate_stream(prompt, model=model, options=options))

    def chat(
        self,
        messages: Messages,
        *,
        model: str | None = None,
        tools: Tools | None = None,
        tool_choice: ToolChoice | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Completion:
        """Answer a chat; a plain text is one turn of the user. Tools may be OpenAI's JSON."""
        chat = read_chat(messages, tools=tools, tool_choice=tool_choice)
        return self._call(api_calls.chat(chat, model=model, options=options))

    def chat_stream(
        self,
        messages: Messages,
        *,
        model: str | None = None,
        tools: Tools | None = None,
        tool_choice: ToolChoice | None = None,
        return_progress: bool = False,
        **options: Unpack[SamplingOptions],
    ) -> Stream:
        """Answer a chat, delta by delta. An error before the first delta is raised here.

        With `return_progress` the first deltas are `PromptProgress`, while the prompt is read.
        """
        chat = read_chat(messages, tools=tools, tool_choice=tool_choice)
        return self._stream(
            api_calls.chat_stream(chat, model=model, return_progress=return_progress, options=options)
        )

    def complete(
        self, prompts: Prompts, *, n: int = 1, model: str | None = None, **options: Unpack[SamplingOptions]
    ) -> tuple[Completion, ...]:
        """Complete prompts `n` times each; the default of `max_tokens` is 16."""
        return self._call(api_calls.complete(prompts, n=n, model=model, options=options))

    def tokenize(
        self, prompt: Messages, *, model: str | None = None, add_special_tokens: bool = True
    ) -> tuple[int, ...]:
        """Return the token ids of a text, or of a chat as the model's template renders it; see `LLM`."""
        return self._call(
            api_calls.tokenize(prompt, model=model, add_special_tokens=add_special_tokens)
        )

    def detokenize(
        self, token_ids: Sequence[int], *, model: str | None = None, skip_special_tokens: bool = False
    ) -> str:
        """Return the text of token ids; bytes that are no UTF-8 become U+FFFD."""
        return self._call(
            api_calls.detokenize(token_ids, model=model, skip_special_tokens=skip_special_tokens)
        )

    def embed(
        self,
        texts: str | Sequence[str],
        *,
        model: str | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
    ) -> tuple[tuple[float, ...], ...]:
        """Return the vectors of texts, after a prompt of the model; `dimensions` keeps their beginnings."""
        call = api_calls.embed(texts, model=model, dimensions=dimensions, prompt_name=prompt_name)
        return self._call(call)

    def score(
        self, query: str, texts: str | Sequence[str], *, model: str | None = None
    ) -> tuple[float, ...]:
        """Return the scores of texts for a query, by a reranker or a model of vectors."""
        return self._call(api_calls.score(query, texts, model=model))

    def rerank(
        self, query: str, documents: Sequence[str], *, model: str | None = None, top_n: int | None = None
    ) -> tuple[tuple[int, float], ...]:
        """Return the index and the score of documents for a query, the best first; None: all of them."""
        return self._call(api_calls.rerank(query, documents, model=model, top_n=top_n))

    def decide(
        self,
        state: str | Mapping[str, Any] | Sequence[Any],
        questions: Mapping[str, Mapping[str, Any]],
        *,
        model: str | None = None,
        instructions: str | None = None,
    ) -> dict[str, Decision]:
        """Answer typed questions about a state, by their names; `instructions` is the system message.

        A question is an object of System One: `{"type": "noul", "instructions": "Is it spam?"}`. The type is
        `choice`, `noul` or `score`, of which the first and the last have `criteria`.
        """
        return self._call(
            api_calls.decide(state, questions, model=model, instructions=instructions)
        )

    def model_cards(self) -> dict[str, ModelCard]:
        """Return what the server says about each model that generates text, by its name."""
        return self._call(api_calls.model_cards())

    def models(self) -> list[str]:
        """Return the names of the models that generate text."""
        return list(self.model_cards())

    def default_sampling_params(self) -> dict[str, SamplingOptions]:
        """Return the options that each of these models recommends, by its name; see `LLM`."""
        cards = self.model_cards()
        return {name: card.default_sampling_params for name, card in cards.items()}

    def close(self) -> None:
        """Close the connections; a second call does nothing.

        Calls of other threads raise Closed, after `timeout_s` at the latest.
        """
        self._closed = True
        if self._owns_http:
            self._http.close()

    def __enter__(self) -> Self:
        self._reject_if_closed()
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def _call(self, call: api_calls.ApiCall[Answer]) -> Answer:
        with reply_errors.closed_if(self._is_closed):
            response, url = self._send(call.request), self._connection.url(call.request)
            body = _read(response, url=url, max_bytes=reply_errors.MAX_ANSWER_BYTES)
            return call.read(response.headers, body)

    def _stream(self, call: api_calls.StreamingApiCall) -> Stream:
        deltas = self._deltas(call)
        next(deltas)
        return Stream(deltas)

    def _deltas(self, call: api_calls.StreamingApiCall) -> Generator[Delta, None, None]:
        decoder = call.decoder()
        closed = reply_errors.closed_if(self._is_closed)
        with closed, closing(self._send(call.request)) as response, reply_errors.broken_stream():
            yield Delta(text="", token_ids=())      # the server accepted the request; for `_stream`
            for chunk in response.iter_bytes():
                yield from decoder.feed(chunk)
            decoder.end()

    def _send(self, request: api_calls.ApiRequest) -> httpx2.Response:
        attempt = 0
        while True:
            try:
                return self._send_once(request)
            except GenserveError as error:
                wait_s = retry_wait_s(
                    error, attempt=attempt, max_retries=self._connection.max_retries, jitter=random.random()
                )
                if wait_s is None:
                    raise
            time.sleep(wait_s)
            attempt += 1

    def _send_once(self, request: api_calls.ApiRequest) -> httpx2.Response:
        self._reject_if_closed()
        url = self._connection.url(request)
        with reply_errors.unreachable_at(url):
            response = self._http.send(self._connection.build(self._http, request), stream=True)
        if response.is_success:
            return response
        body = _read(response, url=url, max_bytes=reply_errors.MAX_ERROR_BYTES)
        raise reply_errors.error_of_reply(
            status=response.status_code, headers=response.headers, body=body, url=url
        )

    def _is_closed(self) -> bool:
        return self._closed or self._http.is_closed

    def _reject_if_closed(self) -> None:
        if self._is_closed():
            raise reply_errors.closed()


class AsyncClient:
    """The asynchronous `Client`, with the same methods and errors.

        async with AsyncClient("http://127.0.0.1:8000") as client:
            async with client.chat_stream("What is a triton?", max_tokens=64) as stream:
                async for text in stream.text_stream:
                    ...

    For one event loop.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        timeout_s: float = 600,
        max_retries: int = 2,
        verify: ssl.SSLContext | bool = True,
        http_client: httpx2.AsyncClient | None = None,
    ) -> None:
        """Configure the client. The arguments are the same as for `Client`; the first call connects."""
        self._connection = connection(base_url, api_key=api_key, timeout_s=timeout_s, max_retries=max_retries)
        self._http = http_client or httpx2.AsyncClient(limits=LIMITS, verify=tls_verification(verify))
        self._owns_http = http_client is None
        self._closed = False

    async def generate(
        self, prompt: str, *, model: str | None = None, **options: Unpack[SamplingOptions]
    ) -> Completion:
        """Complete a prompt. Without `model`, the server must have exactly one."""
        return await self._call(api_calls.generate(prompt, model=model, options=options))

    def stream(
        self, prompt: str, *, model: str | None = None, **options: Unpack[SamplingOptions]
    ) -> OpeningStream:
        """Complete a prompt, delta by delta. An error before the first delta is raised when it opens."""
        return OpeningStream(self._stream(api_calls.generate_stream(prompt, model=model, options=options)))

    async def chat(
        self,
        messages: Messages,
        *,
        model: str | None = None,
        tools: Tools | None = None,
        tool_choice: ToolChoice | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Completion:
        """Answer a chat; a plain text is one turn of the user. Tools may be OpenAI's JSON."""
        chat = read_chat(messages, tools=tools, tool_choice=tool_choice)
        return await self._call(api_calls.chat(chat, model=model, options=options))

    def chat_stream(
        self,
        messages: Messages,
        *,
        model: str | None = None,
        tools: Tools | None = None,
        tool_choice: ToolChoice | None = None,
        return_progress: bool = False,
        **options: Unpack[SamplingOptions],
    ) -> OpeningStream:
        """Answer a chat, delta by delta. An error before the first delta is raised when it opens.

        With `return_progress` the first deltas are `PromptProgress`, while the prompt is read.
        """
        chat = read_chat(messages, tools=tools, tool_choice=tool_choice)
        call = api_calls.chat_stream(chat, model=model, return_progress=return_progress, options=options)
        return OpeningStream(self._stream(call))

    async def complete(
        self, prompts: Prompts, *, n: int = 1, model: str | None = None, **options: Unpack[SamplingOptions]
    ) -> tuple[Completion, ...]:
        """Complete prompts `n` times each; the default of `max_tokens` is 16."""
        return await self._call(api_calls.complete(prompts, n=n, model=model, options=options))

    async def tokenize(
        self, prompt: Messages, *, model: str | None = None, add_special_tokens: bool = True
    ) -> tuple[int, ...]:
        """Return the token ids of a text, or of a chat as the model's template renders it; see `LLM`."""
        return await self._call(
            api_calls.tokenize(prompt, model=model, add_special_tokens=add_special_tokens)
        )

    async def detokenize(
        self, token_ids: Sequence[int], *, model: str | None = None, skip_special_tokens: bool = False
    ) -> str:
        """Return the text of token ids; bytes that are no UTF-8 become U+FFFD."""
        return await self._call(
            api_calls.detokenize(token_ids, model=model, skip_special_tokens=skip_special_tokens)
        )

    async def embed(
        self,
        texts: str | Sequence[str],
        *,
        model: str | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
    ) -> tuple[tuple[float, ...], ...]:
        """Return the vectors of texts, after a prompt of the model; `dimensions` keeps their beginnings."""
        call = api_calls.embed(texts, model=model, dimensions=dimensions, prompt_name=prompt_name)
        return await self._call(call)

    async def score(
        self, query: str, texts: str | Sequence[str], *, model: str | None = None
    ) -> tuple[float, ...]:
        """Return the scores of texts for a query, by a reranker or a model of vectors."""
        return await self._call(api_calls.score(query, texts, model=model))

    async def rerank(
        self, query: str, documents: Sequence[str], *, model: str | None = None, top_n: int | None = None
    ) -> tuple[tuple[int, float], ...]:
        """Return the index and the score of documents for a query, the best first; None: all of them."""
        return await self._call(api_calls.rerank(query, documents, model=model, top_n=top_n))

    async def decide(
        self,
        state: str | Mapping[str, Any] | Sequence[Any],
        questions: Mapping[str, Mapping[str, Any]],
        *,
        model: str | None = None,
        instructions: str | None = None,
    ) -> dict[str, Decision]:
        """Answer typed questions about a state, by their names; see `Client.decide`."""
        return await self._call(
            api_calls.decide(state, questions, model=model, instructions=instructions)
        )

    async def model_cards(self) -> dict[str, ModelCard]:
        """Return what the server says about each model that generates text, by its name."""
        return await self._call(api_calls.model_cards())

    async def models(self) -> list[str]:
        """Return the names of the models that generate text."""
        return list(await self.model_cards())

    async def default_sampling_params(self) -> dict[str, SamplingOptions]:
        """Return the options that each of these models recommends, by its name; see `LLM`."""
        cards = await self.model_cards()
        return {name: card.default_sampling_params for name, card in cards.items()}

    async def close(self) -> None:
        """Close the connections; a second call does nothing."""
        self._closed = True
        if self._owns_http:
            await self._http.aclose()

    async def __aenter__(self) -> Self:
        self._reject_if_closed()
        return self

    async def __aexit__(self, *_raised: object) -> None:
        await self.close()

    async def _call(self, call: api_calls.ApiCall[Answer]) -> Answer:
        with reply_errors.closed_if(self._is_closed):
            response, url = await self._send(call.request), self._connection.url(call.request)
            body = await _aread(response, url=url, max_bytes=reply_errors.MAX_ANSWER_BYTES)
            return call.read(response.headers, body)

    async def _stream(self, call: api_calls.StreamingApiCall) -> AsyncStream:
        deltas = self._deltas(call)
        await anext(deltas)
        return AsyncStream(deltas)

    async def _deltas(self, call: api_calls.StreamingApiCall) -> AsyncGenerator[Delta, None]:
        decoder = call.decoder()
        with reply_errors.closed_if(self._is_closed):
            async with aclosing(await self._send(call.request)) as response:
                with reply_errors.broken_stream():
                    yield Delta(text="", token_ids=())      # the server accepted the request; for `_stream`
                    async for chunk in response.aiter_bytes():
                        for delta in decoder.feed(chunk):
                            yield delta
                    decoder.end()

    async def _send(self, request: api_calls.ApiRequest) -> httpx2.Response:
        return await with_retries(
            lambda: self._send_once(request), max_retries=self._connection.max_retries
        )

    async def _send_once(self, request: api_calls.ApiRequest) -> httpx2.Response:
        self._reject_if_closed()
        url = self._connection.url(request)
        with reply_errors.unreachable_at(url):
            response = await self._http.send(self._connection.build(self._http, request), stream=True)
        if response.is_success:
            return response
        body = await _aread(response, url=url, max_bytes=reply_errors.MAX_ERROR_BYTES)
        raise reply_errors.error_of_reply(
            status=response.status_code, headers=response.headers, body=body, url=url
        )

    def _is_closed(self) -> bool:
        return self._closed or self._http.is_closed

    def _reject_if_closed(self) -> None:
        if self._is_closed():
            raise reply_errors.closed()


def _read(response: httpx2.Response, *, url: str, max_bytes: int) -> bytes:
    """Receive the body of a reply, and end the reply; raises Unreachable."""
    body = reply_errors.ReplyBody(url, max_bytes=max_bytes)
    with reply_errors.unreachable_at(url), closing(response):
        for chunk in response.iter_bytes():
            body.add(chunk)
    return bytes(body)


async def _aread(response: httpx2.Response, *, url: str, max_bytes: int) -> bytes:
    """Receive the body of a reply, and end the reply; raises Unreachable."""
    body = reply_errors.ReplyBody(url, max_bytes=max_bytes)
    with reply_errors.unreachable_at(url):
        async with aclosing(response):
            async for chunk in response.aiter_bytes():
                body.add(chunk)
    return bytes(body)
