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
    from genserve.generation.engine_request import TokenSequence
    from genserve.generation.request_inbox import RequestOutput


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
        self._numbers: dict[TokenSequence, int] = {}
        self._delivered: SimpleQueue[Sequence[RequestOutput]] = SimpleQueue()

    def add(self, number: int, prompt: str, *, new_tokens: int) -> int:
        params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        sequence = self._model.prepare(prompt, params)
        self._numbers[sequence] = number
        self._model.engine.submit(sequence, sink=self)
        return sequence.num_prompt_tokens

    def deliver(self, outputs: Sequence[RequestOutput]) -> None:
        """Receive outputs from the engine's thread."""
        self._delivered.put(outputs)

    def step(self) -> Mapping[int, int]:
        arrived: Counter[int] = Counter()
        for sequence, content in self._delivered.get():
            if isinstance(content, Exception):
                raise content
            arrived[self._numbers[sequence]] += len(content.token_ids)
            if content.finish_reason is not None:
                del self._numbers[sequence]
        return arrived

    def close(self) -> None:
        self._repository.close()


if __name__ == "__main__":
    engine = GenserveEngine(sys.argv[1])
    answer_standard_input(engine)
    engine.close()
