"""Servers that are killed while they write the prefix cache on disk, two at a time on one folder."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from genserve.completion import join_deltas
from genserve.engine.delta_streams import DeltaStream
from genserve.engine.disk_cache import PrefixCacheFolder
from genserve.repository.options import RepositoryOptions
from genserve.repository.repository import Repository
from genserve.sampling.sampling_params import SamplingParams

NUM_PROMPTS = 24
# Of all prompts' blocks about half fit, so that blocks are deleted too.
FOLDER_BYTES = 1 << 20


def prompt(number: int) -> list[int]:
    """A prompt that has its beginning in common with some of the others."""
    ids: list[int] = []
    for depth, length in enumerate((40, 60, 90)):
        rng = Random(f"{depth} {number % (2, 6, NUM_PROMPTS)[depth]}")
        ids += [rng.randrange(3, 300) for _ in range(length)]
    return ids


@contextmanager
def model(repository: Path, folder: PrefixCacheFolder | None) -> Iterator[Repository]:
    served = Repository([repository], options=RepositoryOptions(prefix_cache_folder=folder))
    served.start(["tiny"])
    try:
        yield served
    finally:
        served.close()


def answer(served: Repository, number: int) -> list[float]:
    """The answer to a prompt and its log-probabilities, to the bit."""
    text_model = served.text_model("tiny")
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=True, ignore_eos=True)
    with DeltaStream(text_model.engine, text_model.prepare(prompt(number), params)) as stream:
        joined = join_deltas(stream)
    return [*joined.token_ids, *joined.logprobs, joined.usage.cached_tokens]


def serve_until_killed(repository: str, folder: str, seed: str) -> None:
    """Answer prompts in random order, on a disk that takes half of each file at a time."""
    import os
    import time

    writev = os.writev

    def write_half(descriptor: int, parts: Sequence[memoryview]) -> int:
        content = b"".join(parts)
        size = writev(descriptor, [content[: max(len(content) // 2, 1024)]])
        time.sleep(0.001)
        return size

    os.writev = write_half  # type: ignore[assignment]
    rng = Random(seed)
    path = PrefixCacheFolder(path=Path(folder), max_bytes=FOLDER_BYTES)
    with model(Path(repository), path) as served:
        while True:
            number = rng.randrange(NUM_PROMPTS)
            print(json.dumps([number, answer(served, number)]), flush=True)


class KilledServer:
    """A process that answers until it is killed."""

    def __init__(self, repository: Path, folder: Path, *, seed: int) -> None:
        command = [sys.executable, "-m", "tests.textmodel.test_killed_writers"]
        words = [*command, str(repository), str(folder), str(seed)]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def check_answers(self, expected: Sequence[Sequence[float]], *, num_answers: int) -> int:
        """Check answers until it is killed after `num_answers`; return how many tokens came from files."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        num_cached = 0
        for count, line in enumerate(self.process.stdout):
            number, got = json.loads(line)
            assert got[:-1] == expected[number][:-1], f"another answer to prompt {number}"
            num_cached += got[-1] if not count else 0  # later answers find blocks in memory too
            if count + 1 == num_answers:
                self.process.kill()
        self.process.wait()
        assert self.process.returncode == -9, self.process.stderr.read()
        self.process.stdout.close()
        self.process.stderr.close()
        return num_cached


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "num_kills",
    [pytest.param(20, marks=pytest.mark.extended), pytest.param(200, marks=pytest.mark.slow)],
)
def test_servers_killed_while_they_write_leave_no_wrong_answer(tiny_repository, tmp_path, num_kills):
    with model(tiny_repository, None) as served:
        expected = [answer(served, number) for number in range(NUM_PROMPTS)]
    rng, num_cached, num_unfinished = Random(0), 0, 0
    for number in range(0, num_kills, 2):
        servers = [KilledServer(tiny_repository, tmp_path, seed=number + each) for each in range(2)]
        try:
            for server in servers:
                num_cached += server.check_answers(expected, num_answers=rng.randint(1, 12))
        finally:
            for server in servers:
                server.process.kill()
        num_unfinished = sum(path.name.startswith(".") for path in tmp_path.rglob("*.*"))
    assert num_unfinished > num_kills / 10, "nothing was killed while it wrote"
    assert num_cached > 20 * num_kills, "nothing was read from files"
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.kv")) <= FOLDER_BYTES * 9 / 8


if __name__ == "__main__":
    serve_until_killed(*sys.argv[1:])
