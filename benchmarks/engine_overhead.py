"""Engine overhead: the time of a step without the forward, with a model whose forward is free.

    python benchmarks/engine_overhead.py

Prints the median microseconds of a step, for 1 and 32 greedy sequences and for 32 sampled ones.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from genserve.engine.engine import Engine, StepResult
from genserve.engine.logits_model import ForwardBatch
from genserve.engine.token_sequence import TokenSequence
from genserve.sampling.logits_array import FloatArray
from genserve.sampling.sampling_params import SamplingParams

NUM_STEPS = 400
MAX_LENGTH = 1024
VOCAB_SIZE = 49_152
GREEDY = SamplingParams(max_tokens=2 * NUM_STEPS)
SAMPLED = replace(GREEDY, temperature=0.8, top_k=50, top_p=0.95)


class FreeModel:
    """Implements `LogitsModel` with constant rows."""

    max_num_seqs = 32
    max_length = MAX_LENGTH
    vocab_size = VOCAB_SIZE
    block_size = 16
    num_blocks = 32 * MAX_LENGTH // 16
    num_state_slots = 0

    def __init__(self) -> None:
        rows = np.random.default_rng(0).standard_normal((self.max_num_seqs, self.vocab_size))
        self._rows: FloatArray = (rows * 3).astype(np.float32)

    def forward(self, batch: ForwardBatch) -> FloatArray:
        return self._rows[: len(batch.logits_indices)]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Do nothing, because the blocks are empty."""


class NoText:
    """Implements `AnswerText` without any work."""

    stop = None

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


async def decode(sequence: TokenSequence) -> None:
    while not sequence.finished:
        sequence.append(await sequence.sample())


def _step(engine: Engine) -> StepResult:
    result = engine.step()
    assert result is not None
    return result


def step_microseconds(num_sequences: int, params: SamplingParams) -> float:
    """Return the median time of a step in which each sequence gets a token."""
    engine = Engine(FreeModel(), decode=decode)
    for seed in range(num_sequences):
        engine.add(
            TokenSequence(
                range(seed, seed + 64),
                params=params,
                seed=seed,
                eos_token_ids=frozenset(),
                text=NoText(),
                max_length=MAX_LENGTH,
                vocab_size=VOCAB_SIZE,
            )
        )
    while len(_step(engine).advanced) < num_sequences:      # until all prompts are computed
        pass
    times = []
    for _ in range(NUM_STEPS):
        started = time.perf_counter()
        _step(engine)
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


def main() -> int:
    cases = [("1 greedy", 1, GREEDY), ("32 greedy", 32, GREEDY), ("32 sampled", 32, SAMPLED)]
    for name, count, params in cases:
        print(f"{name:12} {step_microseconds(count, params):8.0f} us a step")
    return 0


if __name__ == "__main__":
    sys.exit(main())
