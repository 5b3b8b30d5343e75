"""KServe load: a closed loop of KServe v2 inferences over HTTP or gRPC, in a separate process.

The client shares the cores with the measured server, so it does minimal work. It encodes the request once,
searches HTTP responses only for their end, and leaves gRPC responses undecoded.

    python benchmarks/kserve_load.py --protocol http --address 127.0.0.1:8000 --shape 64 512

prints one JSON object: requests per second, and the cores used by the client itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc as triton_grpc
import uvloop

LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
LAST_ANSWERS_S = 10
INFER = "/inference.GRPCInferenceService/ModelInfer"


class Progress:
    """The number of answers so far, and whether to go on."""

    def __init__(self) -> None:
        self.count = 0
        self.going = True


class HttpLoop(asyncio.Protocol):
    """One kept-alive connection that sends the next request after each response."""

    def __init__(self, request: bytes, progress: Progress) -> None:
        self._request = request
        self._progress = progress
        self.ended = asyncio.get_running_loop().create_future()
        self._head = b""
        self._missing = 0  # remaining bytes of the response, once its head is read

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self._missing:
            self._missing -= len(data)
        else:
            self._head += data
            head, end, rest = self._head.partition(b"\r\n\r\n")
            if not end:
                return
            found = LENGTH.search(head)
            if not head.startswith(b"HTTP/1.1 200") or found is None:
                self._fail(f"the server did not answer: {self._head!r}")
                return
            self._missing, self._head = int(found[1]) - len(rest), b""
        if not self._missing:
            self._progress.count += 1
            if self._progress.going:
                self._transport.write(self._request)
            else:
                self.ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(f"the server closed a connection: {error}")

    def _fail(self, message: str) -> None:
        if not self.ended.done():
            self.ended.set_exception(RuntimeError(message))


async def run_http(options: argparse.Namespace, progress: Progress) -> Callable[[], Awaitable[None]]:
    """Start the loops, and return a function that waits for the last responses."""
    x = np.random.default_rng(0).random(options.shape, np.float32)
    entry = {"name": "X", "shape": options.shape, "datatype": "FP32"}
    document = {
        "inputs": [{**entry, "parameters": {"binary_data_size": x.nbytes}}],
        "outputs": [{"name": "Y", "parameters": {"binary_data": True}}],
    }
    text = json.dumps(document).encode()
    head = (
        f"POST /v2/models/{options.model}/infer HTTP/1.1\r\nHost: {options.address}\r\n"
        f"Inference-Header-Content-Length: {len(text)}\r\nContent-Length: {len(text) + x.nbytes}\r\n\r\n"
    )
    request = head.encode() + text + x.tobytes()
    host, _, port = options.address.rpartition(":")
    loop = asyncio.get_running_loop()
    connections = [
        await loop.create_connection(lambda: HttpLoop(request, progress), host, int(port))
        for _ in range(options.concurrency)
    ]

    async def end() -> None:
        for _, connection in connections:
            await connection.ended
        for transport, _ in connections:
            transport.close()

    return end


async def run_grpc(options: argparse.Namespace, progress: Progress) -> Callable[[], Awaitable[None]]:
    """Start the loops, and return a function that waits for the last responses."""
    x = np.random.default_rng(0).random(options.shape, np.float32)
    tensor = triton_grpc.service_pb2.ModelInferRequest.InferInputTensor(
        name="X", datatype="FP32", shape=options.shape
    )
    message = triton_grpc.service_pb2.ModelInferRequest(
        model_name=options.model, inputs=[tensor], raw_input_contents=[x.tobytes()]
    )
    request = message.SerializeToString()
    channel = grpc.aio.insecure_channel(options.address)
    infer = channel.unary_unary(INFER)  # bytes to bytes

    async def ask() -> None:
        while progress.going:
            await infer(request)
            progress.count += 1

    tasks = [asyncio.ensure_future(ask()) for _ in range(options.concurrency)]

    async def end() -> None:
        await asyncio.gather(*tasks)
        await channel.close()

    return end


async def measure(options: argparse.Namespace) -> dict[str, float]:
    progress = Progress()
    end = await (run_http if options.protocol == "http" else run_grpc)(options, progress)
    await asyncio.sleep(options.warm_up_s)
    before, started_s, cpu_started_s = progress.count, time.perf_counter(), time.process_time()
    await asyncio.sleep(options.seconds)
    elapsed_s = time.perf_counter() - started_s
    result = {
        "requests_per_s": (progress.count - before) / elapsed_s,
        "client_cores": (time.process_time() - cpu_started_s) / elapsed_s,
    }
    progress.going = False
    async with asyncio.timeout(LAST_ANSWERS_S):
        await end()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--protocol", choices=["http", "grpc"], required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--model", default="echo")
    parser.add_argument("--shape", type=int, nargs=2, required=True)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--warm-up-s", type=float, default=0.5)
    print(json.dumps(uvloop.run(measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
