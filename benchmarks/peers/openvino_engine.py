"""OpenVINO engine: the continuous batching of OpenVINO GenAI, in this process.

    PYTHON benchmarks/peers/openvino_engine.py FOLDER

with a Python that has openvino-genai, and a folder of `optimum-cli export openvino`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import openvino_genai
from closed_loop import answer_standard_input

CACHE_GB = 2


class OpenVinoEngine:
    """A pipeline with prefix caching; a step may prefill some requests and decode others."""

    def __init__(self, folder: str) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.enable_prefix_caching = True
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU")
        self._tokenizer = self._pipeline.get_tokenizer()
        self._answers: dict[int, Any] = {}

    def add(self, number: int, prompt: str, *, new_tokens: int) -> int:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = new_tokens
        config.ignore_eos = True
        config.do_sample = False
        input_ids = self._tokenizer.encode(prompt).input_ids
        self._answers[number] = self._pipeline.add_request(number, input_ids, config)
        return int(input_ids.shape[1])

    def step(self) -> Mapping[int, int]:
        self._pipeline.step()
        arrived = {}
        for number, answer in list(self._answers.items()):
            if answer.can_read():
                arrived[number] = sum(len(output.generated_ids) for output in answer.read().values())
            if answer.get_status() != openvino_genai.GenerationStatus.RUNNING and not answer.can_read():
                del self._answers[number]
        return arrived


if __name__ == "__main__":
    answer_standard_input(OpenVinoEngine(sys.argv[1]))
