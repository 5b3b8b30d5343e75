"""One place: a server that runs one text at a time, and requests that a gate holds in each state."""

from __future__ import annotations

import json
import re
import shutil
import socket
import struct
from pathlib import Path
from typing import Any

from tritonclient.grpc import service_pb2

from benchmarks.text_faces import FACES, request_of
from tests.support.live_server import LiveServer, request_bytes, wait_until
from tests.support.step_gate import StepGate

STATES = ("waiting", "prefilling", "decoding")
# Fails after three tokens if the request asks for FAILING.
FAILING = 40
_DECODER = f"""
class TritonPythonModel:
    async def decode(self, sequence):
        while not sequence.finished:
            if sequence.params.max_tokens == {FAILING} and sequence.num_new_tokens == 3:
                raise ValueError("no place left, see /etc/secret/places.toml")
            sequence.append(await sequence.sample())
"""


def one_place(tiny_repository: Path, root: Path) -> Path:
    """Write a repository whose model `tiny` has one place and no prefix cache."""
    shutil.copytree(tiny_repository, root)
    for config in root.glob("*/config.pbtxt"):
        text = config.read_text().replace("max_batch_size: 32", "max_batch_size: 1")
        config.write_text(text.replace("max_candidate_sequences: 32", "max_candidate_sequences: 1"))
    with (root / "tiny_logits" / "config.pbtxt").open("a") as config:
        config.write('parameters [ { key: "prefix_cache" value: { string_value: "false" } } ]\n')
    (root / "tiny_decoder" / "1" / "model.py").write_text(_DECODER)
    return root


def small_cache(repository: Path, *, num_blocks: int) -> None:
    """Give the model `tiny` of a repository a KV cache of so many blocks, of 16 tokens each."""
    config = repository / "tiny_logits" / "config.pbtxt"
    text = config.read_text()
    [per_token] = re.findall(r"takes ([\d.]+) KiB per token", text)
    size = int(float(per_token) * 1024 * 16 * num_blocks)
    config.write_text(
        f'{text}parameters [ {{ key: "kv_cache_bytes" value: {{ string_value: "{size}" }} }} ]\n'
    )


def send(live: LiveServer, face: str, *, stream: bool, tokens: int = 100, **fields: Any) -> socket.socket:
    """Send a request and return its connection."""
    path, body = request_of(FACES[face], "tiny", "tell me", tokens=tokens, stream=stream)
    return connect(live, path, json.loads(body) | fields)


def connect(live: LiveServer, path: str, body: dict[str, Any]) -> socket.socket:
    """Send a body on a connection of its own."""
    connection = socket.create_connection(("127.0.0.1", live.port))
    connection.sendall(request_bytes(path, body))
    return connection


def leave(connection: socket.socket, *, reset: bool) -> None:
    """Close a connection, by RST or by FIN."""
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def hold_place(live: LiveServer, gate: StepGate) -> socket.socket:
    """Take the only place with an answer that stays in its second step."""
    gate.shut()
    holder = send(live, "tgi", stream=True)
    gate.allow(1)
    wait_until(lambda: gate.num_begun == 2)
    return holder


def reach(live: LiveServer, gate: StepGate, state: str) -> None:
    """Wait until the request that was just sent is in this state, while the engine is in a forward."""
    if state == "waiting":
        wait_until(lambda: live.model.engine.num_accepted == 2)
        return
    wait_until(lambda: gate.num_begun == 1)
    if state == "decoding":
        gate.allow(1)
        wait_until(lambda: gate.num_begun == 2)


def grpc_message(*, tokens: int = 100, **parameters: int) -> service_pb2.ModelInferRequest:
    """Return a request for text."""
    request = service_pb2.ModelInferRequest(model_name="tiny")
    text = request.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1])
    text.contents.bytes_contents.append(b"tell me")
    count = request.inputs.add(name="max_tokens", datatype="INT32", shape=[1, 1])
    count.contents.int_contents.append(tokens)
    for name, value in parameters.items():
        request.parameters[name].int64_param = value
    return request
