"""Load generator: a closed loop of streaming requests over plain sockets, to measure a server.

The client may share its cores with the server, so it does as little as possible: one thread, one selector,
no HTTP library, and no JSON is parsed while answers stream. Each connection sends its next request when its
answer is complete; a request that was rejected with status 429 is sent again after the server's Retry-After.
"""

from __future__ import annotations

import heapq
import itertools
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

# An event with text; the first event has only a role, and the last one only the usage.
_TEXT = re.compile(rb'^data:.*?"(?:(?:reasoning_)?content|text)": ?"(?!")', re.MULTILINE)
_PROMPT_TOKENS = re.compile(rb'"(?:prompt_tokens|input_length)": ?(\d+)')
_NEW_TOKENS = re.compile(rb'"(?:completion_tokens|generated_tokens)": ?(\d+)')
_LAST_CHUNK = b"\r\n0\r\n\r\n"
_REJECTED = b"HTTP/1.1 429 "
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
    """The requests to send, and how many at a time."""

    host: str
    port: int
    model: str
    api: str                # "chat", "generate" (TGI's) or "completions" (OpenAI's older one)
    concurrency: int
    num_requests: int
    new_tokens: int
    prompt_words: int       # a word is about one token
    seed: int               # of the prompts; with a new seed nothing is in the prefix cache
    shared_words: int = 0   # the number of words at the beginning that all prompts share
    api_key: str = ""       # sent as a bearer token; empty: none
    extra: Mapping[str, Any] = field(default_factory=dict)  # additional fields of the body
    keep_alive: bool = True  # False: a new connection per request; some servers close them after a stream
    num_answers: int | None = None  # end after this number of answers; None: after all


@dataclass(slots=True, kw_only=True)
class LoadResult:
    """The measurements of a load; it grows while the load runs."""

    elapsed_s: float = 0.0
    cpu_s: float = 0.0                                              # of this process
    prompt_tokens: list[int] = field(default_factory=list)          # per request, as the server reports
    new_tokens: list[int] = field(default_factory=list)             # per request, as the server reports
    first_text_s: list[float] = field(default_factory=list)         # per request, from sending it
    gaps_s: list[float] = field(default_factory=list)               # between texts, 0 within a chunk
    rejected_s: list[float] = field(default_factory=list)            # per rejection, from sending the request
    unfinished_texts: int = 0                                       # of incomplete answers


def run_load(load: Load) -> LoadResult:
    """Send all requests and wait for all answers.

    Raises:
        InvalidRequest: the API key is not a valid header value.
        Unreachable: the server does not accept connections, or rejected a request with an error.
        StreamBroken: an answer ended before its last event.
    """
    result = LoadResult()
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        started_s, cpu_started_s = time.perf_counter(), time.process_time()
        loop = _ClosedLoop(load, result, selector)
        loop.start(stack)
        while not loop.is_done():
            loop.wait()
        result.unfinished_texts = sum(key.data.num_texts for key in selector.get_map().values())
        result.elapsed_s = time.perf_counter() - started_s
        result.cpu_s = time.process_time() - cpu_started_s
    return result


class _ClosedLoop:
    """The connections of a load: waiting for an answer, or for the retry of a rejected request."""

    def __init__(self, load: Load, result: LoadResult, selector: selectors.BaseSelector) -> None:
        self._load = load
        self._result = result
        self._selector = selector
        self._requests = _requests(load)
        self._rejected: list[tuple[float, int, _Connection]] = []   # a heap, by the time of their retry

    def start(self, stack: ExitStack) -> None:
        """Open the connections, each with its first request; the stack closes them."""
        for request in itertools.islice(self._requests, self._load.concurrency):
            connection = _Connection((self._load.host, self._load.port), self._result)
            stack.callback(connection.close)
            self._send(connection, request)

    def is_done(self) -> bool:
        """Whether no connection is left, or `num_answers` have come."""
        if not (self._selector.get_map() or self._rejected):
            return True
        limit = self._load.num_answers
        return limit is not None and len(self._result.new_tokens) >= limit

    def wait(self) -> None:
        """Wait until bytes arrive or a retry is due, and handle them."""
        timeout_s = max(0.0, self._rejected[0][0] - time.perf_counter()) if self._rejected else None
        for key, _ in self._selector.select(timeout_s):
            if key.data.receive():
                self._end_request(key.data)
        while self._rejected and self._rejected[0][0] <= time.perf_counter():
            connection = heapq.heappop(self._rejected)[2]
            # A new connection: the server may have closed the idle one.
            self._send(connection, connection.request, reconnect=True)

    def _end_request(self, connection: _Connection) -> None:
        """Schedule the retry of a rejected request, or send the next one."""
        self._selector.unregister(connection.socket)
        if connection.retry_after_s is not None:
            retry_s = time.perf_counter() + connection.retry_after_s
            heapq.heappush(self._rejected, (retry_s, id(connection), connection))
        elif (request := next(self._requests, None)) is not None:
            self._send(connection, request, reconnect=not self._load.keep_alive)

    def _send(self, connection: _Connection, request: bytes, *, reconnect: bool = False) -> None:
        connection.send(request, reconnect=reconnect)
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)


class _Connection:
    """A connection and the answer that streams over it.

    Attributes:
        request: the last request.
        retry_after_s: when to repeat it; None: it was not rejected.
        num_texts: the number of texts of the answer so far.
    """

    def __init__(self, address: tuple[str, int], result: LoadResult) -> None:
        self._address = address
        self.socket = _connect(address)
        self.request = b""
        self.retry_after_s: float | None = None
        self.num_texts = 0
        self._result = result
        self._sent_s = 0.0
        self._last_text_s: float | None = None
        self._line = b""        # the incomplete last line
        self._end = b""         # the last bytes

    def close(self) -> None:
        self.socket.close()

    def send(self, request: bytes, *, reconnect: bool = False) -> None:
        """Send a request."""
        if reconnect:
            self.socket.close()
            self.socket = _connect(self._address)
        self.request, self.retry_after_s, self.num_texts = request, None, 0
        self._line = self._end = b""
        self._sent_s, self._last_text_s = time.perf_counter(), None
        self.socket.sendall(request)

    def receive(self) -> bool:
        """Read the available bytes; returns whether the answer, or the rejection, is complete."""
        data = self.socket.recv(1 << 16)
        now_s = time.perf_counter()
        lines, newline, self._line = (self._line + data).rpartition(b"\n")
        self._end = (self._end + data)[-1024:]
        for _ in _TEXT.finditer(lines):
            self._note_text(now_s)
        if self._end.endswith(_LAST_CHUNK):
            self._note_end()
            return True
        if data and self._end.startswith(_REJECTED):
            return self._note_rejection(now_s)
        failed = lines.startswith(b"HTTP/1.1 ") and not lines.startswith(b"HTTP/1.1 200 ")
        if failed or not data:
            raise Unreachable(f"the server answered with an error: {(lines + newline + self._line)!r}")
        return False

    def _note_rejection(self, now_s: float) -> bool:
        """Set `retry_after_s` once the rejection is complete; it is short enough to fit into `_end`."""
        head, _, body = self._end.partition(b"\r\n\r\n")
        length = _CONTENT_LENGTH.search(head)
        if length is None or len(body) < int(length[1]):
            return False
        found = _RETRY_AFTER_MS.search(head)
        self.retry_after_s = int(found[1]) / 1000 if found else 1.0
        self._result.rejected_s.append(now_s - self._sent_s)
        return True

    def _note_text(self, now_s: float) -> None:
        if self._last_text_s is None:
            self._result.first_text_s.append(now_s - self._sent_s)
        else:
            self._result.gaps_s.append(now_s - self._last_text_s)
        self._last_text_s = now_s
        self.num_texts += 1

    def _note_end(self) -> None:
        prompt, new = _PROMPT_TOKENS.findall(self._end), _NEW_TOKENS.findall(self._end)
        if not prompt or not new:
            raise StreamBroken(f"the answer ended without its last event: {self._end!r}")
        self._result.prompt_tokens.append(int(prompt[-1]))
        self._result.new_tokens.append(int(new[-1]))


def _connect(address: tuple[str, int]) -> socket.socket:
    try:
        connected = socket.create_connection(address)
    except OSError as error:
        raise Unreachable(
            f"no server answers at {address[0]}:{address[1]}: {error.strerror}",
            remedy="start one with `genserve serve`, or set --url",
        ) from error
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connected


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile of values, by the nearest-rank method."""
    ordered = sorted(values)
    return ordered[math.ceil(len(ordered) * percent / 100) - 1]


def random_prompts(count: int, *, words: int, shared_words: int = 0, seed: int) -> list[str]:
    """Return `count` texts of random words, of which the first `shared_words` are the same in all."""
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
