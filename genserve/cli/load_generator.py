"""Load generator: a closed loop of streaming requests over plain sockets, to measure a server.

The client may share its cores with the server, so it does as little as possible: one thread, one selector,
no HTTP library, and no JSON is parsed while answers stream. Each connection sends its next request when its
answer is complete; a request that was refused with status 429 is sent again after the server's Retry-After.
"""

from __future__ import annotations

import heapq
import json
import math
import random
import re
import selectors
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from genserve.api_key import bearer
from genserve.errors import StreamBroken, Unreachable

__all__ = ["APIS", "Load", "LoadResult", "percentile", "random_prompts", "run"]

# An event that brings text to the reader: not the first one, which has a role only, nor the last.
_TEXT = re.compile(rb'^data:.*?"(?:(?:reasoning_)?content|text)": ?"(?!")', re.MULTILINE)
_PROMPT_TOKENS = re.compile(rb'"(?:prompt_tokens|input_length)": ?(\d+)')
_NEW_TOKENS = re.compile(rb'"(?:completion_tokens|generated_tokens)": ?(\d+)')
_LAST_CHUNK = b"\r\n0\r\n\r\n"
_REFUSED = b"HTTP/1.1 429 "
_RETRY_AFTER_MS = re.compile(rb"^retry-after-ms: *(\d+)", re.MULTILINE | re.IGNORECASE)
_CONTENT_LENGTH = re.compile(rb"^content-length: *(\d+)", re.MULTILINE | re.IGNORECASE)

_WORDS = """
    time year people way day man thing woman life child world school state family student group country
    problem hand part place case week company system program question work government number night point
    home water room mother area money story fact month lot right study book eye job word business issue
    side kind head house service friend father power hour game line end member law car city community
    name
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What to ask, and how often."""

    host: str
    port: int
    model: str
    api: str                # "chat", "generate" (TGI's) or "completions" (OpenAI's older one)
    concurrency: int
    num_requests: int
    new_tokens: int
    prompt_words: int       # a word is about one token
    seed: int               # another seed, other prompts: no prefix cache helps
    shared_words: int = 0   # of each prompt, so many at its beginning are those of all the others
    api_key: str = ""       # sent as a bearer token; empty: none
    extra: Mapping[str, Any] = field(default_factory=dict)  # more fields of the body
    keep_alive: bool = True  # or a new connection for each request: some servers end them after a stream
    num_answers: int | None = None  # the load ends with so many of them, whoever still waits; None: with all


@dataclass(slots=True, kw_only=True)
class LoadResult:
    """What came back; grows while the load runs."""

    elapsed_s: float = 0.0
    cpu_s: float = 0.0                                              # of this process
    prompt_tokens: list[int] = field(default_factory=list)          # per request, as the server counts
    new_tokens: list[int] = field(default_factory=list)             # likewise
    first_text_s: list[float] = field(default_factory=list)         # per request: sent to first text
    gaps_s: list[float] = field(default_factory=list)               # between texts; 0 if they came together
    refused_s: list[float] = field(default_factory=list)            # per refusal: sent to refused
    unfinished_texts: int = 0                                       # of answers cut off by the load's end


def run(load: Load) -> LoadResult:
    """Send all requests and wait for all answers.

    Raises:
        InvalidRequest: no header can hold the API key.
        Unreachable: nobody listens there, or the server refused a request.
        StreamBroken: an answer ended before its last event.
    """
    measured, requests = LoadResult(), _requests(load)
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        started_s, cpu_started_s = time.perf_counter(), time.process_time()
        for _, request in zip(range(load.concurrency), requests, strict=False):
            connection = _Connection((load.host, load.port), measured)
            stack.callback(connection.close)
            selector.register(connection.socket, selectors.EVENT_READ, connection)
            connection.send(request)
        away: list[tuple[float, int, _Connection]] = []     # those that were refused, by when they come back
        while (selector.get_map() or away) and not _enough(measured, load):
            timeout_s = max(0.0, away[0][0] - time.perf_counter()) if away else None
            for key, _ in selector.select(timeout_s):
                connection = key.data
                if not connection.receive():
                    continue
                selector.unregister(connection.socket)
                if connection.retry_after_s is not None:
                    back_s = time.perf_counter() + connection.retry_after_s
                    heapq.heappush(away, (back_s, id(connection), connection))
                    continue
                following = next(requests, None)
                if following is None:
                    continue
                connection.send(following, anew=not load.keep_alive)
                selector.register(connection.socket, selectors.EVENT_READ, connection)
            while away and away[0][0] <= time.perf_counter():
                connection = heapq.heappop(away)[2]
                # A server may close a connection that is idle for so long.
                connection.send(connection.request, anew=True)
                selector.register(connection.socket, selectors.EVENT_READ, connection)
        measured.unfinished_texts = sum(key.data.num_texts for key in selector.get_map().values())
        measured.elapsed_s = time.perf_counter() - started_s
        measured.cpu_s = time.process_time() - cpu_started_s
    return measured


def _enough(measured: LoadResult, load: Load) -> bool:
    return load.num_answers is not None and len(measured.new_tokens) >= load.num_answers


class _Connection:
    """A connection and the answer that streams over it.

    Attributes:
        request: the one that was sent last.
        retry_after_s: after how long to send it again; None: it was not refused.
        num_texts: of the answer so far.
    """

    def __init__(self, address: tuple[str, int], measured: LoadResult) -> None:
        self._address = address
        self.socket = _connect(address)
        self.request = b""
        self.retry_after_s: float | None = None
        self.num_texts = 0
        self._measured = measured
        self._sent_s = 0.0
        self._last_text_s: float | None = None
        self._line = b""        # not ended yet
        self._end = b""         # the last bytes so far

    def close(self) -> None:
        self.socket.close()

    def send(self, request: bytes, *, anew: bool = False) -> None:
        """Send a request, over a new connection if it is wanted."""
        if anew:
            self.socket.close()
            self.socket = _connect(self._address)
        self.request, self.retry_after_s, self.num_texts = request, None, 0
        self._line = self._end = b""
        self._sent_s, self._last_text_s = time.perf_counter(), None
        self.socket.sendall(request)

    def receive(self) -> bool:
        """Read what is there; returns whether the answer is complete, or a refusal."""
        data = self.socket.recv(1 << 16)
        now_s = time.perf_counter()
        lines, newline, self._line = (self._line + data).rpartition(b"\n")
        self._end = (self._end + data)[-1024:]
        for _ in _TEXT.finditer(lines):
            self._note_text(now_s)
        if self._end.endswith(_LAST_CHUNK):
            self._note_end()
            return True
        if data and self._end.startswith(_REFUSED):
            return self._note_refusal(now_s)
        failed = lines.startswith(b"HTTP/1.1 ") and not lines.startswith(b"HTTP/1.1 200 ")
        if failed or not data:
            raise Unreachable(f"the server did not answer: {(lines + newline + self._line)!r}")
        return False

    def _note_refusal(self, now_s: float) -> bool:
        """Keep when to come back, once the refusal is complete; it is short enough to be whole in `_end`."""
        head, _, body = self._end.partition(b"\r\n\r\n")
        length = _CONTENT_LENGTH.search(head)
        if length is None or len(body) < int(length[1]):
            return False
        asked = _RETRY_AFTER_MS.search(head)
        self.retry_after_s = int(asked[1]) / 1000 if asked else 1.0
        self._measured.refused_s.append(now_s - self._sent_s)
        return True

    def _note_text(self, now_s: float) -> None:
        if self._last_text_s is None:
            self._measured.first_text_s.append(now_s - self._sent_s)
        else:
            self._measured.gaps_s.append(now_s - self._last_text_s)
        self._last_text_s = now_s
        self.num_texts += 1

    def _note_end(self) -> None:
        prompt, new = _PROMPT_TOKENS.findall(self._end), _NEW_TOKENS.findall(self._end)
        if not prompt or not new:
            raise StreamBroken(f"the answer ended without its last event: {self._end!r}")
        self._measured.prompt_tokens.append(int(prompt[-1]))
        self._measured.new_tokens.append(int(new[-1]))


def _connect(address: tuple[str, int]) -> socket.socket:
    try:
        connected = socket.create_connection(address)
    except OSError as error:
        raise Unreachable(
            f"nobody answers at {address[0]}:{address[1]}: {error.strerror}",
            remedy="start a server: `genserve serve`; or name another one by --url",
        ) from error
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connected


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the value that `percent` of them do not exceed, by nearest rank."""
    ordered = sorted(values)
    return ordered[math.ceil(len(ordered) * percent / 100) - 1]


def random_prompts(count: int, *, words: int, shared_words: int = 0, seed: int) -> list[str]:
    """Return so many texts of so many words, the first `shared_words` of which are the same in all."""
    rng = random.Random(seed)
    shared = rng.choices(_WORDS.split(), k=shared_words)
    return [" ".join(shared + rng.choices(_WORDS.split(), k=words - shared_words)) for _ in range(count)]


def _requests(load: Load) -> Iterator[bytes]:
    prompts = random_prompts(
        load.num_requests, words=load.prompt_words, shared_words=load.shared_words, seed=load.seed
    )
    key = f"Authorization: {bearer(load.api_key)}\r\n" if load.api_key else ""
    for prompt in prompts:
        path, body = _BODIES[load.api](prompt, load)
        payload = json.dumps(body | dict(load.extra)).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {load.host}:{load.port}\r\n"
            f"{key}Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
        )
        yield head.encode() + payload


def _chat(prompt: str, load: Load) -> tuple[str, dict[str, object]]:
    return "/v1/chat/completions", {
        "model": load.model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": load.new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _generate(prompt: str, load: Load) -> tuple[str, dict[str, object]]:
    parameters = {"max_new_tokens": load.new_tokens, "ignore_eos": True}
    return "/generate_stream", {"model": load.model, "inputs": prompt, "parameters": parameters}


def _completions(prompt: str, load: Load) -> tuple[str, dict[str, object]]:
    return "/v1/completions", {
        "model": load.model,
        "prompt": prompt,
        "max_tokens": load.new_tokens,
        "temperature": 0,
        "stream": True,
    }


_BODIES = {"chat": _chat, "generate": _generate, "completions": _completions}
APIS = tuple(_BODIES)
