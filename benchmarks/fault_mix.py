"""Fault mix: requests over all interfaces, with clients that leave, killed processes, reloads and bad inputs.

The ledger counts how every request ends: exactly once, as its client sees it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
from bad_inputs import bad_inputs
from raw_client import Answer, Leave, RawClient, post_bytes
from servers import Running
from text_faces import FACES, Face, request_of
from tritonclient.grpc import service_pb2, service_pb2_grpc

NUM_CLIENTS = 40            # clients of the text model: more than run at once, so that some wait
NUM_SMALL_CLIENTS = 3       # clients of small models
WORDS = ("river", "of", "time", "runs", "slow", "and", "deep", "under", "old", "stone", "bridges", "rain")
MAX_LEAVE_S = 2.0           # about as long as an answer takes here


class Ledger:
    """How requests ended, as their clients saw it.

    Attributes:
        ends: finished, failed (with a typed error), rejected (429 or 503), left, lost (no end came).
        faults: kills, reloads, bad inputs, disconnects, by their names.
        wrong: what should not have happened.
    """

    def __init__(self) -> None:
        self.ends: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.wrong: Counter[str] = Counter()

    def record(self, name: str, answer: Answer, *, face: Face | None = None, may_fail: bool = False) -> None:
        """Count one answer over HTTP; `face` is the interface of a stream."""
        if answer.has_left:
            self.ends["left"] += 1
        elif not answer.is_complete:
            self.ends["lost"] += 1
            self.wrong[f"{name}: no end after {answer.end_s - answer.sent_s:.0f} s, {answer.status}"] += 1
        elif answer.status in (429, 503):
            self.ends["rejected"] += 1
        elif answer.status == 200:
            self._note_end(name, answer, face)
        else:
            self.ends["failed"] += 1
            if not may_fail:
                self.wrong[f"{name}: {answer.status} {answer.body[:200]!r}"] += 1

    def _note_end(self, name: str, answer: Answer, face: Face | None) -> None:
        self.ends["finished"] += 1
        if face is None:
            return
        if face.failure.search(answer.body):
            self.ends["finished"] -= 1
            self.ends["failed"] += 1
            self.wrong[f"{name}: {answer.body[-200:]!r}"] += 1
        count = face.num_ends(answer.body)
        if count > 1:
            self.ends["ended twice"] += 1
        elif count == 0:
            self.ends["lost"] += 1
            self.wrong[f"{name}: a stream without its end: {answer.body[-200:]!r}"] += 1

    @property
    def num_requests(self) -> int:
        """The number of all requests, bad inputs included."""
        return sum(count for end, count in self.ends.items() if end != "ended twice")


class FaultMix:
    """The load of one server."""

    def __init__(self, server: Running, *, model: str, repository: Path, max_words: int, seed: int) -> None:
        self.ledger = Ledger()
        self._server = server
        self._model = model
        self._repository = repository
        self._max_words = max_words
        self._random = random.Random(seed)
        self._http = RawClient(server.http)
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc}")
        self._grpc = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._bad = list(bad_inputs(model))
        self._known: dict[str, bytes] = {}      # the texts of greedy answers when nothing else ran
        self._running = True

    async def run(self, *, seconds: float) -> None:
        """Load the server for `seconds`, and wait for the last answers."""
        for number in range(4):
            prompt = f"Say {WORDS[number]} {number}."
            self._known[prompt] = await self._text(prompt)
        for name, request in self._bad:     # send each at least once, however short the mix is
            await self._ask_badly(name, request)
        text = ((12, self.whole), (20, self.stream), (25, self.leave), (2, self.known), (8, self.bad_input),
                (3, self.grpc_stream), (3, self.grpc_cancel), (2, self.grpc_deadline))  # fmt: skip
        small = ((6, self.small), (1, self.small_grpc))
        tasks = [asyncio.create_task(self._repeat(text, pause_s=0.05)) for _ in range(NUM_CLIENTS)]
        tasks += [asyncio.create_task(self._repeat(small, pause_s=0.1)) for _ in range(NUM_SMALL_CLIENTS)]
        tasks += [asyncio.create_task(self._every(self.kill, 3.0, until_s=seconds))]
        tasks += [asyncio.create_task(self._every(self.reload, 2.0, until_s=seconds))]
        # Do not reload in the second half, in which memory is judged: each reload empties the KV cache.
        tasks += [asyncio.create_task(self._every(self.reload_text, 61.0, until_s=seconds / 2))]
        await asyncio.sleep(seconds)
        self._running = False
        await asyncio.gather(*tasks)
        self._http.close()
        await self._channel.close()

    async def _repeat(
        self, scenarios: tuple[tuple[int, Callable[[], Awaitable[None]]], ...], *, pause_s: float
    ) -> None:
        weights, choices = zip(*scenarios, strict=True)
        while self._running:
            [scenario] = self._random.choices(choices, weights)
            await scenario()
            await asyncio.sleep(pause_s * self._random.random())

    async def _every(
        self, fault: Callable[[], Awaitable[None]], interval_s: float, *, until_s: float
    ) -> None:
        ends_s = time.monotonic() + until_s
        while time.monotonic() + interval_s < ends_s:
            await asyncio.sleep(interval_s)
            await fault()

    def _prompt(self) -> str:
        count = self._random.choice((3, self._max_words // 3, self._max_words))
        return " ".join(self._random.choices(WORDS, k=count))

    def _request(self, *, stream: bool, tokens: int | None = None) -> tuple[str, Face, bytes]:
        name = self._random.choice(tuple(FACES))
        tokens = tokens or self._random.choice((4, 16, 48))
        path, body = request_of(FACES[name], self._model, self._prompt(), tokens=tokens, stream=stream)
        return f"{name}{' stream' if stream else ''}", FACES[name], post_bytes(path, body)

    async def whole(self) -> None:
        """An answer in one piece."""
        name, _, request = self._request(stream=False)
        await self._ask(name, request)

    async def stream(self) -> None:
        """A stream that is read to its end."""
        name, face, request = self._request(stream=True)
        await self._ask(name, request, face=face)

    async def _ask(self, name: str, request: bytes, *, face: Face | None = None) -> None:
        answer = await self._http.ask(request)
        self.ledger.record(name, answer, face=face)
        if answer.status in (429, 503):
            await asyncio.sleep(answer.retry_after_s)

    async def leave(self) -> None:
        """A client that leaves at any point: before, during or after the answer."""
        name, _, request = self._request(stream=self._random.random() < 0.5, tokens=64)
        if self._random.random() < 0.1:
            request = request[: self._random.randrange(len(request))]
        after_s = MAX_LEAVE_S * self._random.random() ** 2
        leave = Leave(after_s=after_s, reset=self._random.random() < 0.5)
        answer = await self._http.ask(request, leave=leave)
        if answer.has_left:
            self.ledger.faults["disconnects"] += 1
        self.ledger.record(name, answer, may_fail=True)

    async def _text(self, prompt: str) -> bytes:
        path, body = request_of(FACES["chat"], self._model, prompt, tokens=12, stream=False)
        answer = await self._http.ask(post_bytes(path, body))
        self.ledger.record("chat", answer)
        found = re.search(rb'"content":\s*"((?:[^"\\]|\\.)*)"', answer.body)
        return found[1] if found and answer.status == 200 else b""

    async def known(self) -> None:
        """A greedy answer, which must not depend on other requests."""
        prompt = self._random.choice(tuple(self._known))
        text = await self._text(prompt)
        if text and text != self._known[prompt]:
            self.ledger.wrong[f"another text: {text!r} instead of {self._known[prompt]!r}"] += 1

    async def bad_input(self) -> None:
        """A request that the server must reject."""
        await self._ask_badly(*self._random.choice(self._bad))

    async def _ask_badly(self, name: str, request: bytes) -> None:
        answer = await self._http.ask(request)
        self.ledger.faults["bad inputs"] += 1
        self.ledger.record(name, answer, may_fail=400 <= answer.status < 500)
        if answer.status == 200:
            self.ledger.wrong[f"{name} was accepted"] += 1

    async def small(self) -> None:
        """A small model; a request to the isolated one fails if its process is killed."""
        name = self._random.choice(("echo", "isolated", "scaled"))
        x = [round(self._random.random(), 3) for _ in range(4)]
        tensor = {"name": "X", "shape": [1, 4], "datatype": "FP32", "data": x}
        answer = await self._http.post(f"/v2/models/{name}/infer", {"inputs": [tensor]})
        self.ledger.record(name, answer, may_fail=name == "isolated")
        if answer.status == 200:
            outputs = {output["name"]: output["data"] for output in json.loads(answer.body)["outputs"]}
            if not np.allclose(outputs["Y"], np.multiply(x, 2 if name == "scaled" else 1)):
                self.ledger.wrong[f"{name}: {outputs['Y']} for {x}"] += 1

    def _text_message(self, tokens: int) -> service_pb2.ModelInferRequest:
        message = service_pb2.ModelInferRequest(model_name=self._model)
        text, count, stream = (message.inputs.add() for _ in range(3))
        text.name, text.datatype, text.shape[:] = "text_input", "BYTES", [1, 1]
        text.contents.bytes_contents.append(self._prompt().encode())
        count.name, count.datatype, count.shape[:] = "max_tokens", "INT32", [1, 1]
        count.contents.int_contents.append(tokens)
        stream.name, stream.datatype, stream.shape[:] = "stream", "BOOL", [1, 1]
        stream.contents.bool_contents.append(True)
        return message

    async def grpc_stream(self) -> None:
        """A stream over gRPC."""
        finals, error = 0, ""
        try:
            async for message in self._grpc.ModelStreamInfer(iter([self._text_message(16)]), timeout=120):
                finals += message.infer_response.parameters["triton_final_response"].bool_param
                error = error or message.error_message
        except grpc.aio.AioRpcError as raised:
            error = raised.details() or raised.code().name
        if error:
            is_rejection = "limit" in error or "unavailable" in error.lower()
            self.ledger.ends["rejected" if is_rejection else "failed"] += 1
            if not is_rejection:
                self.ledger.wrong[f"gRPC stream: {error[:200]}"] += 1
        else:
            self.ledger.ends["finished" if finals else "lost"] += 1
            self.ledger.ends["ended twice"] += finals > 1

    async def grpc_cancel(self) -> None:
        """A gRPC client that cancels its call."""
        call = self._grpc.ModelStreamInfer(iter([self._text_message(64)]))
        asyncio.get_running_loop().call_later(MAX_LEAVE_S * self._random.random() ** 2, call.cancel)
        try:
            async for _ in call:
                pass
            self.ledger.ends["finished"] += 1
        except (asyncio.CancelledError, grpc.aio.AioRpcError):
            self.ledger.ends["left"] += 1
            self.ledger.faults["gRPC cancels"] += 1

    async def grpc_deadline(self) -> None:
        """A gRPC client whose deadline passes."""
        call = self._grpc.ModelStreamInfer(
            iter([self._text_message(64)]), timeout=0.01 + MAX_LEAVE_S * self._random.random() ** 2
        )
        try:
            async for _ in call:
                pass
            self.ledger.ends["finished"] += 1
        except grpc.aio.AioRpcError as error:
            is_late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            self.ledger.ends["left" if is_late else "rejected"] += 1
            self.ledger.faults["gRPC deadlines"] += is_late

    async def small_grpc(self) -> None:
        """A small model over gRPC."""
        message = service_pb2.ModelInferRequest(model_name="echo")
        tensor = message.inputs.add()
        tensor.name, tensor.datatype, tensor.shape[:] = "X", "FP32", [1, 4]
        message.raw_input_contents.append(np.ones(4, np.float32).tobytes())
        try:
            await self._grpc.ModelInfer(message, timeout=60)
            self.ledger.ends["finished"] += 1
        except grpc.aio.AioRpcError as error:
            self.ledger.ends["failed"] += 1
            self.ledger.wrong[f"gRPC echo: {error.code().name} {error.details()}"] += 1

    async def kill(self) -> None:
        """Kill the process of the isolated model."""
        tensor = {"name": "X", "shape": [1, 1], "datatype": "FP32", "data": [1]}
        answer = await self._http.post("/v2/models/isolated/infer", {"inputs": [tensor]})
        self.ledger.record("isolated", answer, may_fail=True)
        if answer.status == 200:
            outputs = {output["name"]: output["data"] for output in json.loads(answer.body)["outputs"]}
            with suppress(ProcessLookupError):
                os.kill(outputs["PID"][0], signal.SIGKILL)
                self.ledger.faults["kills"] += 1

    async def reload(self) -> None:
        """Reload a small model, whose requests must not notice it."""
        await self._reload(self._random.choice(("echo", "scaled")))

    async def reload_text(self) -> None:
        """Reload the text model, whose requests must not notice it."""
        await self._reload(self._model)

    async def _reload(self, name: str) -> None:
        changed = self._repository / (name if name != self._model else f"{name}_decoder") / "config.pbtxt"
        changed.write_text(changed.read_text().rstrip("\n") + f"\n# reload {self.ledger.faults['reloads']}\n")
        answer = await self._http.post(f"/v2/repository/models/{name}/load", {})
        self.ledger.record(f"load {name}", answer)
        self.ledger.faults["reloads"] += 1
