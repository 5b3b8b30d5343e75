"""Graph steps: decode steps of an exported graph and nothing around them, on the CPU."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from genserve.backends.onnx_session import SPIN_US, exact_products, num_cores

__all__ = ["GraphSteps", "model_path", "open_session"]

TOKEN_ID = 5  # any will do: its value does not change the cost
CACHE_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int8)": np.int8}


class GraphSteps:
    """A graph with a KV cache for `rows` token sequences, in place: past is present."""

    def __init__(self, session: Any, *, rows: int, max_length: int) -> None:
        self._session, self._rows = session, rows
        inputs = {i.name: i for i in session.get_inputs()}
        past = [name for name in inputs if name.startswith("past_key_values.")]
        _, kv_heads, _, head_dim = inputs[past[0]].shape
        shape = (rows, kv_heads, max_length, head_dim)
        # Written, unlike those of np.zeros, whose pages would all be one until something is written to them.
        self._cache = {name: np.full(shape, 0, dtype=CACHE_TYPES[inputs[name].type]) for name in past}
        [vocab_size] = (o.shape[-1] for o in session.get_outputs() if o.name == "logits")
        self._logits = np.empty((rows, vocab_size), dtype=np.float32)

    def decode(self, *, past: int, steps: int) -> list[float]:
        """One token of each row, `steps` times, after `past` tokens; the seconds of each step."""
        decode = self._inputs()
        binding = self._bind(decode)
        times_s = [time.perf_counter()]
        for length in range(past, past + steps):
            decode["seqlens_k"][:] = length
            decode["total_len"][()] = length + 1
            self._session.run_with_iobinding(binding)
            times_s.append(time.perf_counter())
        return [after - before for before, after in pairwise(times_s)]

    def _inputs(self) -> dict[str, NDArray[Any]]:
        """The graph's inputs for one token of every row; `decode` says after how many."""
        return {
            "input_ids": np.full((self._rows, 1), TOKEN_ID, dtype=np.int64),
            "seqlens_k": np.zeros(self._rows, dtype=np.int32),
            "total_len": np.zeros((), dtype=np.int32),
            "rows": np.arange(self._rows, dtype=np.int64),
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
    """A session with the server's options; it writes what its operators take into files named `profile`..."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_cores()
    options.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_US))
    for key, value in exact_products().items():
        options.add_session_config_entry(key, value)
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(profile)
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
