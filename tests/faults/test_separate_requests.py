"""Nothing of one request reaches another, whatever happens to the requests around it."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPResponse
from pathlib import Path

import pytest

from benchmarks.text_faces import FACES, request_of
from tests.faults.one_place import connect, leave, small_cache
from tests.support.live_server import LiveServer, wait_until
from tests.support.request_ledger import RequestLedger

# Repeats its prompt, one token per step.
REPEAT = """
class TritonPythonModel:
    async def decode(self, sequence):
        for token in tuple(sequence.token_ids):
            if sequence.finished:
                break
            await sequence.sample()
            sequence.append(token)
"""
SHARED = "all of them begin with these words, "
TOKENS = 110
NUM_BLOCKS = 20  # for one request and a half; ten are running, or few on a busy machine


@pytest.fixture(scope="module")
def live(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server whose answers repeat their prompts, and whose cache is so small that it preempts them."""
    repository = tmp_path_factory.mktemp("separate") / "repository"
    shutil.copytree(tiny_repository, repository)
    (repository / "tiny_decoder" / "1" / "model.py").write_text(REPEAT)
    small_cache(repository, num_blocks=NUM_BLOCKS)
    with LiveServer(repository, max_queue_wait_s=0.0) as server:
        yield server


def ask(live: LiveServer, number: int, canaries: list[str]) -> str:
    """Send a request of one face; every third client leaves. Returns the answer of one that stays."""
    names = tuple(FACES)
    stream = number % 2 == 0
    face = FACES[names[number % len(names)]]
    path, body = request_of(face, "tiny", SHARED + canaries[number], tokens=TOKENS, stream=stream)
    connection = connect(live, path, json.loads(body))
    if number % 3 == 0:
        connection.settimeout(0.001 * (number % 50 + 1))
        with suppress(TimeoutError):
            connection.recv(1)
        leave(connection, reset=stream)
        return ""
    with connection:
        response = HTTPResponse(connection)
        response.begin()
        answer = response.read().decode()
        assert response.status == 200, answer
    return "".join(_texts(answer)) if stream else answer


def _texts(events: str) -> list[str]:
    """Return the pieces of text in the events of a stream of any face."""
    return re.findall(r'"(?:content|delta|text_output|text)": ?"((?:[^"\\]|\\.)*)"', events)


def test_no_answer_has_anything_of_another_request(live: LiveServer) -> None:
    draw = random.Random(0)
    canaries = [f"{draw.getrandbits(64):016x}" for _ in range(8 * len(FACES))]
    ledger = RequestLedger(live)
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda number: ask(live, number, canaries), range(len(canaries))))
    for number, answer in enumerate(answers):
        if answer:
            assert canaries[number] in answer
        assert not [other for other in canaries if other != canaries[number] and other in answer]
    ends = ledger.ends()
    assert "error" not in ends
    assert sum(ends.values()) <= len(canaries)
    registry = live.server.services.metrics.registry
    labels = {"model": "tiny"}
    assert registry.get_sample_value("genserve_num_preemptions_total", labels) > 0
    assert registry.get_sample_value("genserve_prefix_cache_hits_total", labels) > 0
    wait_until(lambda: registry.get_sample_value("genserve_kv_cache_usage_perc", labels) == 0)
