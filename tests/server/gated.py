"""A server with one slot, whose answers wait until a test opens the gate."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from typing import Any

from tests.support.live_server import LiveServer, request_bytes, wait_until

# Answers stop after their first token as long as the gate is closed.
GATED = """
import time
from pathlib import Path

class TritonPythonModel:
    async def decode(self, sequence):
        while not sequence.finished:
            sequence.append(await sequence.sample())
            while not Path({gate!r}).exists():
                time.sleep(0.001)
"""
TGI = {"inputs": "tell me", "parameters": {"max_new_tokens": 40, "ignore_eos": True}}


def gated(folder: Path, tiny_repository: Path) -> Path:
    """Make model `tiny` with one slot, whose answers wait for the file `gate` next to the repository."""
    repository = folder / "repository"
    shutil.copytree(tiny_repository, repository)
    for config in repository.glob("*/config.pbtxt"):
        text = config.read_text().replace("max_batch_size: 32", "max_batch_size: 1")
        config.write_text(text.replace("max_candidate_sequences: 32", "max_candidate_sequences: 1"))
    decoder = repository / "tiny_decoder" / "1" / "model.py"
    decoder.write_text(GATED.format(gate=str(folder / "gate")))
    return repository


class Gated:
    """A server whose only slot is taken by an answer that waits until the gate is opened."""

    def __init__(self, repository: Path, **settings: Any) -> None:
        self.gate = repository.parent / "gate"
        self.gate.unlink(missing_ok=True)
        self.live = LiveServer(repository, **settings)
        self.engine = self.live.model.engine
        self.holder = self.send("/generate_stream", TGI)
        wait_until(lambda: self.engine.num_running == 1)

    def send(self, path: str, body: dict[str, Any]) -> socket.socket:
        client = socket.create_connection(("127.0.0.1", self.live.port))
        client.sendall(request_bytes(path, body))
        return client

    def open_gate(self) -> None:
        self.gate.touch()

    def rejections(self, reason: str) -> float:
        labels = {"model": "tiny", "reason": reason}
        registry = self.live.server.services.metrics.registry
        return registry.get_sample_value("genserve_admission_rejections_total", labels) or 0

    def close(self) -> None:
        self.open_gate()
        self.holder.close()
        self.live.stop()
