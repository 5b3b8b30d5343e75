"""Graph steps: decode steps of an exported graph alone, on the CPU."""

from __future__ import annotations

import math
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from batches import TOKEN_ID
from numpy.typing import NDArray

from genserve.backends.onnx_session import register_kernels, session_options
from genserve.textmodel.runtimes.onnx_logits import cache_dtype

__all__ = ["GraphSteps", "model_path", "open_session"]

BLOCK_SIZE = 16


class GraphSteps:
    """A graph with a KV cache for `rows` sequences, written in place."""

    def __init__(self, session: Any, *, path: Path, rows: int, max_length: int) -> None:
        self._session, self._rows = session, rows
        self._width = math.ceil(max_length / BLOCK_SIZE)
        pasts = [i for i in session.get_inputs() if i.name.startswith("past_key_values.")]
        # np.full writes to the memory. All pages of np.zeros would share one until they are written to.
        self._cache = {
            past.name: np.full(
                (rows * self._width, BLOCK_SIZE, *past.shape[2:]), 0, dtype=cache_dtype(past, path)
            )
            for past in pasts
        }
        [vocab_size] = (o.shape[-1] for o in session.get_outputs() if o.name == "logits")
        self._logits = np.empty((rows, vocab_size), dtype=np.float32)

    def decode(self, *, past: int, steps: int) -> list[float]:
        """Decode one token per row, `steps` times, after `past` tokens; returns the seconds of each step."""
        decode = self._inputs()
        binding = self._bind(decode)
        times_s = [time.perf_counter()]
        for length in range(past, past + steps):
            decode["position_ids"][:] = decode["past_seqlens"][:] = length
            decode["attention_metadata"][1] = length + 1
            self._session.run_with_iobinding(binding)
            times_s.append(time.perf_counter())
        return [after - before for before, after in pairwise(times_s)]

    def _inputs(self) -> dict[str, NDArray[Any]]:
        """The graph's inputs for one token per row; `decode` sets the positions."""
        rows = self._rows
        return {
            "input_ids": np.full(rows, TOKEN_ID, dtype=np.int64),
            "position_ids": np.zeros(rows, dtype=np.int64),
            "cumulative_sequence_length": np.arange(rows + 1, dtype=np.int32),
            "past_seqlens": np.zeros(rows, dtype=np.int32),
            "block_table": np.arange(rows * self._width, dtype=np.int32).reshape(rows, self._width),
            "logits_indices": np.arange(rows, dtype=np.int64),
            "attention_metadata": np.ones(2, dtype=np.int32),
        }

    def _bind(self, inputs: dict[str, NDArray[Any]]) -> Any:
        binding = self._session.io_binding()
        for name, array in (inputs | self._cache).items():
            binding.bind_input(name, *_memory(array))
        for name, array in self._cache.items():
            binding.bind_output(name.replace("past_key_values", "present"), *_memory(array))
        binding.bind_output("logits", *_memory(self._logits))
        return binding


def _memory(array: NDArray[Any]) -> tuple[Any, ...]:
    return "cpu", 0, array.dtype.type, array.shape, array.ctypes.data


def model_path(repository: Path, model: str) -> Path:
    """The graph of the newest version of the model's logits stage."""
    versions = (repository / f"{model}_logits").glob("[1-9]*/model.onnx")
    return max(versions, key=lambda file: int(file.parent.name))


def open_session(path: Path, *, profile: Path | None = None) -> Any:
    """A session with the server's options; with `profile`, it writes a profile to files with this prefix."""
    options = session_options()
    register_kernels(options)
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(profile)
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
