"""Models with recurrent states: where requests continue, and that no schedule gives one a wrong state."""

from __future__ import annotations

import random
from collections.abc import Sequence
from queue import SimpleQueue

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from genserve.engine.beam_search import BeamSearch
from genserve.engine.engine import Engine
from genserve.engine.engine_request import Request
from genserve.engine.kv_cache_manager import KVCacheManager
from genserve.engine.speculation import DraftModel, Proposer, Speculation
from genserve.engine.state_slots import SequenceState, StateSlots
from genserve.engine.token_sequence import TokenSequence
from genserve.generation_metrics import Metrics
from tests.fakes.drafts import Foreseen, Oracle
from tests.fakes.engines import engine_thread
from tests.fakes.logits import VOCAB_SIZE, PagedLogits, greedy_answer, logits_after
from tests.fakes.sequences import Clock, IdText, logits_request, sample_loop, sequence_of
from tests.fakes.states import RecurrentLogits

STATE_METRICS = [
    "genserve_state_slots_usage_perc",
    "genserve_state_snapshot_hits_total",
    "genserve_state_recomputed_tokens_total",
]
POISON = VOCAB_SIZE     # which no answer has
RNG = random.Random(0)
LONG = [RNG.randrange(VOCAB_SIZE) for _ in range(400)]


def engine_of(model: PagedLogits, *, draft: Proposer | None = None, **options) -> Engine:
    speculation = None if draft is None else Speculation(draft)
    return Engine(model, decode=sample_loop, clock=Clock(), speculation=speculation, **options)


def run(engine: Engine, *sequences: TokenSequence, max_steps: int = 10_000) -> None:
    for sequence in sequences:
        engine.add(sequence)
    while max_steps and (result := engine.step()) is not None:
        engine.check_integrity()
        assert not result.failed
        max_steps -= 1


def long_of(*token_ids: int, num_tokens: int = 0, **options) -> TokenSequence:
    """A sequence of the first tokens of LONG, and then others."""
    prompt = [*LONG[:num_tokens], *token_ids]
    return sequence_of(prompt, max_length=400, **{"max_tokens": 3} | options)


def check(*sequences: TokenSequence) -> None:
    for sequence in sequences:
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        answer = sequence.token_ids[sequence.num_prompt_tokens :]
        assert answer == greedy_answer(prompt, num_tokens=len(answer))


def search_of(prompt: Sequence[int], *, width: int, max_tokens: int) -> BeamSearch:
    answers = [sequence_of(prompt, use_beam_search=True, max_tokens=max_tokens) for _ in range(width)]
    return BeamSearch(answers, width=width, text=IdText())


def beams_alone(prompt: Sequence[int], *, width: int, max_tokens: int) -> list[list[int]]:
    search = search_of(prompt, width=width, max_tokens=max_tokens)
    run(engine_of(PagedLogits()), *search.choices)
    return [choice.token_ids for choice in search.choices]


class Schedules(RuleBasedStateMachine):
    """Any order of arrivals, forks, wrong drafts, preemptions, next turns and cancellations, and failures.

    Blocks and slots are too few for all. The model raises if a state is behind other tokens.
    """

    def __init__(self) -> None:
        super().__init__()
        self.model = RecurrentLogits(max_num_seqs=3, block_size=2, num_blocks=36, num_state_slots=7)
        self.model.poison[POISON] = "raise"
        self.engine = engine_of(self.model, draft=Oracle(error_rate=0.3), max_num_batched_tokens=9)
        self.answered: list[list[int]] = [LONG[:24]]
        self.open: list[TokenSequence] = []
        self.searches: list[tuple[BeamSearch, list[int]]] = []

    def prompt(self, data: st.DataObject, *, longest: int) -> list[int]:
        """A part of what was computed before, and a few other tokens."""
        known = data.draw(st.sampled_from(self.answered))
        num_common = data.draw(st.integers(0, min(len(known), longest - 3)))
        return known[:num_common] + data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))

    @rule(data=st.data(), salt=st.sampled_from([None, None, "a"]), count=st.integers(1, 12))
    def arrive(self, data, salt, count):
        sequence = sequence_of(self.prompt(data, longest=40), max_tokens=count, cache_salt=salt)
        self.open.append(sequence)
        self.engine.add(sequence)

    @rule(data=st.data(), width=st.integers(2, 3), count=st.integers(1, 8))
    def search(self, data, width, count):
        prompt = self.prompt(data, longest=20)
        search = search_of(prompt, width=width, max_tokens=count)
        self.searches.append((search, prompt))
        for choice in search.choices:
            self.engine.add(choice)

    @rule(data=st.data(), num_calls=st.integers(1, 4))
    def call_for_logits(self, data, num_calls):
        """A BLS loop, which sends all its tokens each time."""
        token_ids = self.prompt(data, longest=30)
        for _ in range(num_calls):
            self.engine.add_logits(logits_request(token_ids))
            self.step(1)
            token_ids = [*token_ids, int(logits_after(token_ids).argmax())]

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data):
        sequence = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        self.engine.remove([sequence])

    @rule()
    def fail(self):
        """A forward raises in its middle, and its sequences fail."""
        self.engine.add(sequence_of([POISON], priority=-1))

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            result = self.engine.step()
            if result is None:
                return
            self.engine.check_integrity()
            if result.failed:
                assert any(request.token_ids == [POISON] for request in result.failed), "a state was wrong"
                self.open = [sequence for sequence in self.open if sequence not in result.failed]
                self.searches = [each for each in self.searches if each[0].choices[0] not in result.failed]
            for sequence in result.advanced:
                if sequence in self.open and sequence.finished:
                    self.open.remove(sequence)
                    check(sequence)
                    self.answered.append(sequence.token_ids)

    @invariant()
    def slots_and_snapshots_agree(self):
        self.engine.check_integrity()

    def teardown(self):
        """Check that all requests end, and that the searches were right."""
        self.step(2000)
        assert not self.open
        assert self.engine.num_running == self.engine.num_waiting == 0
        assert self.engine.state_usage == 0
        for search, prompt in self.searches:
            count, width = search.choices[0].params.max_tokens, len(search.choices)
            found = [choice.token_ids for choice in search.choices]
            assert found == beams_alone(prompt, width=width, max_tokens=count)


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(stateful_step_count=25)


@pytest.mark.parametrize("length", [200, 208, 209])
def test_a_next_turn_continues_exactly_where_the_last_answer_ended(length):
    """In the middle of a block, before its last token, and at its border."""
    model = RecurrentLogits(max_length=400, block_size=16)
    engine = engine_of(model)
    run(engine, first := long_of(num_tokens=length - 1, max_tokens=2))
    again = sequence_of([*first.token_ids, 7], max_length=400, max_tokens=2)
    run(engine, again)
    assert again.num_cached_tokens == length
    assert model.forwards[-2:] == [(2,), (1,)]
    check(first, again)


def test_other_next_turns_continue_at_the_last_border_of_the_prompt():
    model = RecurrentLogits(max_length=400, block_size=16)
    engine = engine_of(model)
    run(engine, long_of(num_tokens=200))
    assert model.forwards == [(192,), (8,), (1,), (1,)]
    run(engine, second := long_of(num_tokens=200, temperature=0.0))
    assert second.num_cached_tokens == 192
    check(second)


def test_a_short_prompt_is_not_divided_for_a_snapshot():
    model = RecurrentLogits(max_length=400, block_size=16)
    run(engine_of(model), long_of(num_tokens=63))
    assert model.forwards == [(63,), (1,), (1,)]


def test_the_second_request_with_a_beginning_keeps_its_state_for_the_third():
    """The end of a shared beginning is known only when a second request leaves it."""
    model = RecurrentLogits(max_length=400, block_size=16, num_state_slots=20)
    engine = engine_of(model)
    asked = [long_of(*LONG[200 + i : 300 + i], num_tokens=100) for i in range(3)]
    for sequence in asked:
        run(engine, sequence)
    assert [sequence.num_cached_tokens for sequence in asked] == [0, 0, 96]
    assert (engine.num_snapshot_hits, engine.num_recomputed_tokens) == (1, 96)
    check(*asked)


def test_a_long_prompt_has_snapshots_at_regular_distances_while_slots_are_free(monkeypatch):
    monkeypatch.setattr("genserve.engine.kv_cache_manager._SNAPSHOT_BLOCKS", 8)
    for num_slots, cached in ((20, 256), (2, 0)):
        model = RecurrentLogits(max_num_seqs=1, max_length=400, block_size=16, num_state_slots=num_slots)
        engine = engine_of(model, max_num_batched_tokens=400)
        run(engine, long_of(num_tokens=390))
        run(engine, other := long_of(1, 2, 3, num_tokens=300))
        assert other.num_cached_tokens == cached
        check(other)


def test_requests_with_the_same_prompt_wait_for_the_state_at_its_last_border():
    model = RecurrentLogits(max_length=400, block_size=16)
    engine = engine_of(model, max_num_batched_tokens=64)
    same = [long_of(num_tokens=200, seed=i, temperature=1.0) for i in range(4)]
    run(engine, *same)
    assert [sequence.num_cached_tokens for sequence in same] == [0, 192, 192, 192]
    assert model.forwards[:4] == [(64,), (64,), (64,), (8, 8, 8, 8)]


def test_a_preempted_request_continues_from_its_own_state():
    model = RecurrentLogits(max_num_seqs=2, max_length=64, block_size=4, num_blocks=20)
    engine = engine_of(model)
    pair = [sequence_of(LONG[i : 30 + i], max_tokens=24) for i in (0, 50)]
    run(engine, *pair)
    assert sum(sequence.num_preemptions for sequence in pair) == 1
    assert max(n for forward in model.forwards[2:] for n in forward) < 30, "its prompt was computed again"
    check(*pair)


def test_a_loop_of_logits_requests_computes_one_token_at_each_call():
    model = RecurrentLogits(max_length=400, block_size=16)
    engine = engine_of(model, prefix_cache=False)
    for end in range(30, 50):
        engine.add_logits(logits_request(LONG[:end], max_length=400))
        run(engine)
    assert model.forwards == [(30,), *[(1,)] * 19]


def test_beams_read_one_state_and_write_their_own():
    model = RecurrentLogits(num_state_slots=8)
    engine = engine_of(model)
    search = search_of(LONG[:20], width=4, max_tokens=6)
    run(engine, *search.choices)
    assert model.forwards == [(16,), (4,), *[(1, 1, 1, 1)] * 5]
    assert [choice.token_ids for choice in search.choices] == beams_alone(LONG[:20], width=4, max_tokens=6)


class Wrong(Oracle):
    """Always proposes two right tokens and a wrong one, if it may."""

    def propose(self, request, count):
        right = greedy_answer(request.token_ids, num_tokens=3)
        return [*right[:2], right[2] ^ 1][:count]


def test_the_tokens_of_a_wrong_draft_are_replayed_with_the_next_one_until_they_are_many():
    model = RecurrentLogits()
    run(engine_of(model, draft=Wrong()), sequence := sequence_of([5, 6, 7], max_tokens=20))
    # The prompt; a draft of 3, of which 2 are right; the 3 computed tokens again with the next draft; with
    # 6 of them once more; then 9 are computed without a draft, and their state is kept.
    assert model.forwards[:6] == [(3,), (4,), (7,), (10,), (10,), (4,)]
    check(sequence)


def test_a_right_draft_is_not_computed_again():
    class Right(Oracle):
        def propose(self, request, count):
            return greedy_answer(request.token_ids, num_tokens=count)

    model = RecurrentLogits()
    run(engine_of(model, draft=Right()), sequence := sequence_of([5, 6, 7], max_tokens=13))
    assert model.forwards == [(3,), (6,), (6,)]
    check(sequence)


@pytest.mark.parametrize("seed", range(3))
def test_speculation_changes_no_answer_and_no_log_probability(seed):
    params = {
        "temperature": 1.5, "top_p": 0.9, "repetition_penalty": 1.3, "min_tokens": 20, "seed": seed,
        "logprobs": True, "top_logprobs": 2, "max_tokens": 40, "prompt_logprobs": 1,
    }  # fmt: skip

    def answered(engine: Engine) -> tuple[TokenSequence, list]:
        sequence, found = sequence_of([5, 6, 7], eos_token_ids=[3], **params), []
        engine.add(sequence)
        while (result := engine.step()) is not None:
            assert not result.failed
            for delta in filter(None, (s.pop_delta() for s in result.advanced)):
                found += [*delta.logprobs, *delta.top_logprobs, *delta.prompt_logprobs]
        return sequence, sorted(map(repr, found))

    plain, expected = answered(engine_of(RecurrentLogits()))
    model = RecurrentLogits()
    sequence, found = answered(engine_of(model, draft=Foreseen([plain], error_rate=0.1)))
    assert sequence.token_ids == plain.token_ids
    assert found == expected
    assert len(model.forwards) < 35


def test_a_state_that_a_failed_forward_has_overwritten_is_not_kept():
    model = RecurrentLogits(max_length=400, block_size=16)
    engine = engine_of(model)
    run(engine, first := long_of(num_tokens=100, max_tokens=50), max_steps=5)
    model.poison[POISON] = "raise"
    engine.add(sequence_of([POISON]))
    assert first in engine.step().failed
    run(engine, again := sequence_of([*first.token_ids, 7], max_length=400, max_tokens=3))
    assert again.num_cached_tokens == 96, "the snapshot of the prompt"
    check(again)


def test_states_of_different_salts_are_apart():
    engine = engine_of(RecurrentLogits(max_length=400, block_size=16))
    run(engine, *(sequences := [long_of(num_tokens=200, cache_salt=salt) for salt in "ab"]))
    assert [sequence.num_cached_tokens for sequence in sequences] == [0, 0]


def test_a_model_with_fewer_than_two_slots_for_each_sequence_is_refused():
    with pytest.raises(ValueError, match=r"\b7\b"):
        engine_of(RecurrentLogits(max_num_seqs=4, num_state_slots=7))


def test_slots_snapshot_hits_and_recomputed_tokens_are_metrics():
    metrics, answers = Metrics(), SimpleQueue()
    engine = engine_thread(RecurrentLogits(max_length=400, block_size=16), metrics=metrics)
    for i in range(3):
        token_ids = [*LONG[:100], *LONG[200 + i : 300 + i]]
        engine.submit_logits([logits_request(token_ids, max_length=400, on_logits=answers.put)])
        np.testing.assert_array_equal(answers.get(timeout=60), logits_after(token_ids))
    engine.close()
    found = {name: metrics.registry.get_sample_value(name, {"model": "test"}) for name in STATE_METRICS}
    assert list(found.values()) == [0, 1, 96]


def test_a_model_without_states_has_no_metrics_of_them():
    metrics, answers = Metrics(), SimpleQueue()
    engine = engine_thread(PagedLogits(), metrics=metrics)
    engine.submit_logits([logits_request([1, 2], on_logits=answers.put)])
    answers.get(timeout=60)
    engine.close()
    found = {sample.name for family in metrics.registry.collect() for sample in family.samples}
    assert not found & set(STATE_METRICS)


@pytest.mark.parametrize("seed", range(3))
def test_a_draft_model_with_states_forgets_those_after_wrong_drafts(seed):
    """Sequences take turns in the slots of two, and accept all, some or none of each draft."""
    rng = random.Random(seed)
    model = RecurrentLogits(max_num_seqs=2, num_state_slots=4, num_blocks=100)
    draft = DraftModel(model, vocab_size=VOCAB_SIZE)
    sequences = [sequence_of([i, 6, 7]) for i in range(3)]
    for _ in range(30):
        sequence = rng.choice(sequences)
        if len(sequence.token_ids) > 55:
            continue
        proposed = draft.propose(sequence, 4)
        assert proposed == greedy_answer(sequence.token_ids, num_tokens=4)
        for token_id in [*proposed[: rng.randint(0, 4)], rng.randrange(VOCAB_SIZE)]:
            sequence.append(token_id)


def test_a_draft_model_with_states_computes_accepted_tokens_again_but_no_others():
    model = RecurrentLogits()
    draft, sequence = DraftModel(model, vocab_size=VOCAB_SIZE), sequence_of([5, 6, 7])
    for token_id in [*draft.propose(sequence, 3), 9]:
        sequence.append(token_id)
    draft.propose(sequence, 3)
    assert model.forwards == [(3,), (1,), (1,), (4,), (1,), (1,)]


def test_snapshots_are_dropped_by_their_last_use_but_not_while_a_request_holds_them():
    slots = StateSlots(3)
    states = [SequenceState() for _ in range(3)]
    for block, state in enumerate(states):
        slots.schedule(state, keep=False)
        slots.advance(state, 4)
        slots.keep(block, state)
    slots.free(states[1])
    slots.free(states[2])
    slots.free(SequenceState(slot=slots.share(1)))      # a request that started there and left
    dropped = [slots.schedule(SequenceState(), keep=False) for _ in range(2)]
    assert dropped == [2, 1], "block 0 is older, but a request holds its state"


def test_an_answer_is_not_divided_and_has_its_snapshot_at_its_end(monkeypatch):
    monkeypatch.setattr("genserve.engine.kv_cache_manager._SNAPSHOT_BLOCKS", 12)
    engine = engine_of(RecurrentLogits(max_length=400, block_size=16))
    run(engine, first := long_of(num_tokens=100, max_tokens=110))
    again = sequence_of([*first.token_ids[:200], 7], max_length=400, max_tokens=2)
    run(engine, again)
    assert again.num_cached_tokens == 96, "not 192, which the answer passed"


def test_replayed_tokens_drafts_and_new_rows_stay_within_the_budget_of_a_step():
    """Two sequences with wrong drafts, and a loop that adds a row of one token to each second step."""

    class AlwaysWrong(Oracle):
        def propose(self, request, count):
            return [greedy_answer(request.token_ids, num_tokens=1)[0] ^ 1] * count

    for budget in (4, 7, 12):
        model = RecurrentLogits(max_num_seqs=3)
        engine = engine_of(model, draft=AlwaysWrong(), max_num_batched_tokens=budget)
        sequences = [sequence_of([i, 6, 7], max_tokens=30) for i in range(2)]
        for sequence in sequences:
            engine.add(sequence)
        for end in range(1, 30):
            run(engine, max_steps=1)
            engine.add_logits(logits_request(LONG[:end]))
            run(engine, max_steps=1)
        run(engine)
        assert max(map(sum, model.forwards)) <= budget
        check(*sequences)


def test_a_preempted_request_that_had_a_wrong_draft_starts_without_replayed_tokens():
    kv = KVCacheManager(num_blocks=8, block_size=4, num_state_slots=4)
    request = Request([1, 2, 3])
    assert kv.allocate(request, num_spare=0)
    kv.schedule_states([request], [(4,)])
    request.num_computed_tokens = 3
    kv.go_back(request)
    assert (request.num_computed_tokens, request.num_replayed_tokens) == (0, 3)
    kv.free(request)
    assert request.num_replayed_tokens == 0
    kv.check_integrity([])


def test_a_preempted_search_without_snapshots_computes_its_beams_together(monkeypatch):
    monkeypatch.setattr(KVCacheManager, "_keep_last_state", lambda *arguments: None)
    monkeypatch.setattr(KVCacheManager, "_cache_last_block", lambda *arguments: None)
    model = RecurrentLogits(max_num_seqs=6, max_length=40, block_size=2, num_blocks=54)
    engine = engine_of(model)
    others = [sequence_of([i], max_tokens=38, priority=-1) for i in range(3)]
    run(engine, *others, max_steps=20)
    search = search_of(LONG[:5], width=3, max_tokens=30)
    run(engine, *search.choices)
    assert any(sum(count > 8 for count in forward) >= 3 for forward in model.forwards), "not preempted"
    assert [choice.token_ids for choice in search.choices] == beams_alone(LONG[:5], width=3, max_tokens=30)
    check(*others)
