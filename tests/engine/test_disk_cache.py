from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from numpy.typing import NDArray

from genserve.completion import join_deltas
from genserve.engine.admission_control import QueueLimits
from genserve.engine.block_files import file_bytes, trim
from genserve.engine.delta_streams import DeltaStream
from genserve.engine.disk_cache import DiskCache
from genserve.engine.engine import Engine
from genserve.engine.engine_thread import EngineThread
from genserve.engine.speculation import Speculation
from genserve.errors import Closed, Overloaded
from genserve.generation_metrics import Metrics
from tests.fakes.drafts import Oracle
from tests.fakes.engines import GatedLogits
from tests.fakes.logits import PagedLogits, greedy_answer
from tests.fakes.sequences import made_sequences, request_of, sample_loop, sequence_of
from tests.fakes.states import RecurrentLogits
from tests.support.live_server import wait_until

PROMPT = [*range(1, 22)]  # five full blocks of four, and a token


class Server:
    """An engine thread whose blocks are in files, from its start to its end; a context manager."""

    def __init__(
        self,
        folder: Path | None,
        *,
        model: PagedLogits | None = None,
        shipped: Sequence[Path] = (),
        fingerprint: str = "f" * 32,
        max_bytes: int = 1 << 20,
        metrics: Metrics | None = None,
        speculation: Speculation | None = None,
        max_queue_tokens: int | None = None,
    ) -> None:
        self.model = model or PagedLogits()
        self.metrics = metrics or Metrics()
        self.disk_cache = DiskCache(
            self.model,
            name="test",
            block_size=self.model.block_size,
            fingerprint=fingerprint,
            metrics=self.metrics.for_model("test"),
            folder=folder,
            max_bytes=max_bytes,
            shipped=shipped,
        )
        self._engine = Engine(
            self.model, decode=sample_loop, disk_cache=self.disk_cache, speculation=speculation
        )
        self.engine = EngineThread(
            self._engine,
            name="test",
            max_num_seqs=self.model.max_num_seqs,
            limits=QueueLimits(max_requests=100, max_tokens=max_queue_tokens),
            metrics=self.metrics.for_model("test"),
            sequences_of=made_sequences,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_raised):
        self.engine.close()
        self._engine.check_integrity()

    def answer(self, prompt: Sequence[int], *, max_tokens: int = 1, **params) -> int:
        """Check the answer to a prompt, and return how many of its tokens were computed."""
        self.model.forwards.clear()
        sequence = sequence_of(prompt, max_tokens=max_tokens, **params)
        with DeltaStream(self.engine, sequence.request) as stream:
            assert list(join_deltas(stream).token_ids) == greedy_answer(prompt, num_tokens=max_tokens)
        return sum(map(sum, self.model.forwards)) - max_tokens + 1

    def count(self, metric: str) -> float:
        return self.metrics.registry.get_sample_value(f"genserve_{metric}_total", {"model": "test"})


def size_of(folder: Path) -> int:
    size = 0
    for path in folder.rglob("*.kv"):
        with suppress(FileNotFoundError):  # deleted meanwhile
            size += path.stat().st_size
    return size


def num_blocks(folder: Path, *, block_bytes: int = 64) -> int:
    """How many blocks of a size are in files."""
    heads = [struct.unpack("<8sIIQ", path.read_bytes()[:24]) for path in folder.rglob("*.kv")]
    return sum(count for _, _, count, size in heads if size == block_bytes)


def damage(folder: Path) -> list[Path]:
    """Change a byte of each file."""
    paths = list(folder.rglob("*.kv"))
    for path in paths:
        written = bytearray(path.read_bytes())
        written[-1] ^= 1
        path.write_bytes(written)
    return paths


def test_after_a_restart_only_the_rest_of_a_prompt_is_computed(tmp_path):
    with Server(tmp_path) as server:
        assert server.answer(PROMPT) == 21
        assert server.answer(PROMPT) == 1  # by the cache in memory
        assert server.count("external_prefix_cache_hits") == 0
    with Server(tmp_path) as server:
        assert server.answer(PROMPT) == 1
        assert server.count("external_prefix_cache_queries") == 20
        assert server.count("external_prefix_cache_hits") == 20
        assert server.count("prefix_cache_hits") == 20
        assert server.count("prefix_cache_disk_read_bytes") == 5 * server.model.block_bytes
        assert server.answer([*PROMPT[:10], 50, 51, 52]) == 5


def test_a_model_with_states_continues_where_a_state_is_stored(tmp_path):
    prompt = [*range(1, 41)]
    with Server(tmp_path, model=RecurrentLogits()) as server:
        assert server.answer(prompt) == 40
        server.answer([*prompt[:24], *range(50, 60)])  # keeps a state where both begin
    with Server(tmp_path, model=RecurrentLogits()) as server:
        assert server.answer(prompt) == 4, "the state at the last border before the prompt's end"
        assert server.answer([*prompt[:36], 1, 2]) == 2
        assert server.answer([*prompt[:28], 1, 2]) == 6
        assert server.answer([*prompt[:23], 1, 2]) == 25
    for path in tmp_path.rglob("*.kv"):
        if path.read_bytes()[16] == 8:  # the size of a state
            path.unlink()
    assert num_blocks(tmp_path) > 0
    with Server(tmp_path, model=RecurrentLogits()) as server:
        assert server.answer(prompt) == 40, "blocks without a state are of no use"


def test_a_state_comes_back_for_blocks_that_stayed_in_memory(tmp_path):
    model = RecurrentLogits(max_num_seqs=1, num_state_slots=2)
    with Server(tmp_path, model=model) as server:
        server.answer([*range(1, 34)])
        server.answer([60, 61])  # whose states take both slots
        wait_until(lambda: num_blocks(tmp_path, block_bytes=8) > 0)
        assert server.answer([*range(1, 34)]) == 1


def test_the_blocks_of_answers_are_stored_too(tmp_path):
    with Server(tmp_path) as server:
        server.answer(PROMPT, max_tokens=12)
    with Server(tmp_path) as server:
        assert server.answer([*PROMPT, *greedy_answer(PROMPT, num_tokens=12), 7]) == 2


def test_blocks_that_are_in_files_are_not_written_again(tmp_path):
    with Server(tmp_path) as server:
        server.answer(PROMPT)
    with Server(tmp_path) as server:
        server.answer(PROMPT)
    assert server.count("prefix_cache_disk_written_bytes") == 0


def test_two_servers_share_a_folder(tmp_path):
    with Server(tmp_path) as one, Server(tmp_path) as other:
        for number in range(8):
            one.answer([*PROMPT[: 4 * (number % 3)], number + 30, *PROMPT])
            other.answer([*PROMPT[: 4 * (number % 3)], number + 30, *PROMPT])
    with Server(tmp_path) as server:
        assert server.answer([36, *PROMPT]) == 2


def test_requests_with_another_salt_read_other_blocks(tmp_path):
    with Server(tmp_path) as server:
        server.answer(PROMPT, cache_salt="a")
    with Server(tmp_path) as server:
        assert server.answer(PROMPT) == 21
        assert server.answer(PROMPT, cache_salt="b") == 21
        assert server.answer(PROMPT, cache_salt="a") == 1


def test_another_fingerprint_reads_nothing(tmp_path):
    with Server(tmp_path) as server:
        server.answer(PROMPT)
    with Server(tmp_path, fingerprint="e" * 32) as server:
        assert server.answer(PROMPT) == 21


def test_a_prompt_that_is_scored_is_computed(tmp_path):
    with Server(tmp_path) as server:
        server.answer(PROMPT)
    with Server(tmp_path) as server:
        assert server.answer(PROMPT, prompt_logprobs=1) == 21


def test_damaged_blocks_are_computed_and_written_again(tmp_path, caplog):
    with Server(tmp_path) as server:
        server.answer(PROMPT)
    assert len(damage(tmp_path)) == 1
    with Server(tmp_path) as server:
        assert server.answer(PROMPT) == 21
    assert caplog.text.count("is damaged, and its tokens are computed again") == 1
    with Server(tmp_path) as server:
        assert server.answer(PROMPT) == 1


def test_shipped_blocks_are_read_and_nothing_is_written(tmp_path):
    with Server(tmp_path) as server:
        server.answer(PROMPT)
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    with Server(None, shipped=[tmp_path]) as server:
        assert server.answer(PROMPT) == 1
        server.answer([9, *PROMPT])
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before


def test_damaged_shipped_blocks_are_told_once_and_stay(tmp_path, caplog):
    with Server(tmp_path / "shipped") as server:
        server.answer(PROMPT)
    paths = damage(tmp_path / "shipped")
    with Server(tmp_path / "own", shipped=[tmp_path / "shipped"]) as server:
        assert server.answer(PROMPT) == 21
        server.disk_cache.close()
    with Server(None, shipped=[tmp_path / "shipped"]) as server:
        for first in (30, 31, 32):
            server.answer(PROMPT)
            server.answer([first] * 60)  # which evicts the prompt
    assert all(path.exists() for path in paths)
    assert caplog.text.count("is damaged") == 2  # once by each server
    with Server(tmp_path / "own", shipped=[tmp_path / "shipped"]) as server:
        assert server.answer(PROMPT) == 1


def test_the_limit_of_the_folder_holds(tmp_path):
    num_bytes = 256 << 10
    with Server(tmp_path, max_bytes=num_bytes) as server:
        for number in range(40):
            server.answer([number, *PROMPT])
    assert num_bytes / 2 < size_of(tmp_path) <= num_bytes
    with Server(tmp_path, max_bytes=num_bytes) as server:
        assert server.answer([39, *PROMPT]) == 2
        assert server.answer([0, *PROMPT]) == 22


def test_the_limit_holds_for_several_models(tmp_path):
    num_bytes, sizes = 512 << 10, []
    with ExitStack() as running:
        servers = [
            running.enter_context(Server(tmp_path, fingerprint=name * 32, max_bytes=num_bytes))
            for name in "abcd"
        ]
        for number in range(40):
            for server in servers:
                server.answer([number, *PROMPT])
            sizes.append(size_of(tmp_path))
    assert num_bytes / 2 < max(sizes) <= num_bytes


def test_a_prompt_that_is_used_again_is_deleted_last_and_from_its_end(tmp_path):
    with Server(tmp_path, max_bytes=272 << 10) as server:
        server.answer(PROMPT)
        for number in range(10):
            server.answer([30 + number, *PROMPT])
        server.answer(PROMPT)  # from memory
    trim(tmp_path, max_bytes=2 * file_bytes(2, 64))  # of three files that have the prompt
    with Server(tmp_path, max_bytes=272 << 10) as server:
        assert server.answer(PROMPT) == len(PROMPT) - 4 * 4


def test_the_states_of_a_prompt_that_is_used_again_are_deleted_last(tmp_path):
    with Server(tmp_path, model=RecurrentLogits()) as server:
        server.answer(PROMPT)
        for number in range(10):
            server.answer([30 + number, *PROMPT])
        server.answer(PROMPT)  # from memory
    trim(tmp_path, max_bytes=file_bytes(5, 64) + file_bytes(1, 8))
    with Server(tmp_path, model=RecurrentLogits()) as server:
        assert server.answer(PROMPT) == 1


def test_a_limit_without_room_for_a_block_is_told_once(tmp_path, caplog):
    with Server(tmp_path, max_bytes=200) as server:
        server.answer(PROMPT)
        server.answer([9, *PROMPT])
    assert [r.getMessage() for r in caplog.records if "any more" in r.getMessage()] == [
        f"the prefix cache of model test is not written to {tmp_path} any more, until it is loaded again: "
        "200 bytes are too few for its blocks, at least 66560"
    ]


def test_a_folder_that_cannot_be_written_is_told_and_stops_nothing(tmp_path, caplog):
    folder = tmp_path / "file"
    folder.write_text("")
    with Server(folder) as server:
        assert server.answer(PROMPT) == 21
        assert server.answer(PROMPT, max_tokens=9) == 1
    assert f"is not written to {folder} any more, until it is loaded again: File exists" in caplog.text


def test_writing_ends_with_any_error_and_keeps_nothing(tmp_path, monkeypatch, caplog):
    def write(*_: object) -> int:
        raise MemoryError

    monkeypatch.setattr("genserve.engine.disk_cache.BlockFiles.write", write)
    with Server(tmp_path) as server:
        server.answer(PROMPT)
    assert not server.disk_cache.writes
    assert caplog.text.count("until it is loaded again: MemoryError()") == 1


def test_a_disk_that_is_too_slow_is_spared(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("genserve.engine.disk_cache._MAX_UNWRITTEN_BYTES", 2 * 64)
    with Server(tmp_path) as server:
        server.answer(PROMPT)  # five blocks at once
        server.answer(PROMPT[::-1])
        server.answer([9, 8, 7, 6, 5])
    assert 2 <= num_blocks(tmp_path) <= 5, "of many blocks those that may wait are written"
    assert caplog.text.count("the disk is slower than model test") == 1


def test_copies_that_wait_for_the_disk_take_little_more_than_their_size(tmp_path, monkeypatch):
    sizes = []

    class Memory(PagedLogits):
        def read_blocks(self, block_ids: Sequence[int], rows: NDArray[np.uint8]) -> None:
            sizes.append(rows.base.nbytes)
            super().read_blocks(block_ids, rows)

    gate = threading.Event()
    monkeypatch.setattr("genserve.engine.disk_cache.BlockFiles.write", lambda *_: gate.wait() - 1)
    with Server(tmp_path, model=Memory()) as server:
        for first in range(30, 60):
            server.answer([first, 2, 3, 4, 5])
        gate.set()
    assert len(sizes) >= 20
    assert max(sizes[4:]) == 4096, "the memory of a part is for the first ones"


def test_a_long_prompt_is_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("genserve.engine.disk_cache._PART_BYTES", 2 * 64)
    with Server(tmp_path) as server:
        server.answer(PROMPT)
    with Server(tmp_path) as server:
        assert server.answer(PROMPT) == 1


def test_all_choices_read_a_prompt_once(tmp_path):
    with Server(tmp_path) as server:
        server.answer(PROMPT)
    with Server(tmp_path) as server:
        sequences = [sequence_of(PROMPT, max_tokens=2) for _ in range(3)]
        with DeltaStream(server.engine, request_of(*sequences)) as stream:
            assert {delta.choice for delta in stream} == {0, 1, 2}
        assert server.count("external_prefix_cache_hits") == 20
        assert all(sequence.num_cached_tokens == 20 for sequence in sequences)


def test_closing_ends_who_waits_for_the_engine_to_take_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("genserve.engine.disk_cache._PART_BYTES", 64)
    monkeypatch.setattr("genserve.engine.input_queue._MAX_STORED", 1)
    with Server(tmp_path) as server:
        server.answer(PROMPT)
    model = GatedLogits(max_num_seqs=2)
    server = Server(tmp_path, model=model)
    running = DeltaStream(server.engine, sequence_of([60], max_tokens=9).request)
    next(running)  # its next step waits for the gate
    errors = []

    def submit() -> None:
        try:
            DeltaStream(server.engine, sequence_of(PROMPT).request)
        except Closed as error:
            errors.append(error)

    submitting = threading.Thread(target=submit)
    submitting.start()
    closing = threading.Thread(target=server.engine.close)
    closing.start()
    submitting.join()
    model.open_gate()
    closing.join()
    assert len(errors) == 1


def test_a_rejected_prompt_is_not_read(tmp_path):
    with Server(tmp_path) as server:
        server.answer(PROMPT)
    model = GatedLogits(max_num_seqs=1)
    with Server(tmp_path, model=model, max_queue_tokens=20) as server:
        running = DeltaStream(server.engine, sequence_of([60], max_tokens=9).request)
        next(running)  # its next step waits for the gate
        DeltaStream(server.engine, sequence_of([61], max_tokens=1).request)  # waits
        try:
            with pytest.raises(Overloaded):
                DeltaStream(server.engine, sequence_of(PROMPT).request)
            assert server.count("external_prefix_cache_queries") == 0
        finally:
            model.open_gate()


@given(
    prompts=st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=20), st.integers(1, 12)),
        min_size=1,
        max_size=12,
    ),
    num_blocks=st.integers(8, 16),
    num_servers=st.integers(1, 3),
    drafts=st.booleans(),
    states=st.booleans(),
)
def test_answers_are_those_of_a_server_without_files(
    tmp_path_factory, prompts, num_blocks, num_servers, drafts, states
):
    folder = tmp_path_factory.mktemp("blocks")
    for _ in range(num_servers):
        model_class = RecurrentLogits if states else PagedLogits
        model = model_class(max_length=32, num_blocks=num_blocks)
        speculation = Speculation(Oracle(error_rate=0.2)) if drafts else None
        with Server(folder, model=model, max_bytes=72 << 10, speculation=speculation) as server:
            streams = [
                (
                    prompt,
                    num_tokens,
                    DeltaStream(server.engine, sequence_of(prompt, max_tokens=num_tokens).request),
                )
                for prompt, num_tokens in prompts
            ]
            for prompt, num_tokens, stream in streams:
                with stream:
                    assert list(join_deltas(stream).token_ids) == greedy_answer(prompt, num_tokens=num_tokens)
