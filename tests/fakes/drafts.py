"""Proposers that know the answer, and err at a given rate."""

from __future__ import annotations

import random
from collections.abc import Sequence

from genserve.engine.engine_request import Request
from genserve.engine.speculation import Proposer
from genserve.engine.token_sequence import TokenSequence
from tests.fakes.logits import VOCAB_SIZE, greedy_answer


class Foreseen(Proposer):
    """Proposes the answers that were given before, to the same prompts."""

    def __init__(self, answered: Sequence[TokenSequence], *, error_rate: float) -> None:
        self._answers = {tuple(s.token_ids[: s.num_prompt_tokens]): s.token_ids for s in answered}
        self._error_rate = error_rate
        self._rng = random.Random(0)

    def propose(self, request: Request, count: int) -> Sequence[int]:
        length = len(request.token_ids)
        answer = self._answers[tuple(request.token_ids[: request.num_prompt_tokens])]
        return [i ^ (self._rng.random() < self._error_rate) for i in answer[length : length + count]]

    def drop(self, request: Request) -> None:
        pass


class Oracle(Proposer):
    """Proposes the greedy answers of `PagedLogits`."""

    def __init__(self, *, error_rate: float = 0.0, seed: int = 0) -> None:
        self._error_rate = error_rate
        self._rng = random.Random(seed)
        self.dropped: list[Request] = []

    def propose(self, request: Request, count: int) -> Sequence[int]:
        right = greedy_answer(request.token_ids, num_tokens=self._rng.randint(0, count))
        wrong = [self._rng.random() < self._error_rate for _ in right]
        return [(i + 1) % VOCAB_SIZE if errs else i for i, errs in zip(right, wrong, strict=True)]

    def drop(self, request: Request) -> None:
        self.dropped.append(request)
