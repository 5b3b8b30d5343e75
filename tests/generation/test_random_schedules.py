"""Random schedules of arrivals, searches, departures and loops, over caches that are too small for them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from genserve.completion import TokenLogprob
from genserve.generation.beam_search import BeamSearch
from genserve.generation.engine import Engine
from genserve.generation.engine_request import LogitsRequest, TokenSequence
from genserve.generation.logits_model import ForwardBatch
from genserve.generation.output_processor import DecodeFunction
from genserve.generation.speculation import Speculation
from genserve.sampling.batch_sampler import sample
from genserve.sampling.logits_array import FloatArray
from genserve.sampling.sampler import token_logprob
from tests.fakes.drafts import Oracle
from tests.fakes.logits import VOCAB_SIZE, PagedLogits, logits_after
from tests.fakes.sequences import Clock, logits_request, sample_loop, sequence_of
from tests.generation.test_beam_search import alone, answers_of, search_of

NUM_SCHEDULES = 500
MAX_LENGTH = 96
SALTS = (None, None, "a", "b")


async def in_threes(sequence: TokenSequence) -> None:
    """Appends two fixed tokens after each sampled one."""
    while not sequence.finished:
        sequence.append(await sequence.sample())
        for token_id in (1, 2):
            if not sequence.finished:
                sequence.append(token_id)


def plain_answer(sequence: TokenSequence, *, decode: DecodeFunction, **params: Any) -> list[int]:
    """The answer of a plain loop without an engine, up to the length of the sequence."""
    prompt = sequence.token_ids[: sequence.num_prompt_tokens]
    plain = sequence_of(prompt, max_length=MAX_LENGTH, **params)
    while not plain.finished:
        [picked] = sample(logits_after(plain.token_ids)[None].copy(), [plain])
        plain.append(picked.token_id)
        for token_id in (1, 2) if decode is in_threes else ():
            if not plain.finished:
                plain.append(token_id)
    return plain.token_ids


class TimedLogits(PagedLogits):
    """A forward takes 5 ms and 0.3 ms for each token."""

    def __init__(self, clock: Clock, **sizes: int) -> None:
        super().__init__(**sizes)
        self._clock = clock

    def forward(self, batch: ForwardBatch) -> FloatArray:
        self._clock.now_s += 0.005 + 0.0003 * len(batch.token_ids)
        return super().forward(batch)


class Schedule:
    """One engine and requests that come and go; every answer is compared with that of a plain loop."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        block_size = rng.choice([4, 8])
        max_num_seqs = rng.choice([1, 2, 3, 6])
        longest = MAX_LENGTH // block_size
        self.clock = Clock()
        self.model = TimedLogits(
            self.clock,
            max_num_seqs=max_num_seqs,
            max_length=MAX_LENGTH,
            block_size=block_size,
            num_blocks=rng.randint(longest, max_num_seqs * longest),
        )
        self.oracle = Oracle(error_rate=rng.choice([0, 0.3]), seed=seed)
        self.decode = rng.choice([sample_loop, sample_loop, in_threes])
        self.engine = Engine(
            self.model,
            decode=self.decode,
            max_num_batched_tokens=rng.choice([8, 16, 64]),
            prefix_cache=rng.random() < 0.9,
            speculation=Speculation(self.oracle) if rng.random() < 0.5 else None,
            clock=self.clock,
        )
        self.stems = [[rng.randrange(VOCAB_SIZE) for _ in range(60)] for _ in range(3)]
        self.histories = [self.prompt() for _ in range(2)]
        self.asking: dict[int, LogitsRequest] = {}
        self.running: dict[TokenSequence, dict[str, Any]] = {}   # their parameters
        self.searches: dict[BeamSearch, dict[str, Any]] = {}
        self.ended: dict[TokenSequence, dict[str, Any]] = {}
        self.scores: dict[TokenSequence, tuple[TokenLogprob, ...]] = {}
        self.num_preempted = 0
        self.num_drafted = 0
        self.num_accepted = 0

    def prompt(self) -> list[int]:
        stem = self.rng.choice(self.stems)[: self.rng.randint(1, 60)]
        return stem + [self.rng.randrange(VOCAB_SIZE) for _ in range(self.rng.choice([0, 0, 1, 5]))]

    def params(self) -> dict[str, Any]:
        return {
            "max_tokens": self.rng.randint(1, 40),
            "cache_salt": self.rng.choice(SALTS),
            "prompt_logprobs": self.rng.choice([None, None, None, 1]),
            "priority": self.rng.choice([0, 0, 1, -1]),
            "temperature": self.rng.choice([0.0, 0.0, 1.0]),
            "top_k": self.rng.choice([0, 5]),
        }

    def arrive(self) -> None:
        for caller, history in enumerate(self.histories):
            if caller not in self.asking and self.rng.random() < 0.2:
                request = logits_request(history, max_length=MAX_LENGTH)
                request.submitted_s = self.clock()
                self.asking[caller] = request
                self.engine.add_logits(request)
        while self.rng.random() < 0.25:
            prompt, params = self.prompt(), self.params()
            for choice in range(self.rng.choice([1, 1, 1, 3])):
                own = params | {"seed": choice}
                sequence = sequence_of(prompt, max_length=MAX_LENGTH, **own)
                self.running[sequence] = own
                self.engine.add(sequence)
        if self.rng.random() < 0.1:
            self.search()

    def search(self) -> None:
        width = self.rng.choice([2, 3])
        options = {
            "prompt": self.prompt()[:30],
            "width": width,
            "n": self.rng.randint(1, width),
            "max_tokens": self.rng.randint(1, 12),
            "eos_token_ids": [1, 2, 3],
            "cache_salt": self.rng.choice(SALTS),
            "priority": self.rng.choice([0, 1]),
        }
        if width <= self.model.max_num_seqs and self.engine.max_tokens_per_sequence(width) >= 42:
            group = search_of(**options)
            self.searches[group] = options
            for answer in group.answers:
                self.running[answer] = {}
                self.engine.add(answer)

    def leave(self) -> None:
        if self.running and self.rng.random() < 0.02:
            sequence = self.rng.choice(list(self.running))
            for answer in sequence.answers:
                del self.running[answer]
            self.searches.pop(sequence.search, None)
            self.engine.remove([sequence])

    def step(self) -> bool:
        self.clock.now_s += self.rng.choice([0.0, 0.001, 0.05])
        result = self.engine.step()
        self.engine.check_integrity()
        if result is None:
            return False
        assert not result.failed
        self.num_preempted += result.num_preempted
        self.num_drafted += result.num_drafted
        self.num_accepted += result.num_accepted
        for request, row in result.answered:
            np.testing.assert_array_equal(row, logits_after(request.token_ids))
            caller = next(c for c, r in self.asking.items() if r is request)
            del self.asking[caller]
            self.histories[caller] = [*request.token_ids, self.rng.randrange(VOCAB_SIZE)][:MAX_LENGTH]
        for sequence in result.advanced:
            assert sequence in self.running, "it has ended already"
            delta = sequence.take_delta()
            assert delta is not None or sequence.search
            if delta is not None:
                self.scores[sequence] = self.scores.get(sequence, ()) + delta.prompt_logprobs
            if sequence.finished:
                params = self.running.pop(sequence)
                if sequence.search is None:
                    self.ended[sequence] = params
        return True

    def run(self, *, num_steps: int) -> None:
        for _ in range(num_steps):
            self.arrive()
            self.leave()
            self.step()
        self.clock.now_s += 10  # no place is held for a loop any more
        while self.step():
            self.clock.now_s += 10
        assert not self.running
        assert not self.asking
        for group, options in self.searches.items():
            assert answers_of(group) == alone(**options)
        for sequence, params in self.ended.items():
            prompt = sequence.token_ids[: sequence.num_prompt_tokens]
            assert sequence.token_ids == plain_answer(sequence, decode=self.decode, **params)
            if sequence.params.prompt_logprobs is not None:
                scores = self.scores[sequence]
                rows = [logits_after(prompt[:length]) for length in range(1, len(prompt))]
                expected = [token_logprob(row, i, num_top=1) for row, i in zip(rows, prompt[1:], strict=True)]
                assert list(scores) == expected


@pytest.mark.parametrize("first", range(0, NUM_SCHEDULES, 50))
def test_no_schedule_changes_an_answer_or_loses_a_request_or_exceeds_the_budget(first):
    schedules = [Schedule(seed) for seed in range(first, first + 50)]
    for schedule in schedules:
        schedule.run(num_steps=25)
    assert sum(schedule.num_preempted for schedule in schedules) > 5
    assert sum(s.num_cached_tokens for schedule in schedules for s in schedule.ended) > 250
    assert sum(len(schedule.searches) for schedule in schedules) > 10
    num_accepted = sum(schedule.num_accepted for schedule in schedules)
    assert 100 < num_accepted < sum(schedule.num_drafted for schedule in schedules)
