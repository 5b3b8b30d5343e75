"""Bystanders: greedy streams that run beside tests without pause, and are compared with their solo runs."""

from __future__ import annotations

import asyncio
import re
import threading

from tests.support.live_server import request_bytes, wait_until

# Shorter than a block of the KV cache, so that no answer counts cached tokens.
_PROMPTS = ("the night", "a stone")
# Its last digits depend on what else is in the batch.
_VARYING = re.compile(rb'"logprob": [-.e0-9]+, |, "timings": \{[^}]*\}')
_FIELDS = {"ignore_eos": True, "max_new_tokens": 50}


class Bystanders:
    """Streams of `/generate_stream`; each prompt is sent again as soon as its answer ends."""

    def __init__(self, address: tuple[str, int]) -> None:
        """Run each stream alone, for comparison."""
        self._address = address
        self._alone: dict[str, bytes] = {}
        self._num_events = 0
        self._failure = ""
        self._stopping = False
        asyncio.run(self._run_alone())

    @property
    def num_streams(self) -> int:
        return len(_PROMPTS)

    def start(self) -> None:
        """Run all streams together, on a thread."""
        self._stopping = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run_together()))
        self._thread.start()

    def check(self) -> None:
        """Wait until the streams go on; raises AssertionError if one did not or was not as alone."""
        enough = self._num_events + self.num_streams
        wait_until(lambda: self._failure or self._num_events > enough)
        assert not self._failure, self._failure

    def stop(self) -> None:
        """Let each stream end; raises AssertionError if one was not as alone."""
        self._stopping = True
        self._thread.join()
        assert not self._failure, self._failure

    async def _run_alone(self) -> None:
        for prompt in _PROMPTS:
            self._alone[prompt] = await self._stream(prompt)

    async def _run_together(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for prompt in _PROMPTS:
                    group.create_task(self._repeat(prompt))
        except* Exception as errors:
            self._failure = f"streams failed: {errors.exceptions}"

    async def _repeat(self, prompt: str) -> None:
        while not self._stopping:
            events = await self._stream(prompt)
            assert events == self._alone[prompt], f"the stream of {prompt!r} ended early"

    async def _stream(self, prompt: str) -> bytes:
        """Return the events of one answer; raises AssertionError where they differ from its solo run."""
        reader, writer = await asyncio.open_connection(*self._address)
        try:
            body = {"inputs": prompt, "parameters": _FIELDS}
            writer.write(request_bytes("/generate_stream", body))
            head = await reader.readuntil(b"\r\n\r\n")
            assert b" 200 " in head, head
            events = b""
            while size := int(await reader.readline(), 16):
                events += _VARYING.sub(b"", await reader.readexactly(size + 2))[:-2]
                self._num_events += 1
                alone = self._alone.get(prompt, events)
                assert alone.startswith(events), f"the stream of {prompt!r} has {events[-500:]!r}"
            return events
        finally:
            writer.close()
            await writer.wait_closed()
