"""ONNX verifier: several tokens of a row in one run, each as a decode of it alone would have run it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from genserve.backends.logits_memory import HostMemory
from genserve.backends.logits_onnx import GraphCall, OnnxLogits, open_logits_session
from genserve.errors import RepositoryError
from genserve.generation.logits_model import FloatArray, TokenArray

__all__ = ["VERIFICATION_FILE", "OnnxVerifier"]

VERIFICATION_FILE = "verification.onnx"     # the exporter writes it beside the graph
_MAX_ROWS = 4   # behind that a decode has so many rows that hardly any draft pays


class OnnxVerifier:
    """Runs the verification graph over the cache of a logits graph; implements `generation.Verifier`.

    On the CPU. It is a session of its own, and holds the weights a second time: ONNX Runtime rearranges
    them for each session anew.

    Attributes:
        num_tokens: see `Verifier.num_tokens`.
        max_rows: see `Verifier.max_rows`.
    """

    def __init__(self, logits: OnnxLogits, path: Path, *, num_threads: int | None = None) -> None:
        """Load the graph that lies beside that of `logits`, and run it once.

        Args:
            logits: whose cache is used and written; on the CPU, with nothing in its slots.
            path: of its graph.
            num_threads: see `OnnxLogits`.

        Raises:
            RepositoryError: there is no such graph, or it cannot be loaded.
        """
        file = path.with_name(VERIFICATION_FILE)
        if not file.is_file():
            raise RepositoryError(
                f"{file} is missing, and speculation is on",
                remedy="export the model again, with --overwrite; or take `speculation` or `draft_model` out "
                "of the config",
            )
        self._session = open_logits_session(file, num_threads=num_threads, providers=HostMemory.providers)
        shapes: dict[str, Any] = {i.name: i.shape for i in self._session.get_inputs()}
        self.num_tokens = int(shapes["input_ids"][1])
        self.max_rows = min(_MAX_ROWS, logits.num_slots)
        self._cache = logits.cache
        self._logits = np.empty((self.max_rows * self.num_tokens, logits.vocab_size), dtype=np.float32)
        self._calls: dict[int, GraphCall] = {}
        # The first run takes many times as long as others, which would look as if no draft paid.
        self.verify(np.zeros((1, self.num_tokens), dtype=np.int64), np.zeros(1, dtype=np.int64))
        self._cache.give_back(0, length=0)

    def verify(self, token_ids: TokenArray, past: TokenArray) -> FloatArray:
        """See `Verifier.verify`."""
        call = self._calls.get(len(token_ids))
        if call is None:
            call = self._calls[len(token_ids)] = self._bind(len(token_ids))
        call.input_ids[:] = token_ids
        call.seqlens_k[:] = past + self.num_tokens - 1
        call.total_len[()] = past.max() + self.num_tokens
        self._session.run_with_iobinding(call.binding)
        return self._logits[: len(call.rows)]

    def _bind(self, num_rows: int) -> GraphCall:
        width = self.num_tokens
        call = GraphCall(self._session, num_rows=num_rows, width=width, num_logits=num_rows * width)
        call.rows[:] = np.arange(len(call.rows))
        for name, slots in self._cache.slots(0, num_slots=num_rows):
            place = _place(slots)
            present = name.replace("past_key_values", "present")
            call.binding.bind_input(name, *place)
            call.binding.bind_output(present, *place)
            for token in range(self.num_tokens - 1):
                call.binding.bind_output(f"{present}.{token}", *place)
        call.binding.bind_output("logits", *_place(self._logits[: len(call.rows)]))
        return call


def _place(buffer: Any) -> tuple[Any, ...]:
    return "cpu", 0, buffer.dtype.type, buffer.shape, buffer.ctypes.data
