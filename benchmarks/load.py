"""Load: a closed loop of streaming requests over plain sockets, in a process of its own.

The client shares the cores with the server that it measures, so it does as little as can be: one thread, one
selector, no HTTP library, and no JSON is parsed while answers stream. Each of `--concurrency` connections
sends its next request when its answer is complete.

    python benchmarks/load.py --port 8000 --model smollm2 --concurrency 32 --requests 64

prints one JSON object: raw times in seconds, for `serving.py` to summarise.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import selectors
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Load", "Measured", "random_prompts", "run"]

# An event that brings text to the reader: not the first one, which has a role only, nor the last.
TEXT = re.compile(rb'^data:.*?"(?:content|text)": ?"(?!")', re.MULTILINE)
PROMPT_TOKENS = re.compile(rb'"(?:prompt_tokens|input_length)": ?(\d+)')
NEW_TOKENS = re.compile(rb'"(?:completion_tokens|generated_tokens)": ?(\d+)')
LAST_CHUNK = b"\r\n0\r\n\r\n"

WORDS = """
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
    extra: Mapping[str, Any] = field(default_factory=dict)  # more fields of the body
    keep_alive: bool = True  # or a new connection for each request: some servers end them after a stream


@dataclass(slots=True, kw_only=True)
class Measured:
    """What came back; grows while the load runs."""

    elapsed_s: float = 0.0
    cpu_s: float = 0.0                                              # of this process
    prompt_tokens: list[int] = field(default_factory=list)          # per request, as the server counts
    new_tokens: list[int] = field(default_factory=list)             # likewise
    first_text_s: list[float] = field(default_factory=list)         # per request: sent to first text
    gaps_s: list[float] = field(default_factory=list)               # between texts; 0 if they came together


def run(load: Load) -> Measured:
    """Send all requests and wait for all answers.

    Raises:
        RuntimeError: the server refused a request, or left it unfinished.
    """
    measured, requests = Measured(), _requests(load)
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        started_s, cpu_started_s = time.perf_counter(), time.process_time()
        for _, request in zip(range(load.concurrency), requests, strict=False):
            connection = _Connection((load.host, load.port), measured)
            stack.callback(connection.close)
            selector.register(connection.socket, selectors.EVENT_READ, connection)
            connection.send(request)
        while selector.get_map():
            for key, _ in selector.select():
                connection = key.data
                if not connection.receive():
                    continue
                selector.unregister(connection.socket)
                following = next(requests, None)
                if following is None:
                    continue
                if not load.keep_alive:
                    connection.reopen()
                selector.register(connection.socket, selectors.EVENT_READ, connection)
                connection.send(following)
        measured.elapsed_s = time.perf_counter() - started_s
        measured.cpu_s = time.process_time() - cpu_started_s
    return measured


class _Connection:
    """A connection and the answer that streams over it."""

    def __init__(self, address: tuple[str, int], measured: Measured) -> None:
        self._address = address
        self.socket = _connect(address)
        self._measured = measured
        self._sent_s = 0.0
        self._last_text_s: float | None = None
        self._line = b""        # not ended yet
        self._end = b""         # the last bytes so far

    def reopen(self) -> None:
        self.socket.close()
        self.socket = _connect(self._address)

    def close(self) -> None:
        self.socket.close()

    def send(self, request: bytes) -> None:
        self._line = self._end = b""
        self._sent_s, self._last_text_s = time.perf_counter(), None
        self.socket.sendall(request)

    def receive(self) -> bool:
        """Read what is there; returns whether the answer is complete."""
        data = self.socket.recv(1 << 16)
        now_s = time.perf_counter()
        lines, newline, self._line = (self._line + data).rpartition(b"\n")
        self._end = (self._end + data)[-1024:]
        for _ in TEXT.finditer(lines):
            self._note_text(now_s)
        if self._end.endswith(LAST_CHUNK):
            self._note_end()
            return True
        refused = lines.startswith(b"HTTP/1.1 ") and not lines.startswith(b"HTTP/1.1 200 ")
        if refused or not data:
            raise RuntimeError(f"the server did not answer: {(lines + newline + self._line)!r}")
        return False

    def _note_text(self, now_s: float) -> None:
        if self._last_text_s is None:
            self._measured.first_text_s.append(now_s - self._sent_s)
        else:
            self._measured.gaps_s.append(now_s - self._last_text_s)
        self._last_text_s = now_s

    def _note_end(self) -> None:
        prompt, new = PROMPT_TOKENS.findall(self._end), NEW_TOKENS.findall(self._end)
        if not prompt or not new:
            raise RuntimeError(f"the answer ended without its last event: {self._end!r}")
        self._measured.prompt_tokens.append(int(prompt[-1]))
        self._measured.new_tokens.append(int(new[-1]))


def _connect(address: tuple[str, int]) -> socket.socket:
    connected = socket.create_connection(address)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connected


def random_prompts(count: int, *, words: int, shared_words: int = 0, seed: int) -> list[str]:
    """So many texts of so many words, of which the first `shared_words` are the same in all of them."""
    rng = random.Random(seed)
    shared = rng.choices(WORDS.split(), k=shared_words)
    return [" ".join(shared + rng.choices(WORDS.split(), k=words - shared_words)) for _ in range(count)]


def _requests(load: Load) -> Iterator[bytes]:
    prompts = random_prompts(
        load.num_requests, words=load.prompt_words, shared_words=load.shared_words, seed=load.seed
    )
    for prompt in prompts:
        path, body = BODIES[load.api](prompt, load)
        payload = json.dumps(body | dict(load.extra)).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {load.host}:{load.port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
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


BODIES = {"chat": _chat, "generate": _generate, "completions": _completions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--api", choices=BODIES, default="chat")
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--requests", dest="num_requests", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--prompt-words", type=int, default=32)
    parser.add_argument("--shared-words", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-keep-alive", dest="keep_alive", action="store_false")
    parser.add_argument("--extra", type=json.loads, default={}, help="more fields of the body, as JSON")
    measured = run(Load(**vars(parser.parse_args())))
    print(json.dumps({name: getattr(measured, name) for name in Measured.__slots__}))


if __name__ == "__main__":
    main()
