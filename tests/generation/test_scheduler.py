"""Who gets how much of a step, and how long a step takes, by a clock that the model moves."""

from __future__ import annotations

import random
from itertools import pairwise

from genserve.generation.engine import Engine
from genserve.generation.engine_request import TokenSequence
from genserve.generation.kv_cache_manager import KVCacheManager
from genserve.generation.logits_model import FloatArray, ForwardBatch
from genserve.generation.scheduler import Scheduler
from tests.fakes.logits import PagedLogits
from tests.fakes.sequences import Clock, sample_loop, sequence_of

MAX_LENGTH = 3200


class TimedLogits(PagedLogits):
    """A forward takes 5 ms, 0.3 ms for each token, and more the further behind it is."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(max_num_seqs=32, max_length=MAX_LENGTH, block_size=16, num_blocks=2000)
        self._clock = clock

    def forward(self, batch: ForwardBatch) -> FloatArray:
        self._clock.now_s += 0.005 + 0.0003 * len(batch.token_ids) + 2e-8 * int(batch.positions.sum())
        return super().forward(batch)


class Run:
    """An engine over such a model, and when which sequence got its tokens."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.engine = Engine(TimedLogits(self.clock), decode=sample_loop, clock=self.clock)
        self.times: dict[TokenSequence, list[float]] = {}

    def add(self, num_tokens: int, *, max_tokens: int, start: int = 0) -> TokenSequence:
        prompt = random.Random(start).choices(range(64), k=num_tokens)
        sequence = sequence_of(prompt, max_length=MAX_LENGTH, max_tokens=max_tokens, ignore_eos=True)
        self.times[sequence] = []
        self.engine.add(sequence)
        return sequence

    def steps(self, count: int) -> None:
        for _ in range(count):
            result = self.engine.step()
            for sequence in result.advanced if result else ():
                self.times[sequence].append(self.clock.now_s)

    def until_first_token(self, sequence: TokenSequence) -> float:
        began_s = self.clock.now_s
        while not self.times[sequence]:
            self.steps(1)
        return self.clock.now_s - began_s

    def longest_gap(self, sequence: TokenSequence, *, since_s: float = 0.0) -> float:
        times = [t for t in self.times[sequence] if t >= since_s]
        return max(b - a for a, b in pairwise(times))


def test_a_long_prompt_keeps_the_gaps_of_streams_under_twice_what_they_were_and_is_hardly_later():
    alone = Run()
    alone_s = alone.until_first_token(alone.add(3000, max_tokens=1))
    run = Run()
    streams = [run.add(20, max_tokens=1000, start=i) for i in range(8)]
    run.steps(60)
    undisturbed_s = max(run.longest_gap(s, since_s=run.clock.now_s / 2) for s in streams)
    began_s = run.clock.now_s
    taken_s = run.until_first_token(run.add(3000, max_tokens=1, start=9))
    assert all(run.longest_gap(s, since_s=began_s) < 2 * undisturbed_s * 1.05 for s in streams)
    # Here a token costs as much beside others as in a long chunk, which is not so with weights that are read.
    assert taken_s < 2.2 * alone_s


def test_answers_that_wait_for_the_same_prompt_lengthen_a_step_as_one_does():
    run = Run()
    streams = [run.add(20, max_tokens=1000, start=i) for i in range(8)]
    run.steps(60)
    undisturbed_s = max(run.longest_gap(s, since_s=run.clock.now_s / 2) for s in streams)
    began_s = run.clock.now_s
    answers = [run.add(1008, max_tokens=1, start=9) for _ in range(8)]
    run.until_first_token(answers[0])
    assert all(run.longest_gap(s, since_s=began_s) < 2 * undisturbed_s * 1.05 for s in streams)


def test_a_short_prompt_overtakes_a_long_one_that_came_before():
    run = Run()
    long, short = run.add(3000, max_tokens=1), run.add(30, max_tokens=1, start=5)
    run.steps(1)
    assert short.finished
    assert 0 < long.num_computed_tokens < 512


def test_a_long_prompt_gets_a_share_however_many_short_ones_come():
    run = Run()
    long = run.add(3000, max_tokens=1)
    for step in range(20):
        for i in range(30):
            run.add(60, max_tokens=1, start=step * 30 + i)
        run.steps(1)
    assert long.num_computed_tokens > 20 * 64 * 0.9
    assert run.engine.num_waiting, "there was always somebody to go first"


def test_a_step_is_never_longer_than_its_budget():
    run = Run()
    for i in range(40):
        run.add(100 + i, max_tokens=20, start=i)
    while run.engine.num_waiting or run.engine.num_running:
        run.steps(1)
    model = run.engine._runner._model
    assert max(sum(forward) for forward in model.forwards) <= 256
    assert min(sum(forward) for forward in model.forwards[:4]) >= 20


def test_of_prompts_that_arrive_together_half_have_their_first_token_when_half_are_computed():
    run = Run()
    prompts = [run.add(40, max_tokens=50, start=i) for i in range(32)]
    while not all(run.times[sequence] for sequence in prompts):
        run.steps(1)
    first_s = sorted(run.times[sequence][0] for sequence in prompts)
    computed_s = (16 * 40) * 0.0003
    assert first_s[15] < 1.5 * computed_s
    assert first_s[31] < 3 * 2 * computed_s


def test_a_third_long_prompt_waits_and_a_short_one_behind_it_does_not():
    run = Run()
    longs = [run.add(2000, max_tokens=1, start=i) for i in range(3)]
    run.steps(1)
    short = run.add(30, max_tokens=1, start=9)
    run.steps(1)
    assert short.finished
    assert longs[2].num_computed_tokens == 0
    assert min(s.num_computed_tokens for s in longs[:2]) > 0


def test_a_prompt_goes_on_where_more_places_are_kept_than_there_are():
    scheduler = Scheduler(KVCacheManager(num_blocks=100, block_size=16), max_num_seqs=4)
    stream, prompt, waiting = (sequence_of([i] * n, max_length=999) for i, n in enumerate((3, 600, 2)))
    scheduler.add(stream)
    scheduler.schedule()
    stream.num_computed_tokens = 3
    stream.append(1)
    scheduler.add(prompt)
    scheduler.schedule()
    scheduler.add(waiting)
    output = scheduler.schedule(num_held=4)
    assert output is not None
    assert output.requests == [stream, prompt]
    assert min(output.num_tokens) > 0
