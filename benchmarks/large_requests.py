"""Large requests: how long each kind of large request stalls the server's event loop.

    python benchmarks/large_requests.py --repository model_repository

Starts `genserve serve`, sends each request while another thread asks for /health every few milliseconds, and
prints its status and time, the bound of the histogram's bucket with the longest lag of the event loop
(genserve_event_loop_lag_seconds), the slowest answer of /health, and the CPU time of the server. Linux only.
"""

from __future__ import annotations

import argparse
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from report import markdown
from scraped_metrics import ScrapedMetrics
from servers import Running, cpu_s, genserve_server

MIB = 2**20
HEADINGS = ("request", "bytes", "status", "seconds", "lag up to, ms", "slowest /health, ms", "CPU s")
_PAUSE_S = 0.005

Request = tuple[str, Callable[[], bytes]]


def repeated(name: str, unit: str, *, size: int = 8 * MIB - 4096, **others: object) -> bytes:
    """Return a JSON object with a list that repeats one text as often as fits."""
    rest = json.dumps(others)[1:-1]
    head = f'{{{rest}{", " if rest else ""}"{name}": ['
    count = (size - len(head) - 2) // (len(unit) + 1)
    return (head + ",".join([unit] * count) + "]}").encode()


def body(**fields: object) -> bytes:
    """Return a JSON object."""
    return json.dumps(fields).encode()


def chat(messages: int, words: int, **others: object) -> bytes:
    """Return a chat of some messages with some words each."""
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": "word " * words} for i in range(messages)]
    return body(messages=turns, max_tokens=1, **others)


def tools(count: int, properties: int) -> list[dict[str, object]]:
    """Return functions with `properties` arguments each."""
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(properties)}}
    return [{"type": "function", "function": {"name": f"f{i}", "parameters": schema}} for i in range(count)]


def nested(depth: int) -> dict[str, object]:
    """Return a JSON schema of a depth."""
    schema: dict[str, object] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema, "b": {"type": "integer"}}}
    return schema


def parsing() -> Iterator[Request]:
    """Bodies of 8 MiB that are costly to parse or to validate."""
    completions = "/v1/completions"
    for name, unit in {
        "integers": "1", "floats": "0.5", "strings": '"a"', "literals": "true", "lists": "[]",
        "lists of an integer": "[1]", "objects": "{}", "objects with a key": '{"a":1}',
    }.items():  # fmt: skip
        yield f"{completions}: 8 MiB of {name}", lambda unit=unit: repeated("prompt", unit)
        yield f"/v1/chat/completions: 8 MiB of {name}", lambda unit=unit: repeated("messages", unit)
    keys = ", ".join(f'"{i}": 1' for i in range(500_000))
    yield f"{completions}: an object of 500,000 keys", lambda: f'{{"logit_bias": {{{keys}}}}}'.encode()
    yield f"{completions}: an object of 500,000 unknown keys", lambda: f"{{{keys}}}".encode()
    yield f"{completions}: 8 M open brackets", lambda: b'{"prompt": ' + b"[" * (8 * MIB - 100)
    yield f"{completions}: a string of 8 MiB of escapes", lambda: (
        b'{"prompt": "' + b"\\u00e9" * (8 * MIB // 6 - 10) + b'"}'
    )
    yield f"{completions}: 260,000 token ids", lambda: body(prompt=[1] * 260_000)
    yield f"{completions}: 260,000 floats", lambda: body(prompt=[0.5] * 260_000)
    yield f"{completions}: 260,000 strings", lambda: body(prompt=["a"] * 260_000)
    yield f"{completions}: 60,000 lists of a token id", lambda: body(prompt=[[1]] * 60_000)
    yield f"{completions}: a table of 8,000 biases", lambda: body(
        prompt="a", logit_bias={str(i): 1 for i in range(8000)}
    )
    yield f"{completions}: a table of 8,000 wrong biases", lambda: body(
        prompt="a", logit_bias={str(i): "a" for i in range(8000)}
    )
    yield "/v1/chat/completions: 60,000 wrong parts", lambda: body(
        messages=[{"role": "user", "content": [{"type": "text"}] * 60_000}]
    )
    yield "/v1/chat/completions: 60,000 parts", lambda: body(
        messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 60_000}]
    )
    yield f"{completions}: a table of 1,000 biases", lambda: body(
        prompt="a", max_tokens=1, logit_bias={str(i): 1 for i in range(1000)}
    )
    yield f"{completions}: 100,000 stop strings", lambda: body(prompt="a", stop=["x"] * 100_000)
    yield "/v1/chat/completions: 8,000 unknown fields", lambda: body(
        messages=[{"role": "user", "content": "a"}], max_tokens=1, **{f"f{i}": i for i in range(8000)}
    )


def texts() -> Iterator[Request]:
    """Long prompts and chats, in each dialect."""
    kinds = {"words": "word " * 200_000, "a word": "x" * 1_000_000, "emoji": "😀" * 250_000}
    for name, text in kinds.items():
        yield f"/generate: 1,000,000 characters, {name}", lambda text=text: body(inputs=text)
        yield f"/v1/completions: 1,000,000 characters, {name}", lambda text=text: body(prompt=text)
        yield f"/tokenize: 1,000,000 characters, {name}", lambda text=text: body(prompt=text)
    yield "/v1/completions: 8 MiB of words", lambda: body(prompt="word " * (8 * MIB // 5 - 100))
    yield "/v1/completions: 8 MiB of a word", lambda: body(prompt="x" * (8 * MIB - 1000))
    yield "/v1/completions: truncated", lambda: body(
        prompt="word " * 200_000, truncate_prompt_tokens=16, max_tokens=1
    )
    yield "/tokenize: 8 MiB", lambda: body(prompt="word " * (8 * MIB // 5 - 100))
    yield "/tokenize: 8 MiB, token strings", lambda: body(
        prompt="word " * (8 * MIB // 5 - 100), return_token_strs=True
    )
    yield "/tokenize: 2 MiB, pieces", lambda: body(content="word " * (2 * MIB // 5), with_pieces=True)
    yield "/tokenize: 2 MiB as TGI", lambda: body(inputs="word " * (2 * MIB // 5))
    yield "/detokenize: 1,000,000 tokens", lambda: body(tokens=[330] * 1_000_000)
    yield "/v1/chat/completions: 1,000 messages", lambda: chat(1000, 3)
    yield "/v1/chat/completions: 1,000 messages of 8 KiB", lambda: chat(1000, 1600)
    yield "/v1/chat/completions: 8 MiB in a message", lambda: chat(1, 8 * MIB // 5 - 100)
    yield "/v1/messages: 1,000 messages of 8 KiB", lambda: chat(1000, 1600, model="smollm2")
    yield "/v1/messages/count_tokens: 1,000 messages of 8 KiB", lambda: body(
        model="smollm2", messages=[{"role": "user", "content": "word " * 1600}] * 1000
    )
    yield "/api/chat: 1,000 messages of 8 KiB", lambda: body(
        model="smollm2", messages=[{"role": "user", "content": "word " * 1600}] * 1000, stream=False
    )
    yield "/v1/responses: 1,000 items of 8 KiB", lambda: body(
        input=[{"role": "user", "content": "word " * 1600}] * 1000
    )
    yield "/v1/responses: 1,000 items", lambda: body(
        input=[{"role": "user", "content": "word"}] * 1000, max_output_tokens=16
    )


def grammars() -> Iterator[Request]:
    """Structured outputs that take long to compile."""
    ask = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
    enums = {f"p{i}": {"enum": [f"v{j}" for j in range(50)]} for i in range(500)}
    for name, form in {
        "a schema of 500 enums": {"type": "object", "properties": enums},
        "a schema of depth 100": nested(100),
        "a schema of depth 20": nested(20),
    }.items():
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": form}}
        yield f"/v1/chat/completions: {name}", lambda wanted=wanted: body(**ask, response_format=wanted)
    for name, outputs in {
        "a repeated regex": {"regex": "(a|b){1000}c{1,500}"},
        "a long regex": {"regex": "[a-z]" * 2000},
        "10,000 choices": {"choice": [f"choice {i}" for i in range(10_000)]},
        "a long grammar": {"grammar": "root ::= " + " | ".join(f'"{i}"' for i in range(5000))},
    }.items():
        yield f"/v1/chat/completions: {name}", lambda outputs=outputs: body(
            **ask, structured_outputs=outputs
        )
    yield "/v1/chat/completions: 100 tools", lambda: body(**ask, tools=tools(100, 20), tool_choice="required")
    yield "/v1/chat/completions: 100 tools of 200 arguments", lambda: body(**ask, tools=tools(100, 200))


def answers() -> Iterator[Request]:
    """Requests with large answers."""
    yield "/v1/completions: 2,000 tokens with 20 log-probabilities", lambda: body(
        prompt="a", max_tokens=2000, ignore_eos=True, logprobs=20
    )
    yield "/v1/completions: log-probabilities of a long prompt", lambda: body(
        prompt="word " * 4000, max_tokens=1, echo=True, logprobs=5
    )
    yield "/generate: 64 answers of 200 tokens", lambda: body(
        inputs="a", parameters={"max_new_tokens": 200, "ignore_eos": True, "details": True}
    )
    yield "/v1/completions: 64 choices with 20 log-probabilities", lambda: body(
        prompt="a", max_tokens=128, ignore_eos=True, logprobs=20, n=64, temperature=1
    )


KINDS: Mapping[str, Callable[[], Iterator[Request]]] = {
    "parsing": parsing,
    "texts": texts,
    "grammars": grammars,
    "answers": answers,
}


class Health(threading.Thread):
    """Requests /health again and again, and records the longest time of an answer in seconds."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._port = port
        self._ends = threading.Event()
        self.longest_s = 0.0

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        while not self._ends.wait(_PAUSE_S):
            started_s = time.perf_counter()
            connection.request("GET", "/health")
            connection.getresponse().read()
            self.longest_s = max(self.longest_s, time.perf_counter() - started_s)

    def end(self) -> float:
        """Stop, and return the longest time."""
        self._ends.set()
        self.join()
        return self.longest_s


def lags(server: Running) -> dict[float, float]:
    """Return how often the event loop lagged, up to each bound in seconds."""
    connection = http.client.HTTPConnection("127.0.0.1", server.metrics, timeout=60)
    connection.request("GET", "/metrics")
    metrics = ScrapedMetrics(connection.getresponse().read().decode(), model="")
    return dict(metrics.buckets("genserve_event_loop_lag_seconds"))


def longest_lag_s(before: Mapping[float, float], after: Mapping[float, float]) -> float:
    """Return the bound of the longest lag between two scrapes."""
    counts = {bound: after[bound] - before[bound] for bound in after}
    return next(bound for bound, count in counts.items() if count == max(counts.values()))


def measure(server: Running, path: str, content: bytes) -> tuple[object, ...]:
    """Send a request and return its figures."""
    before, cpu_before_s, health = lags(server), cpu_s(server.pid), Health(server.http)
    health.start()
    time.sleep(0.05)
    connection = http.client.HTTPConnection("127.0.0.1", server.http, timeout=300)
    started_s = time.perf_counter()
    try:
        connection.request("POST", path, body=content, headers={"Content-Type": "application/json"})
        response = connection.getresponse()
        status, read = str(response.status), len(response.read())
    except OSError as error:    # the server answered before it had read the whole request
        status, read = type(error).__name__, 0
    seconds = time.perf_counter() - started_s
    time.sleep(0.1)             # lets the server free memory after the answer
    slowest_s = health.end()
    lag_s = longest_lag_s(before, lags(server))
    used_s = cpu_s(server.pid) - cpu_before_s
    sizes = f"{len(content):,} → {read:,}"
    return sizes, status, f"{seconds:.2f}", f"{lag_s * 1e3:g}", f"{slowest_s * 1e3:.0f}", f"{used_s:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repository", type=Path, required=True)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--only", default="", help="a part of the names of the requests to send")
    options = parser.parse_args()
    rows = []
    with genserve_server(options.repository) as server:
        measure(server, "/v1/completions", body(prompt="warm up", max_tokens=2))
        for kind in options.kinds:
            for name, content in KINDS[kind]():
                if options.only in name:
                    figures = measure(server, name.partition(":")[0], content())
                    rows.append([name, *map(str, figures)])
                    print(*rows[-1], sep=" | ", flush=True)
    print(markdown(HEADINGS, rows))


if __name__ == "__main__":
    main()
