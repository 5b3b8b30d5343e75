"""Simulated fleets, compared with the real engine on a virtual clock."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from genserve.engine.engine import Engine
from genserve.engine.logits_model import ForwardBatch
from genserve.engine.token_sequence import TokenSequence
from genserve.planner.fleet import Fleet, FleetResult
from genserve.planner.loads import Lengths, PlannedRequest, SyntheticLoad
from genserve.planner.simulated_replica import ReplicaKind
from genserve.sampling.sampling_params import SamplingParams
from genserve.tuning.measured_steps import ServingCost, StepSize
from tests.fakes.sequences import IdText
from tests.support.representatives import with_extended

_ANY_ID = 1 << 40


class TimedLogits:
    """Implements `LogitsModel` without logits: a forward only takes virtual time."""

    vocab_size = 2

    def __init__(self, kind: ReplicaKind) -> None:
        limits = kind.limits
        self.max_num_seqs, self.max_length = limits.max_num_seqs, limits.max_length
        self.num_blocks, self.block_size = limits.num_blocks, limits.block_size
        self.num_state_slots = limits.num_state_slots
        self.now_s = 0.0
        self._seconds = kind.step_model.seconds

    def forward(self, batch: ForwardBatch) -> np.ndarray:
        rows = set(batch.logits_indices.tolist())
        decodes = context = prompt = pairs = 0
        spans = pairwise(batch.query_start_loc.tolist())
        for (start, end), computed in zip(spans, batch.num_computed_tokens.tolist(), strict=True):
            count = end - start
            if count == 1 and start in rows:
                decodes, context = decodes + 1, context + computed
            else:
                prompt, pairs = prompt + count, pairs + count * computed + count * (count + 1) // 2
        size = StepSize(
            decodes=decodes, context_tokens=context, prompt_tokens=prompt, prompt_pairs=pairs, rows=len(rows)
        )
        self.now_s += self._seconds(size)
        return np.zeros((len(rows), self.vocab_size), dtype=np.float32)

    def copy_blocks(self, pairs: object) -> None:
        """Do nothing, because the blocks are empty."""


def run_engine(kind: ReplicaKind, requests: list[PlannedRequest]) -> tuple[list[float], int, int]:
    """Return the times to first token of the real engine, by request, its preemptions and cached tokens."""
    planned: dict[TokenSequence, PlannedRequest] = {}

    async def decode(sequence: TokenSequence) -> None:
        for token_id in planned[sequence].answer:
            await sequence.sample()
            sequence.append(token_id)

    model = TimedLogits(kind)
    engine = Engine(
        model,
        decode=decode,
        max_num_batched_tokens=kind.limits.max_num_batched_tokens,
        clock=lambda: model.now_s,
    )
    first_s: dict[TokenSequence, float] = {}
    num_preempted, ahead = 0, list(requests)
    while ahead or engine.num_running or engine.num_waiting:
        if not (engine.num_running or engine.num_waiting):
            model.now_s = max(model.now_s, ahead[0].arrived_s)
        while ahead and ahead[0].arrived_s <= model.now_s:
            request = ahead.pop(0)
            sequence = TokenSequence(
                request.token_ids(),
                params=SamplingParams(max_tokens=len(request.answer), temperature=0),
                seed=0,
                eos_token_ids=frozenset(),
                text=IdText(),
                max_length=kind.limits.max_length,
                vocab_size=_ANY_ID,
            )
            planned[sequence] = request
            engine.add(sequence)
        result = engine.step()
        assert result is not None
        num_preempted += result.num_preempted
        for sequence in result.advanced:
            first_s.setdefault(sequence, model.now_s - planned[sequence].arrived_s)
    num_cached = sum(sequence.num_cached_tokens for sequence in planned)
    return [first_s[sequence] for sequence in planned], num_preempted, num_cached


def simulated(kind: ReplicaKind, load: SyntheticLoad, *, num_replicas: int = 1) -> FleetResult:
    return Fleet(kind, num_replicas=num_replicas).run(load.requests())


def load(**changes: object) -> SyntheticLoad:
    some = SyntheticLoad(
        num_requests=60,
        rate=6.0,
        input_len=Lengths(mean=50, variation=0.8),
        output_len=Lengths(mean=20, variation=0.8),
        num_system_prompts=3,
        system_len=40,
        seed=1,
    )
    return replace(some, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("rate", with_extended([2.0, 6.0, 9.0], always={9.0}))
@pytest.mark.parametrize(
    ("num_blocks", "output_len", "num_state_slots"), [(128, 20, 0), (26, 80, 0), (128, 20, 9), (26, 80, 20)]
)
def test_the_times_are_those_of_the_real_engine(
    kind: ReplicaKind, rate: float, num_blocks: int, output_len: int, num_state_slots: int
) -> None:
    kind = replace(
        kind,
        limits=replace(kind.limits, max_length=400, num_blocks=num_blocks, num_state_slots=num_state_slots),
        queue_limits=replace(kind.queue_limits, max_requests=1000, max_wait_s=None),
    )
    drawn = load(rate=rate, output_len=Lengths(mean=output_len, variation=0.8)).requests()
    requests = [each for each in drawn if each.num_prompt_tokens + len(each.answer) <= 400]
    first_s, num_preempted, num_cached = run_engine(kind, requests)
    result = Fleet(kind, num_replicas=1).run(requests)
    assert result.num_preempted == num_preempted
    assert (num_preempted > 0) == (num_blocks == 26)
    assert result.cached_tokens == num_cached
    for rank in (0, 25, 50, 75, 90, 100):
        assert result.times.first_s(rank) == pytest.approx(np.percentile(first_s, rank), abs=1e-9)
    assert result.times.num_tokens == sum(len(request.answer) for request in requests)


def test_a_load_with_a_seed_has_one_result(kind: ReplicaKind) -> None:
    results = [simulated(kind, load(num_turns=3, think_s=1.0), num_replicas=2) for _ in range(2)]
    assert results[0].times.first_s(99) == results[1].times.first_s(99)
    assert results[0].duration_s == results[1].duration_s
    assert simulated(kind, load(seed=2), num_replicas=2).duration_s != results[0].duration_s


def test_turns_of_a_session_find_the_earlier_ones_in_the_cache(kind: ReplicaKind) -> None:
    turns = load(num_turns=3, think_s=2.0, num_requests=60, num_system_prompts=0, rate=1.0)
    alone = simulated(kind, replace(turns, num_turns=1))
    assert alone.cached_tokens == 0
    result = simulated(kind, turns)
    # The first of three turns has nothing cached, the second a half, and the third two thirds.
    assert 0.4 < result.cached_tokens / result.prompt_tokens < 0.7
    # The router sends them to the replica that has them.
    spread = simulated(kind, turns, num_replicas=3)
    assert spread.cached_tokens > 0.8 * result.cached_tokens


def test_too_many_requests_are_rejected_as_by_a_server(kind: ReplicaKind) -> None:
    result = simulated(kind, load(rate=200.0, num_requests=400))
    assert result.num_rejected > 100
    assert result.num_requests == 400
    assert result.times.first_s(100) < 5.0 + 1.0  # max_wait_s, and the prompt
    assert simulated(kind, load(rate=200.0, num_requests=400), num_replicas=12).num_rejected == 0


def test_a_request_goes_to_a_next_replica_if_the_best_one_is_full(kind: ReplicaKind) -> None:
    short = replace(kind, queue_limits=replace(kind.queue_limits, max_requests=0, max_wait_s=None))
    alike = load(
        rate=8.0,
        num_requests=2 * short.limits.max_num_seqs,
        input_len=Lengths(mean=10),
        output_len=Lengths(mean=90),
        num_system_prompts=1,
        system_len=400,
    )
    assert simulated(short, alike, num_replicas=2).num_rejected == 0


def test_requests_beyond_the_context_are_counted(kind: ReplicaKind) -> None:
    result = simulated(kind, load(input_len=Lengths(mean=600)))
    assert (result.num_too_long, result.times.num_tokens) == (60, 0)


def test_serving_adds_its_costs(kind: ReplicaKind) -> None:
    slow = replace(kind, serving=ServingCost(request_s=0.1, step_s=0.0004, token_s=0.0006))
    few = load(rate=0.1, num_requests=10)
    assert simulated(slow, few).times.first_s(50) == pytest.approx(
        simulated(kind, few).times.first_s(50) + 0.101, abs=1e-3
    )
    assert simulated(slow, few).times.gap_s(50) == pytest.approx(
        simulated(kind, few).times.gap_s(50) + 0.001, rel=0.01
    )
