"""Genserve engine: the engine of `genserve serve` without its server, in this process.

    python benchmarks/peers/genserve_engine.py MODEL_REPOSITORY
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from closed_loop import answer_standard_input

from genserve.repository.repository import Repository
from genserve.sampling.sampling_params import SamplingParams

if TYPE_CHECKING:
    from genserve.engine.generation_request import GenerationOutput, GenerationRequest


class GenserveEngine:
    """The one text model of a repository."""

    def __init__(self, model_repository: str) -> None:
        repository = Repository([Path(model_repository)])
        name = repository.only_text_model_name()
        repository.start([name])
        for error in repository.errors.values():
            raise error
        self._repository = repository
        self._model = repository.text_model(name)
        self._numbers: dict[GenerationRequest, int] = {}
        self._delivered: SimpleQueue[Sequence[GenerationOutput]] = SimpleQueue()

    def add(self, number: int, prompt: str, *, new_tokens: int) -> int:
        params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        request = self._model.prepare(prompt, params)
        self._numbers[request] = number
        self._model.engine.submit(request, sink=self)
        return request.num_prompt_tokens

    def deliver(self, outputs: Sequence[GenerationOutput]) -> None:
        """Receive outputs from the engine's thread."""
        self._delivered.put(outputs)

    def step(self) -> Mapping[int, int]:
        arrived: Counter[int] = Counter()
        for request, _, content, _ in self._delivered.get():
            if isinstance(content, Exception):
                raise content
            arrived[self._numbers[request]] += len(content.token_ids)
            if content.finish_reason is not None:
                del self._numbers[request]
        return arrived

    def close(self) -> None:
        self._repository.close()


if __name__ == "__main__":
    engine = GenserveEngine(sys.argv[1])
    answer_standard_input(engine)
    engine.close()
