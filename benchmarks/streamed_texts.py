"""Streamed texts: streams the same request in each dialect, and records its text and when pieces arrive."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

Body = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamDialect:
    path: str
    body: Callable[[str, str, Body], Body]      # makes a body from model, prompt and sampling parameters
    text: Callable[[Mapping[str, Any]], str]    # returns the text of an event; raises KeyError if it has none
    names_stream: bool = True       # the body says that the answer is to be streamed


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRequest:
    dialect: str
    prompt: str
    params: Body        # the sampling parameters, by their names in `SamplingParams`


@dataclass(slots=True)
class StreamedAnswer:
    text: str = ""
    error: str = ""
    times_s: list[float] = field(default_factory=list)      # when each piece came, by `time.monotonic`


def _renamed(params: Body, **names: str) -> Body:
    return {names.get(name, name): value for name, value in params.items()}


def _messages(prompt: str) -> list[Body]:
    return [{"role": "user", "content": prompt}]


def _tgi(model: str, prompt: str, params: Body) -> Body:
    given = _renamed(params, max_tokens="max_new_tokens")
    if not given["temperature"]:    # TGI's clients leave it out
        del given["temperature"]
    return {"model": model, "inputs": prompt, "parameters": given}


DIALECTS: Mapping[str, StreamDialect] = {
    "chat": StreamDialect(
        path="/v1/chat/completions",
        body=lambda model, prompt, params: {"model": model, "messages": _messages(prompt), **params},
        text=lambda event: event["choices"][0]["delta"].get("content") or "",
    ),
    "completions": StreamDialect(
        path="/v1/completions",
        body=lambda model, prompt, params: {"model": model, "prompt": prompt, **params},
        text=lambda event: event["choices"][0]["text"],
    ),
    "responses": StreamDialect(
        path="/v1/responses",
        body=lambda model, prompt, params: {
            "model": model, "input": prompt, "store": False,
            **_renamed(params, max_tokens="max_output_tokens"),
        },
        text=lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
    ),
    "messages": StreamDialect(
        path="/v1/messages",
        body=lambda model, prompt, params: {"model": model, "messages": _messages(prompt), **params},
        text=lambda event: event["delta"]["text"],
    ),
    "ollama": StreamDialect(
        path="/api/chat",
        body=lambda model, prompt, params: {
            "model": model, "messages": _messages(prompt),
            "options": _renamed(params, max_tokens="num_predict"),
        },
        text=lambda event: event["message"]["content"],
    ),
    "tgi": StreamDialect(
        path="/generate_stream", body=_tgi, text=lambda event: event["token"]["text"], names_stream=False
    ),
    "kserve": StreamDialect(
        path="/v2/models/{model}/generate_stream",
        body=lambda _model, prompt, params: {"text_input": prompt, **_renamed(params, seed="random_seed")},
        text=lambda event: event["text_output"],
    ),
}  # fmt: skip


def requests_of(count: int, *, tokens: int) -> list[StreamRequest]:
    """Return requests in all dialects, alternately greedy and seeded, each with a prompt of its own."""
    return [
        StreamRequest(
            dialect=list(DIALECTS)[number // 2 % len(DIALECTS)],
            prompt=f"Write the story of traveller number {number}.",
            params={"max_tokens": tokens, "temperature": number % 2, "seed": number},
        )
        for number in range(count)
    ]


async def stream_all(
    url: str, model: str, requests: Sequence[StreamRequest], *, on_text: Callable[[], None] = lambda: None
) -> list[StreamedAnswer]:
    """Send all requests at once; `on_text` is called after each piece of text."""
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        return await asyncio.gather(*(_stream(client, model, request, on_text) for request in requests))


async def _stream(
    client: httpx2.AsyncClient, model: str, request: StreamRequest, on_text: Callable[[], None]
) -> StreamedAnswer:
    dialect, answer = DIALECTS[request.dialect], StreamedAnswer()
    body = dialect.body(model, request.prompt, request.params)
    if dialect.names_stream:
        body["stream"] = True
    try:
        async with client.stream("POST", dialect.path.format(model=model), json=body) as response:
            if response.status_code != 200:
                answer.error = (await response.aread()).decode()
                return answer
            async for line in response.aiter_lines():
                if _read(line, dialect, answer):
                    on_text()
    except httpx2.HTTPError as error:
        answer.error = repr(error)
    return answer


def _read(line: str, dialect: StreamDialect, answer: StreamedAnswer) -> bool:
    """Add a line of a stream to its answer; return whether it has text."""
    data = line.removeprefix("data:").strip()
    event = json.loads(data) if data.startswith("{") else {}
    if event.get("error") or event.get("type") == "response.failed":
        answer.error = data
    try:
        text = dialect.text(event)
    except (KeyError, IndexError):      # an event of another kind
        return False
    if text:
        answer.text += text
        answer.times_s.append(time.monotonic())
    return bool(text)
