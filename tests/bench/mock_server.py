"""A small server of chats whose answers are static; the model's name says how they go wrong."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Sequence

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

NUM_TOKENS = 5
KEY = "sesame"


def chunk(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text_chunk(text: str | None, finish_reason: str | None = None) -> bytes:
    delta = {"content": text} if text is not None else {"role": "assistant", "content": ""}
    return chunk(choices=[{"index": 0, "delta": delta, "finish_reason": finish_reason}])


USAGE = chunk(choices=[], usage={"prompt_tokens": 7, "completion_tokens": NUM_TOKENS})
DONE = b"data: [DONE]\n\n"


class MockServer:
    """`with MockServer() as server: ... server.url ...`; https with a certificate."""

    def __init__(self, *, more: Sequence[Route] = (), **options: object) -> None:
        routes = [
            *more,
            Route("/v1/models", self.models),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
        ]
        app = Starlette(routes=routes)
        config = uvicorn.Config(app, port=0, log_config=None, access_log=False, **options)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run)
        self.bodies: list[dict] = []
        self.headers: list[dict] = []
        self.asked: Counter[str] = Counter()
        self.running = self.most_at_once = 0

    def __enter__(self) -> MockServer:
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive()
        port = self.server.servers[0].sockets[0].getsockname()[1]
        scheme = "https" if self.server.config.is_ssl else "http"
        self.url = f"{scheme}://127.0.0.1:{port}"
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = self.server.force_exit = True
        self.thread.join()

    async def models(self, request: Request) -> Response:
        if request.headers.get("authorization") not in (None, f"Bearer {KEY}"):
            return JSONResponse({"error": {"message": "wrong key"}}, status_code=401)
        return JSONResponse({"object": "list", "data": [{"id": "good"}]})

    async def tokenize(self, request: Request) -> Response:
        """As vLLM: a token for each word."""
        words = (await request.json())["prompt"].split()
        return JSONResponse({"count": len(words), "tokens": [*range(len(words))], "max_model_len": 64})

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        model = body["model"]
        self.asked[model] += 1
        if model.isdigit():
            return JSONResponse({"error": {"message": "no luck"}}, status_code=int(model))
        if model == "busy" and self.asked[model] % 2:
            return JSONResponse({"error": "later"}, status_code=429, headers={"retry-after-ms": "3"})
        return StreamingResponse(self.answer(model), media_type="text/event-stream")

    async def answer(self, model: str) -> AsyncIterator[bytes]:
        self.running += 1
        self.most_at_once = max(self.most_at_once, self.running)
        try:
            async for piece in self.pieces(model):
                yield piece
        finally:
            self.running -= 1

    async def pieces(self, model: str) -> AsyncIterator[bytes]:
        yield text_chunk(None)
        if model == "empty":
            yield text_chunk("", "stop")
            return
        for number in range(NUM_TOKENS):
            await asyncio.sleep(0)
            yield b": a comment\n\n" + text_chunk(f" word{number}")
            if number == 2 and model in _FLAWS:
                if (piece := await _FLAWS[model]()) is None:
                    return
                yield piece
        yield text_chunk("", "length")
        if model != "uncounted":
            yield USAGE
        yield DONE


async def _silent() -> None:
    await asyncio.sleep(3600)


async def _broken() -> None:
    raise ConnectionError("on purpose")


async def _ended() -> None:
    return None


async def _invalid() -> bytes:
    return b"data: {nothing\n\n"


async def _strange() -> bytes:
    return b'data: ["what"]\n\n'


async def _error() -> bytes:
    return chunk(error={"message": "the model broke", "code": 500})


_FLAWS = {
    "silent": _silent,
    "broken": _broken,
    "ended": _ended,
    "invalid": _invalid,
    "strange": _strange,
    "error": _error,
}
