"""Which tokens a step has, and how long it takes, by a clock that the model moves."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from genserve.engine.engine import Engine
from genserve.engine.kv_cache_manager import KVCacheManager
from genserve.engine.logits_model import ForwardBatch
from genserve.engine.scheduler import Scheduler, divide_budget, num_unfinished
from genserve.engine.token_sequence import TokenSequence
from genserve.request_context import KeyShare
from genserve.sampling.logits_array import FloatArray
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
    """An engine over such a model, and the times of each sequence's tokens."""

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


def test_a_long_prompt_at_most_doubles_the_gaps_of_streams_and_is_hardly_later():
    alone = Run()
    alone_s = alone.until_first_token(alone.add(3000, max_tokens=1))
    run = Run()
    streams = [run.add(20, max_tokens=1000, start=i) for i in range(8)]
    run.steps(60)
    undisturbed_s = max(run.longest_gap(s, since_s=run.clock.now_s / 2) for s in streams)
    began_s = run.clock.now_s
    taken_s = run.until_first_token(run.add(3000, max_tokens=1, start=9))
    assert all(run.longest_gap(s, since_s=began_s) < 2 * undisturbed_s * 1.05 for s in streams)
    # In this model a token takes the same time in any chunk; a real forward also reads its weights.
    assert taken_s < 2.2 * alone_s


@pytest.mark.parametrize(
    "num_prompts",
    [pytest.param(3, marks=pytest.mark.extended), 8, pytest.param(20, marks=pytest.mark.extended)],
)
def test_long_prompts_together_slow_streams_down_by_a_bound_however_many_they_are(num_prompts):
    run = Run()
    streams = [run.add(8, max_tokens=1500, start=number) for number in range(4)]
    run.steps(50)
    undisturbed_s = run.longest_gap(streams[0], since_s=run.times[streams[0]][20])
    began_s = run.clock.now_s
    prompts = [run.add(2000, max_tokens=1, start=10 + number) for number in range(num_prompts)]
    while not all(run.times[prompt] for prompt in prompts):
        run.steps(1)
    assert run.longest_gap(streams[0], since_s=began_s) <= 3.6 * undisturbed_s
    computed_s = num_prompts * 2000 * (0.0003 + 2e-8 * 1000)
    assert run.clock.now_s - began_s <= 1.7 * computed_s


def test_choices_of_one_prompt_lengthen_a_step_like_one_request():
    run = Run()
    streams = [run.add(20, max_tokens=1000, start=i) for i in range(8)]
    run.steps(60)
    undisturbed_s = max(run.longest_gap(s, since_s=run.clock.now_s / 2) for s in streams)
    began_s = run.clock.now_s
    answers = [run.add(1008, max_tokens=1, start=9) for _ in range(8)]
    run.until_first_token(answers[0])
    assert all(run.longest_gap(s, since_s=began_s) < 2 * undisturbed_s * 1.05 for s in streams)


def test_a_short_prompt_overtakes_an_earlier_long_one():
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
    assert run.engine.num_waiting, "shorter prompts were always waiting"


def test_a_step_is_never_longer_than_its_budget():
    run = Run()
    for i in range(40):
        run.add(100 + i, max_tokens=20, start=i)
    while run.engine.num_waiting or run.engine.num_running:
        run.steps(1)
    model = run.engine._runner._model
    assert max(sum(forward) for forward in model.forwards) <= 256
    assert min(sum(forward) for forward in model.forwards[:4]) >= 20


def test_half_of_simultaneous_prompts_have_their_first_token_at_half_time():
    run = Run()
    prompts = [run.add(40, max_tokens=50, start=i) for i in range(32)]
    while not all(run.times[sequence] for sequence in prompts):
        run.steps(1)
    first_s = sorted(run.times[sequence][0] for sequence in prompts)
    computed_s = (16 * 40) * 0.0003
    assert first_s[15] < 1.5 * computed_s
    assert first_s[31] < 3 * 2 * computed_s


def test_a_third_long_prompt_waits_but_a_short_one_behind_it_does_not():
    run = Run()
    longs = [run.add(2000, max_tokens=1, start=i) for i in range(3)]
    run.steps(1)
    short = run.add(30, max_tokens=1, start=9)
    run.steps(1)
    assert short.finished
    assert longs[2].num_computed_tokens == 0
    assert min(s.num_computed_tokens for s in longs[:2]) > 0


@pytest.mark.parametrize(
    ("lengths", "budget", "shares"),
    [
        ([5], 100, [5]),
        ([5], 3, [3]),
        ([4, 100], 40, [4, 36]),  # the longest gets the rest
        ([30, 30, 100], 40, [30, 0, 10]),  # or at least a quarter
        ([60, 60, 60], 64, [48, 0, 16]),
        ([2, 2, 2], 1, [1, 0, 0]),
    ],
)
def test_the_shortest_prompts_get_their_tokens_first(lengths, budget, shares):
    assert divide_budget(lengths, budget) == shares
    assert num_unfinished(lengths, budget) == sum(a < b for a, b in zip(shares, lengths, strict=True))


def scheduler_with(
    *, num_decodes: int = 0, num_blocks: int = 100, max_num_seqs: int = 4
) -> tuple[Scheduler, list[TokenSequence]]:
    """A scheduler of steps of 256 tokens, with sequences that decode behind prompts of 3 tokens."""
    scheduler = Scheduler(KVCacheManager(num_blocks=num_blocks, block_size=16), max_num_seqs=max_num_seqs)
    decoding = [sequence_of([i] * 3, max_length=999) for i in range(num_decodes)]
    for sequence in decoding:
        scheduler.add(sequence)
    if decoding:
        scheduler.schedule()
    for sequence in decoding:
        sequence.num_computed_tokens = 3
        sequence.append(1)
    return scheduler, decoding


@pytest.mark.parametrize(
    ("num_decodes", "prompts", "expected"),
    [
        (2, [], [1, 1]),
        (0, [10], [10]),
        (0, [300], [256]),
        (0, [300, 20], [20, 236]),  # the shortest first
        (0, [200, 200, 200], [192, 64]),  # two prompts unfinished: the third waits
        (0, [200, 200, 200, 5], [5, 187, 64]),  # but not a short one behind it
        (2, [10], [1, 1, 10]),
        (2, [100], [1, 1, 15]),  # a prompt may nearly double a step that decodes
        (2, [100, 100], [1, 1, 23, 7]),  # and so may each of two
        (4, [10], [1, 1, 1, 1]),  # no slot is left
        (3, [10, 1], [1, 1, 1, 10]),
        (3, [1], [1, 1, 1, 1]),  # a prompt of one token is a decode
    ],
)
def test_the_tokens_of_a_step(num_decodes, prompts, expected):
    scheduler, decoding = scheduler_with(num_decodes=num_decodes)
    for i, length in enumerate(prompts, start=num_decodes):
        scheduler.add(sequence_of([i] * length, max_length=999))
    output = scheduler.schedule()
    scheduler.check_integrity()
    assert output is not None
    assert output.num_tokens == expected
    assert output.requests[:num_decodes] == decoding
    assert output.num_decodes == expected.count(1)
    assert output.num_prompt_tokens == sum(expected) - output.num_decodes


@pytest.mark.parametrize(
    ("num_blocks", "priorities", "preempted", "num_waiting"),
    [
        (4, [0, 0], [], 0),  # each needs a second block
        (3, [0, 0], [1], 1),  # the younger one goes
        (3, [1, 0], [0], 1),  # or the one of lower priority
        (5, [0, 0, 0], [2], 1),
        (2, [0], [], 0),
    ],
)
def test_the_youngest_of_the_lowest_priority_is_preempted_if_blocks_run_out(
    num_blocks, priorities, preempted, num_waiting
):
    scheduler = Scheduler(KVCacheManager(num_blocks=num_blocks, block_size=4), max_num_seqs=4)
    sequences = [sequence_of([i] * 3, priority=priority) for i, priority in enumerate(priorities)]
    for sequence in sequences:
        scheduler.add(sequence)
    scheduler.schedule()
    assert not scheduler.num_waiting
    for sequence in sequences:
        sequence.num_computed_tokens = 3
        sequence.append(1)
    scheduler.schedule()
    for sequence in sequences:
        if not sequence.num_preemptions:
            sequence.num_computed_tokens = 4
            sequence.append(1)
    output = scheduler.schedule()
    scheduler.check_integrity()
    assert output is not None
    assert [i for i, s in enumerate(sequences) if s.num_preemptions] == preempted
    assert output.num_preempted == scheduler.num_waiting == num_waiting


def test_a_request_without_a_place_or_blocks_makes_the_step_full():
    scheduler, _ = scheduler_with(num_decodes=2, max_num_seqs=2)
    scheduler.add(sequence_of([9]))
    output = scheduler.schedule()
    assert output is not None
    assert (output.full, output.started) == (True, [])
    scheduler, _ = scheduler_with(num_decodes=2, num_blocks=4)
    scheduler.add(sequence_of([9] * 20))  # needs 2 blocks, and each of the others one more
    output = scheduler.schedule()
    assert output is not None
    assert (output.full, output.started) == (True, [])


class Adapter:
    sha256 = "0" * 64
    is_ready = False
    error = None


def test_a_group_takes_part_once_its_adapter_is_in_memory():
    scheduler, _ = scheduler_with(max_num_seqs=1)
    held, other, last = (sequence_of([i], max_length=999) for i in range(3))
    held.adapter = Adapter()
    held.group.share = KeyShare("waits", 1.0)
    scheduler.add(held)
    assert scheduler.schedule() is None
    scheduler.add(other)
    scheduler.add(last)
    output = scheduler.schedule()
    assert output is not None
    assert output.requests == [other]
    assert (scheduler.num_waiting, scheduler.num_without_adapters) == (1, {0: 1})
    assert not scheduler._shares.have_competition
    held.adapter.is_ready = True
    scheduler.remove(other)
    output = scheduler.schedule()
    assert output is not None
    assert output.requests == [held]
    scheduler.check_integrity()


def test_a_prompt_continues_if_more_places_are_held_than_exist():
    scheduler = Scheduler(KVCacheManager(num_blocks=100, block_size=16), max_num_seqs=4)
    stream, prompt, waiting = (sequence_of([i] * n, max_length=999) for i, n in enumerate((3, 600, 2)))
    scheduler.add(stream)
    scheduler.schedule()
    stream.num_computed_tokens = 3
    stream.append(1)
    scheduler.add(prompt)
    scheduler.schedule()
    scheduler.add(waiting)
    output = scheduler.schedule(num_reserved=4)
    assert output is not None
    assert output.requests == [stream, prompt]
    assert min(output.num_tokens) > 0
