"""ONNX Runtime GenAI engine: its continuous batching, in this process.

    PYTHON benchmarks/peers/onnxruntime_genai_engine.py FOLDER

with a Python that has onnxruntime-genai, and a folder that its model builder made.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import onnxruntime_genai
from closed_loop import answer_standard_input


class OnnxRuntimeGenaiEngine:
    """One engine over one model."""

    def __init__(self, folder: str) -> None:
        self._model = onnxruntime_genai.Model(folder)
        self._tokenizer = onnxruntime_genai.Tokenizer(self._model)
        self._engine = onnxruntime_genai.Engine(self._model)
        self._requests: dict[int, Any] = {}

    def add(self, number: int, prompt: str, *, new_tokens: int) -> int:
        token_ids = self._tokenizer.encode(prompt)
        params = onnxruntime_genai.GeneratorParams(self._model)
        length = len(token_ids) + new_tokens
        # The shortest answer is the longest: the end of sequence is left out.
        params.set_search_options(do_sample=False, min_length=length, max_length=length)
        request = onnxruntime_genai.Request(params)
        request.add_tokens(token_ids)
        self._engine.add_request(request)
        self._requests[number] = request
        return len(token_ids)

    def step(self) -> Mapping[int, int]:
        self._engine.step()
        arrived = {}
        for number, request in list(self._requests.items()):
            count = 0
            while request.has_unseen_tokens():
                request.get_unseen_token()
                count += 1
            if count:
                arrived[number] = count
            if request.is_done():
                self._engine.remove_request(request)
                del self._requests[number]
        return arrived


if __name__ == "__main__":
    answer_standard_input(OnnxRuntimeGenaiEngine(sys.argv[1]))
