"""ONNX Runtime GenAI engine: its batching, in this process.

    PYTHON benchmarks/peers/onnxruntime_genai_engine.py FOLDER

with a Python that has onnxruntime-genai, and a folder of its model builder. On a CPU it batches statically,
so that the requests of a batch start and end together. Its continuous batching needs PagedAttention on CUDA.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

import onnxruntime_genai
from closed_loop import answer_standard_input

Flags = onnxruntime_genai.EngineEventFlags

BATCHING = {"engine": {"static_batching": {"max_batch_size": 32}}}


class OnnxRuntimeGenaiEngine:
    """One engine over one model."""

    def __init__(self, folder: str) -> None:
        config = onnxruntime_genai.Config(folder)
        config.overlay(json.dumps(BATCHING))
        model = onnxruntime_genai.Model(config)
        self._tokenizer = onnxruntime_genai.Tokenizer(model)
        self._engine = onnxruntime_genai.Engine(model)
        self._events = self._engine.create_event_buffer(256)
        self._numbers: dict[Any, int] = {}      # the numbers by request object, which events name

    def add(self, number: int, prompt: str, *, new_tokens: int) -> int:
        token_ids = self._tokenizer.encode(prompt)
        request = self._engine.create_request()
        turn = onnxruntime_genai.TurnOptions(request)
        turn.set_do_sample(False)
        turn.set_min_generated_tokens(new_tokens)
        turn.set_max_generated_tokens(new_tokens)
        request.begin_turn(token_ids, turn)
        self._numbers[request] = number
        return len(token_ids)

    def step(self) -> Mapping[int, int]:
        self._events = self._engine.run(self._events)
        arrived: Counter[int] = Counter()
        for event in self._events:
            if event.flags & Flags.TOKEN:
                arrived[self._numbers[event.request]] += 1
            if event.flags & Flags.TURN_FINISHED:
                del self._numbers[event.request]
                event.request.close()
        return arrived


if __name__ == "__main__":
    answer_standard_input(OnnxRuntimeGenaiEngine(sys.argv[1]))
