"""Async client: a genserve server over HTTP, for an event loop."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Self, TypeVar, Unpack

import httpx2

from genserve.client import calls, failures
from genserve.client.connection import LIMITS, connection
from genserve.client.retry import retry_wait_s
from genserve.client.stream import AsyncStream, OpeningStream
from genserve.errors import GenserveError
from genserve.request import Completion, Delta, Messages, Prompts
from genserve.sampling.params import SamplingOptions

__all__ = ["AsyncClient"]

Answer = TypeVar("Answer")


class AsyncClient:
    """`Client`, awaited: the same methods, which raise the same.

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
        http_client: httpx2.AsyncClient | None = None,
    ) -> None:
        """Connect to nothing yet; the arguments are those of `Client`."""
        self._connection = connection(
            base_url, api_key=api_key, timeout_s=timeout_s, max_retries=max_retries
        )
        self._http = http_client or httpx2.AsyncClient(limits=LIMITS)
        self._owns_http = http_client is None
        self._closed = False

    async def generate(
        self, prompt: str, *, model: str | None = None, **options: Unpack[SamplingOptions]
    ) -> Completion:
        """Complete a prompt. Without a model, the server's only one is asked."""
        return await self._call(calls.generate(prompt, model=model, options=options))

    def stream(
        self, prompt: str, *, model: str | None = None, **options: Unpack[SamplingOptions]
    ) -> OpeningStream:
        """Complete a prompt, delta by delta; a refusal is raised before the first of them."""
        return OpeningStream(self._stream(calls.generate_stream(prompt, model=model, options=options)))

    async def chat(
        self,
        messages: Messages,
        *,
        model: str | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Completion:
        """Answer a chat; a text alone is one turn of the user."""
        return await self._call(calls.chat(messages, model=model, options=options))

    def chat_stream(
        self,
        messages: Messages,
        *,
        model: str | None = None,
        **options: Unpack[SamplingOptions],
    ) -> OpeningStream:
        """Answer a chat, delta by delta; a refusal is raised before the first of them."""
        return OpeningStream(self._stream(calls.chat_stream(messages, model=model, options=options)))

    async def complete(
        self,
        prompts: Prompts,
        *,
        n: int = 1,
        model: str | None = None,
        **options: Unpack[SamplingOptions],
    ) -> tuple[Completion, ...]:
        """Complete prompts as they are, `n` times each, with 16 tokens if `max_tokens` says nothing else."""
        return await self._call(calls.complete(prompts, n=n, model=model, options=options))

    async def models(self) -> list[str]:
        """Return the names of the models that answer."""
        return await self._call(calls.models())

    async def close(self) -> None:
        """Let go of the connections; a second call does nothing."""
        self._closed = True
        if self._owns_http:
            await self._http.aclose()

    async def __aenter__(self) -> Self:
        self._refuse_if_closed()
        return self

    async def __aexit__(self, *_raised: object) -> None:
        await self.close()

    async def _call(self, call: calls.Call[Answer]) -> Answer:
        with failures.telling_if_closed(self._is_closed):
            async with aclosing(await self._send(call.request)) as response:
                with failures.reaching(self._connection.url(call.request)):
                    body = await response.aread()
                return call.read(response.headers, body)

    async def _stream(self, call: calls.StreamCall) -> AsyncStream:
        deltas = self._deltas(call)
        await anext(deltas)
        return AsyncStream(deltas)

    async def _deltas(self, call: calls.StreamCall) -> AsyncGenerator[Delta, None]:
        decoder = call.decoder()
        with failures.telling_if_closed(self._is_closed):
            async with aclosing(await self._send(call.request)) as response:
                with failures.reading_stream():
                    yield Delta(text="", token_ids=())      # the server has accepted; for `_stream`
                    async for chunk in response.aiter_bytes():
                        for delta in decoder.feed(chunk):
                            yield delta
                    decoder.end()

    async def _send(self, request: calls.Request) -> httpx2.Response:
        attempt = 0
        while True:
            try:
                return await self._send_once(request)
            except GenserveError as failure:
                wait_s = retry_wait_s(
                    failure,
                    attempt=attempt,
                    max_retries=self._connection.max_retries,
                    chance=random.random(),
                )
                if wait_s is None:
                    raise
            await asyncio.sleep(wait_s)
            attempt += 1

    async def _send_once(self, request: calls.Request) -> httpx2.Response:
        self._refuse_if_closed()
        url = self._connection.url(request)
        with failures.reaching(url):
            response = await self._http.send(self._connection.build(self._http, request), stream=True)
            if response.is_success:
                return response
            async with aclosing(response):
                body = await response.aread()
        raise failures.error_of_reply(
            status=response.status_code, headers=response.headers, body=body, url=url
        )

    def _is_closed(self) -> bool:
        return self._closed or self._http.is_closed

    def _refuse_if_closed(self) -> None:
        if self._is_closed():
            raise failures.closed()
