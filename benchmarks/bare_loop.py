"""Bare loop: the forward passes of one batch and nothing else, the ceiling of what a server can reach.

The logits stage by itself, on the device that its config names: one prefill of all rows, then one call per
token with a constant token fed back. No sampling, no text, no network, no scheduling.

    python benchmarks/bare_loop.py --repository model_repository --model smollm2 --rows 32

prints one JSON object, with the fields of `load.Measured` that it has.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from genserve.repository.index import scan
from genserve.repository.logits_placement import logits_placement
from genserve.repository.logits_runtime import LoadedLogits, load_logits

__all__ = ["BareLoop", "bare_forward_loop", "model_path", "open_session"]

TOKEN_ID = 5  # any will do: its value does not change the cost
CACHE_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int8)": np.int8}


def bare_forward_loop(
    repository: Path, model: str, *, rows: int, prompt_tokens: int, new_tokens: int
) -> float:
    """Seconds for so many tokens of each row, the prefill included."""
    stage = scan([repository])[f"{model}_logits"]
    logits = load_logits(stage, placement=logits_placement(stage))
    work = {"rows": rows, "prompt_tokens": prompt_tokens}
    _run(logits, **work, new_tokens=3)  # the first runs pay for memory and weight layout
    started_s = time.perf_counter()
    _run(logits, **work, new_tokens=new_tokens)
    return time.perf_counter() - started_s


def _run(logits: LoadedLogits, *, rows: int, prompt_tokens: int, new_tokens: int) -> None:
    logits.prefill([[TOKEN_ID] * prompt_tokens] * rows, first_slot=0, past=0)
    token_ids = np.full(rows, TOKEN_ID)
    for past in range(prompt_tokens, prompt_tokens + new_tokens - 1):  # the prefill gave the first token
        logits.decode(token_ids, np.full(rows, past))


class BareLoop:
    """The graph alone, on the CPU, with a KV cache for `rows` token sequences, in place: past is present."""

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
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    options.add_session_config_entry("session.intra_op.spin_duration_us", "200")
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(profile)
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repository", type=Path, default=Path("model_repository"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    options = parser.parse_args()
    elapsed_s = bare_forward_loop(**vars(options))
    new_tokens = [options.new_tokens] * options.rows
    print(json.dumps({"elapsed_s": elapsed_s, "new_tokens": new_tokens, "first_text_s": [], "gaps_s": []}))


if __name__ == "__main__":
    main()
