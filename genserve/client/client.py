"""Client: a genserve server over HTTP."""

from __future__ import annotations

import random
import time
from collections.abc import Generator
from contextlib import closing
from typing import Self, TypeVar, Unpack

import httpx2

from genserve.client import calls, failures
from genserve.client.connection import LIMITS, connection
from genserve.client.retry import retry_wait_s
from genserve.errors import GenserveError
from genserve.request import Completion, Delta, Messages, Prompts
from genserve.sampling.params import SamplingOptions
from genserve.stream import Stream

__all__ = ["Client"]

Answer = TypeVar("Answer")


class Client:
    """A genserve server over HTTP; the methods are those of `genserve.LLM`.

        with Client("http://127.0.0.1:8000") as client:
            print(client.chat("What is a triton?", max_tokens=64).text)

    Safe to use from several threads at once. Options are the fields of `SamplingParams`.

    Every call raises:
        InvalidRequest: the request is wrong; `field` says where.
        ModelNotFound, ModelNotReady: the server has no such model, or not now.
        Overloaded: the server has no room, and had none at the retries.
        ModelFailed: the model could not go on.
        Unreachable: no answer came.
        Closed: this client was closed.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        timeout_s: float = 600,
        max_retries: int = 2,
        http_client: httpx2.Client | None = None,
    ) -> None:
        """Connect to nothing yet.

        Args:
            base_url: None: GENSERVE_BASE_URL, or http://127.0.0.1:8000.
            api_key: None: GENSERVE_API_KEY, or no key.
            timeout_s: the longest silence of the server that is waited for.
            max_retries: how often a request that was refused for the moment is sent again.
            http_client: the transport, if it is to be a special one; it stays open.
        """
        self._connection = connection(
            base_url, api_key=api_key, timeout_s=timeout_s, max_retries=max_retries
        )
        self._http = http_client or httpx2.Client(limits=LIMITS)
        self._owns_http = http_client is None
        self._closed = False

    def generate(
        self, prompt: str, *, model: str | None = None, **options: Unpack[SamplingOptions]
    ) -> Completion:
        """Complete a prompt. Without a model, the server's only one is asked."""
        return self._call(calls.generate(prompt, model=model, options=options))

    def stream(self, prompt: str, *, model: str | None = None, **options: Unpack[SamplingOptions]) -> Stream:
        """Complete a prompt, delta by delta; a refusal is raised here, before the first."""
        return self._stream(calls.generate_stream(prompt, model=model, options=options))

    def chat(
        self,
        messages: Messages,
        *,
        model: str | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Completion:
        """Answer a chat; a text alone is one turn of the user."""
        return self._call(calls.chat(messages, model=model, options=options))

    def chat_stream(
        self,
        messages: Messages,
        *,
        model: str | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Stream:
        """Answer a chat, delta by delta; a refusal is raised here, before the first."""
        return self._stream(calls.chat_stream(messages, model=model, options=options))

    def complete(
        self,
        prompts: Prompts,
        *,
        n: int = 1,
        model: str | None = None,
        **options: Unpack[SamplingOptions],
    ) -> tuple[Completion, ...]:
        """Complete prompts as they are, `n` times each, with 16 tokens if `max_tokens` says nothing else."""
        return self._call(calls.complete(prompts, n=n, model=model, options=options))

    def models(self) -> list[str]:
        """Return the names of the models that answer."""
        return self._call(calls.models())

    def close(self) -> None:
        """Let go of the connections; a second call does nothing.

        What another thread waits for ends with Closed, at the latest after `timeout_s`.
        """
        self._closed = True
        if self._owns_http:
            self._http.close()

    def __enter__(self) -> Self:
        self._refuse_if_closed()
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def _call(self, call: calls.Call[Answer]) -> Answer:
        with failures.telling_if_closed(self._is_closed), closing(self._send(call.request)) as response:
            with failures.reaching(self._connection.url(call.request)):
                body = response.read()
            return call.read(response.headers, body)

    def _stream(self, call: calls.StreamCall) -> Stream:
        deltas = self._deltas(call)
        next(deltas)
        return Stream(deltas)

    def _deltas(self, call: calls.StreamCall) -> Generator[Delta, None, None]:
        decoder = call.decoder()
        told = failures.telling_if_closed(self._is_closed)
        with told, closing(self._send(call.request)) as response, failures.reading_stream():
            yield Delta(text="", token_ids=())      # the server has accepted; for `_stream`
            for chunk in response.iter_bytes():
                yield from decoder.feed(chunk)
            decoder.end()

    def _send(self, request: calls.Request) -> httpx2.Response:
        attempt = 0
        while True:
            try:
                return self._send_once(request)
            except GenserveError as failure:
                wait_s = retry_wait_s(
                    failure,
                    attempt=attempt,
                    max_retries=self._connection.max_retries,
                    chance=random.random(),
                )
                if wait_s is None:
                    raise
            time.sleep(wait_s)
            attempt += 1

    def _send_once(self, request: calls.Request) -> httpx2.Response:
        self._refuse_if_closed()
        url = self._connection.url(request)
        with failures.reaching(url):
            response = self._http.send(self._connection.build(self._http, request), stream=True)
            if response.is_success:
                return response
            with closing(response):
                body = response.read()
        raise failures.error_of_reply(
            status=response.status_code, headers=response.headers, body=body, url=url
        )

    def _is_closed(self) -> bool:
        return self._closed or self._http.is_closed

    def _refuse_if_closed(self) -> None:
        if self._is_closed():
            raise failures.closed()
