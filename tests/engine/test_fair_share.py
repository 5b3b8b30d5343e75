"""How API keys that compete share an engine, by a clock that the model moves."""

from __future__ import annotations

import random
from collections import defaultdict
from statistics import median

import pytest

from genserve.engine.beam_search import BeamSearch
from genserve.engine.engine import Engine
from genserve.engine.fair_share import _KEPT_TOKENS
from genserve.engine.logits_model import ForwardBatch
from genserve.engine.token_sequence import TokenSequence
from genserve.request_context import KeyShare
from genserve.sampling.logits_array import FloatArray
from tests.fakes.logits import PagedLogits
from tests.fakes.sequences import Clock, IdText, sample_loop, sequence_of

MAX_LENGTH = 1200
ALICE, BOB = KeyShare("alice"), KeyShare("bob")


class TimedLogits(PagedLogits):
    """A forward takes 10 ms, and 1 ms for each token."""

    def __init__(self, clock: Clock, *, num_blocks: int, max_num_seqs: int) -> None:
        super().__init__(
            max_num_seqs=max_num_seqs, max_length=MAX_LENGTH, block_size=16, num_blocks=num_blocks
        )
        self._clock = clock

    def forward(self, batch: ForwardBatch) -> FloatArray:
        self._clock.now_s += 0.01 + 0.001 * len(batch.token_ids)
        return super().forward(batch)


class Run:
    """An engine over such a model, the times of each sequence's tokens, and the tokens of each key."""

    def __init__(self, *, num_blocks: int = 4000, max_num_seqs: int = 8) -> None:
        self.clock = Clock()
        model = TimedLogits(self.clock, num_blocks=num_blocks, max_num_seqs=max_num_seqs)
        self.engine = Engine(model, decode=sample_loop, clock=self.clock)
        self.times: dict[TokenSequence, list[float]] = {}
        self.open: defaultdict[str, int] = defaultdict(int)
        self.ended: list[TokenSequence] = []
        self._random = random.Random(1)

    def add(self, share: KeyShare, num_tokens: int, *, max_tokens: int, priority: int = 0) -> TokenSequence:
        prompt = self._random.choices(range(64), k=num_tokens)
        sequence = sequence_of(
            prompt, max_length=MAX_LENGTH, max_tokens=max_tokens, ignore_eos=True, priority=priority
        )
        sequence.share = share
        self.times[sequence] = []
        self.open[share.name] += 1
        self.engine.add(sequence)
        return sequence

    def add_search(self, share: KeyShare, num_tokens: int, *, max_tokens: int, width: int) -> BeamSearch:
        prompt = self._random.choices(range(64), k=num_tokens)
        choice = sequence_of(prompt, max_length=MAX_LENGTH, max_tokens=max_tokens, use_beam_search=True)
        choice.share = share
        search = BeamSearch([choice], width=width, text=IdText())
        self.times[choice] = []
        self.open[share.name] += 1
        self.engine.add(choice)
        return search

    def step(self) -> None:
        result = self.engine.step()
        for sequence in result.advanced if result else ():
            self.times[sequence].append(self.clock.now_s)
            if sequence.finish_reason is not None:
                self.engine.remove([sequence])
                self.open[sequence.share.name] -= 1
                self.ended.append(sequence)
        if self.engine.num_running % 3 == 0:  # it takes longer than the step
            self.engine.check_integrity()

    def until_first_token(self, sequence: TokenSequence) -> float:
        """Return the time at which a sequence has its first token."""
        while not self.times[sequence]:
            self.step()
        return self.times[sequence][0]

    def flood(self, share: KeyShare, *, count: int = 24) -> None:
        """Keep this many requests of a key waiting or running."""
        while self.open[share.name] < count:
            self.add(share, self._random.randint(16, 100), max_tokens=self._random.randint(8, 40))

    def num_tokens(self, share: KeyShare) -> int:
        """Return the tokens of prompts and answers so far."""
        sequences = [sequence for sequence in self.times if sequence.share == share]
        return sum(
            len(self.times[sequence]) + sequence.num_prompt_tokens * bool(self.times[sequence])
            for sequence in sequences
        )


@pytest.mark.parametrize("num_tokens", [200, 400])
def test_a_key_with_a_request_a_second_hardly_waits_for_a_key_with_64(num_tokens: int) -> None:
    alone = Run()
    alone_s = alone.until_first_token(alone.add(BOB, num_tokens, max_tokens=20))
    run = Run()
    waits_s = []
    for next_s in range(2, 10):
        while run.clock.now_s < next_s:
            run.flood(ALICE, count=64)
            run.step()
        waits_s.append(run.until_first_token(run.add(BOB, num_tokens, max_tokens=20)) - next_s)
    assert median(waits_s) < 1.3 * alone_s
    assert max(waits_s) < 1.5 * alone_s


def test_a_key_has_its_slots_even_if_the_blocks_are_taken() -> None:
    run = Run(num_blocks=80)
    for _ in range(150):
        run.flood(ALICE)
        run.step()
    others = len(run.ended)
    run.until_first_token(run.add(BOB, 400, max_tokens=4))
    assert len(run.ended) - others < 4


@pytest.mark.parametrize(
    "weight", [pytest.param(1, marks=pytest.mark.extended), 3, pytest.param(0.25, marks=pytest.mark.extended)]
)
def test_tokens_divide_by_weight(weight: float) -> None:
    run, bob = Run(), KeyShare("bob", weight)
    for _ in range(300):  # until what the second key may keep is used up
        run.flood(ALICE)
        run.flood(bob)
        run.step()
    before = run.num_tokens(ALICE), run.num_tokens(bob)
    for _ in range(600):
        run.flood(ALICE)
        run.flood(bob)
        run.step()
    alice, other = (run.num_tokens(key) - n for key, n in zip((ALICE, bob), before, strict=True))
    assert other / alice == pytest.approx(weight, rel=0.1)


def test_a_key_that_waited_for_nothing_is_owed_little() -> None:
    """A key with one request at a time does not save up tokens while another one floods."""
    run = Run()
    while run.clock.now_s < 40:
        run.flood(ALICE)
        run.flood(BOB, count=1)
        run.step()
    before = run.num_tokens(ALICE), run.num_tokens(BOB)
    assert before[0] > before[1] + 3 * _KEPT_TOKENS
    for _ in range(300):
        run.flood(ALICE)
        run.flood(BOB)
        run.step()
    alice, bob = (run.num_tokens(key) - n for key, n in zip((ALICE, BOB), before, strict=True))
    assert bob - alice < 1.25 * _KEPT_TOKENS


def test_a_higher_priority_keeps_its_slots() -> None:
    run = Run(max_num_seqs=2)
    first = [run.add(ALICE, 16, max_tokens=50, priority=-1) for _ in range(2)]
    run.step()
    waiting = run.add(BOB, 16, max_tokens=1)
    run.until_first_token(waiting)
    assert all(len(run.times[sequence]) == 50 for sequence in first)


def test_a_preempted_request_of_a_key_ends_with_the_same_tokens() -> None:
    alone = Run(max_num_seqs=2)
    expected = [alone.add(ALICE, 40, max_tokens=60) for _ in range(2)]
    while len(alone.ended) < 2:
        alone.step()
    run = Run(max_num_seqs=2)
    sequences = [run.add(ALICE, 40, max_tokens=60) for _ in range(2)]
    for _ in range(10):
        run.step()
    run.add(BOB, 40, max_tokens=30)
    while len(run.ended) < 3:
        run.step()
    assert run.ended[0].share == BOB
    assert sum(sequence.num_preemptions for sequence in sequences) == 1
    assert [s.token_ids for s in sequences] == [s.token_ids for s in expected]


def test_nothing_is_preempted_for_a_search_that_is_due_too_few_slots() -> None:
    run = Run()
    others = [run.add(ALICE, 16, max_tokens=40) for _ in range(8)]
    for _ in range(20):
        run.step()
    search = run.add_search(BOB, 16, max_tokens=4, width=6)
    while run.open["bob"]:
        run.step()
    assert not any(request.num_preemptions for request in (*others, *search.beams))


def test_a_search_gives_way_only_if_no_other_request_of_its_key_can() -> None:
    run = Run()
    narrow = [run.add(ALICE, 16, max_tokens=60) for _ in range(2)]
    search = run.add_search(ALICE, 16, max_tokens=40, width=6)
    beam = search.beams[0]
    for _ in range(20):
        run.step()
    for _ in range(2):
        run.add(BOB, 16, max_tokens=4)
    while run.open["bob"]:
        run.step()
    assert not beam.num_preemptions
    assert sum(sequence.num_preemptions for sequence in narrow) == 2


def test_a_search_that_has_all_slots_gives_way() -> None:
    run = Run()
    search = run.add_search(ALICE, 16, max_tokens=40, width=8)
    for _ in range(20):
        run.step()
    beams = search.beams
    run.until_first_token(run.add(BOB, 16, max_tokens=4))
    assert any(beam.num_preemptions for beam in beams)
    while run.open["alice"]:
        run.step()


def test_a_key_alone_preempts_nothing() -> None:
    run = Run()
    for _ in range(300):
        run.flood(ALICE)
        run.step()
    assert not any(sequence.num_preemptions for sequence in run.times)
