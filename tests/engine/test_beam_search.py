"""Beam searches in an engine: with other requests, their slots, and what they stream."""

from __future__ import annotations

import random
from itertools import chain

import numpy as np
import pytest
import torch

from genserve.completion import Delta, FinishReason, join_deltas
from genserve.engine.beam_search import BeamSearch
from genserve.engine.engine import Engine
from genserve.engine.kv_cache_manager import max_tokens_per_sequence
from genserve.engine.token_sequence import TokenSequence
from genserve.errors import InvalidRequest
from tests.fakes.logits import VOCAB_SIZE, PagedLogits, greedy_answer, logits_after
from tests.fakes.sequences import Clock, IdText, sample_loop, sequence_of
from tests.support.representatives import with_extended

ENDS = range(1, 9)


def search_of(prompt, *, width=3, n=1, stop_at=None, **options) -> BeamSearch:
    if stop_at is not None:
        options["stop"] = (f"<{stop_at}>",)
    answers = [sequence_of(prompt, use_beam_search=True, stop_at=stop_at, **options) for _ in range(n)]
    return BeamSearch(answers, width=width, text=IdText(stop_at))


def add(engine: Engine, group: BeamSearch) -> None:
    for answer in group.choices:
        engine.add(answer)


def run(engine: Engine) -> int:
    """Run to the end; return the number of preemptions."""
    num_preempted = 0
    while (result := engine.step()) is not None:
        engine.check_integrity()
        assert not result.failed
        num_preempted += result.num_preempted
    assert engine.num_running == engine.num_waiting == 0
    return num_preempted


def answers_of(group: BeamSearch) -> list[list[int]]:
    return [answer.token_ids[answer.num_prompt_tokens :] for answer in group.choices]


def alone(prompt, **options) -> list[list[int]]:
    """Return the answers of a search that runs alone."""
    engine, group = Engine(PagedLogits(max_num_seqs=8), decode=sample_loop), search_of(prompt, **options)
    add(engine, group)
    run(engine)
    return answers_of(group)


def random_prompt(rng: random.Random, longest: int = 20) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, longest))]


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("seed", with_extended(range(15), always=range(5)))
def test_other_requests_and_preemptions_never_change_an_answer(seed, prefix_cache):
    """Searches and ordinary sequences over few slots and a cache that cannot hold them all."""
    rng = random.Random(seed)
    model = PagedLogits(max_num_seqs=rng.choice([3, 4, 7, 8]), num_blocks=rng.choice([30, 40, 100]))
    engine = Engine(model, decode=sample_loop, max_num_batched_tokens=8, prefix_cache=prefix_cache)
    arrivals = sorted(rng.randrange(30) for _ in range(10))
    groups: list[tuple[BeamSearch, dict]] = []
    others: list[TokenSequence] = []
    cancelled: set[BeamSearch | TokenSequence] = set()
    step = 0
    while arrivals or engine.num_running or engine.num_waiting:
        while arrivals and arrivals[0] <= step:
            arrivals.pop(0)
            prompt = random_prompt(rng)
            if rng.random() < 0.5:
                width = rng.choice([2, 3])
                options = {"width": width, "n": rng.randint(1, width), "max_tokens": rng.randint(1, 15)}
                options |= {"eos_token_ids": [1, 2, 3], "repetition_penalty": 1.1}
                if rng.random() < 0.4:
                    options |= {"num_beam_groups": width, "diversity_penalty": 0.7}
                groups.append((search_of(prompt, **options), {"prompt": prompt} | options))
                add(engine, groups[-1][0])
            else:
                others.append(sequence_of(prompt, max_tokens=rng.randint(1, 15)))
                engine.add(others[-1])
        if groups and rng.random() < 0.03:
            victim = rng.choice(groups)[0]
            if not victim.done:
                cancelled.add(victim)
                engine.remove([victim.choices[-1]])
        result = engine.step()
        engine.check_integrity()
        assert result is None or not result.failed
        step += 1
    for group, options in groups:
        if group not in cancelled:
            assert answers_of(group) == alone(**options)
    for other in others:
        prompt = other.token_ids[: other.num_prompt_tokens]
        assert other.token_ids[len(prompt) :] == greedy_answer(prompt, num_tokens=other.params.max_tokens)


def test_searches_that_do_not_fit_together_take_turns_with_the_same_answers():
    model = PagedLogits(max_num_seqs=6, max_length=32, block_size=4, num_blocks=12)
    engine = Engine(model, decode=sample_loop)
    groups = [search_of([i, 9, 9], max_tokens=13, max_length=32) for i in (1, 2)]
    for group in groups:
        add(engine, group)
    assert run(engine) > 0
    assert [answers_of(g) for g in groups] == [alone([i, 9, 9], max_tokens=13) for i in (1, 2)]


def test_all_beams_share_the_prompt_and_a_step_is_one_forward():
    model = PagedLogits(max_num_seqs=4)
    engine = Engine(model, decode=sample_loop)
    add(engine, search_of(range(20), width=4, max_tokens=5))
    run(engine)
    assert model.forwards == [(20,), *[(1, 1, 1, 1)] * 4]
    assert engine.cache_usage == 0


def test_only_a_last_block_that_two_beams_write_is_copied():
    model = PagedLogits(max_num_seqs=4)
    engine = Engine(model, decode=sample_loop)
    group = search_of(range(22), width=4, max_tokens=8)
    add(engine, group)
    engine.step()
    assert model.copies == []
    while not group.done:
        parents = [tuple(beam.token_ids[:-1]) for beam in group.beams]
        in_block = group.beams[0].num_computed_tokens % model.block_size != 0
        num_copies = len(model.copies)
        engine.step()
        expected = len(parents) - len(set(parents)) if in_block else 0
        assert len(model.copies) - num_copies == expected
    assert model.copies


def test_a_search_waits_until_all_its_beams_have_a_slot_and_is_not_overtaken():
    engine = Engine(PagedLogits(max_num_seqs=3), decode=sample_loop)
    engine.add(first := sequence_of([1], max_tokens=6))
    engine.step()
    add(engine, group := search_of([5, 6], max_tokens=4))
    engine.add(late := sequence_of([7], max_tokens=4))
    while not first.finished:
        engine.step()
        assert not group.beams[0].num_computed_tokens
        assert not late.num_computed_tokens
    run(engine)
    assert answers_of(group) == alone([5, 6], max_tokens=4)


@pytest.mark.parametrize("seed", range(40))
def test_beam_groups_are_those_of_a_plain_diverse_search(seed):
    rng = random.Random(seed)
    num_groups, width = rng.choice([(2, 1), (3, 1), (2, 2), (3, 2)])
    prompt, penalty, num_tokens = random_prompt(rng), rng.choice([0.3, 1.0, 5.0]), rng.choice([1, 2, 6, 10])
    n = rng.randint(1, num_groups * width)
    options = {"length_penalty": rng.choice([0.0, 1.0]), "max_tokens": num_tokens, "early_stopping": True}
    options |= {"num_beam_groups": num_groups, "diversity_penalty": penalty, "eos_token_ids": ENDS}
    found = alone(prompt, width=num_groups * width, n=n, **options)
    expected = plain_diverse_search(
        prompt,
        num_groups=num_groups,
        width=width,
        penalty=penalty,
        length_penalty=options["length_penalty"],
        ends=ENDS,
        num_tokens=num_tokens,
    )
    assert found == expected[:n]


def plain_diverse_search(
    prompt, *, num_groups, width, penalty, length_penalty, ends, num_tokens
) -> list[list[int]]:
    """Group after group, all continuations in one sorted list; `width` answers end a group."""
    beams = [[(0.0, [])] for _ in range(num_groups)]
    finished: list[list[tuple[float, list[int]]]] = [[] for _ in range(num_groups)]
    for step in range(1, num_tokens + 1):
        taken = [0] * VOCAB_SIZE
        for group in range(num_groups):
            if len(finished[group]) == width:
                continue
            following = []
            for score, answer in beams[group]:
                row = torch.from_numpy(logits_after([*prompt, *answer]).copy()).log_softmax(0).tolist()
                following += [
                    (score + row[token_id] - penalty * taken[token_id], [*answer, token_id])
                    for token_id in range(VOCAB_SIZE)
                ]
            following.sort(reverse=True)
            for score, answer in following[:width]:
                if answer[-1] in ends or step == num_tokens:
                    finished[group].append((score / step**length_penalty, answer))
            finished[group] = sorted(finished[group], reverse=True)[:width]
            beams[group] = [one for one in following if one[1][-1] not in ends][:width]
            for _, answer in beams[group] if step < num_tokens else ():
                taken[answer[-1]] += 1
    return [answer for _, answer in sorted(chain(*finished), reverse=True)]


def test_tokens_streamed_before_the_end_are_a_prefix_of_every_answer():
    """Deltas only append, and some come before the last."""
    num_early = 0
    for seed in range(30):
        prompt = random_prompt(random.Random(seed))
        engine = Engine(PagedLogits(), decode=sample_loop)
        group = search_of(prompt, n=2, max_tokens=12, eos_token_ids=[1, 2])
        add(engine, group)
        deltas: list[list[Delta]] = [[], []]
        while (result := engine.step()) is not None:
            for answer in result.advanced:
                if (delta := answer.pop_delta()) is not None:
                    deltas[group.choices.index(answer)].append(delta)
        for parts, answer in zip(deltas, answers_of(group), strict=True):
            whole = join_deltas(parts)
            assert list(whole.token_ids) == answer
            num_early += len(parts) > 1
    assert num_early > 10


def test_logprobs_are_those_of_the_winning_beam_before_any_processor():
    engine = Engine(PagedLogits(), decode=sample_loop)
    group = search_of(
        [4, 5], n=2, max_tokens=8, logprobs=True, top_logprobs=2, repetition_penalty=1.5, eos_token_ids=[1]
    )
    add(engine, group)
    run(engine)
    for answer in group.choices:
        delta = answer.pop_delta()
        assert delta is not None
        history = [4, 5]
        for token_id, logprob, top in zip(delta.token_ids, delta.logprobs, delta.top_logprobs, strict=True):
            expected = torch.from_numpy(logits_after(history).copy()).log_softmax(0)
            assert logprob == pytest.approx(expected[token_id].item(), abs=1e-5)
            assert [one for one, _ in top] == expected.topk(2).indices.tolist()
            history.append(token_id)


def test_a_stop_string_completes_an_answer_as_an_ending_token_does():
    """A stop string of one token is the same as that stop token, except for the text."""
    by_token, by_text = (
        alone([8, 9], n=3, max_tokens=10, length_penalty=0.0, **stop)
        for stop in ({"stop_token_ids": (17,)}, {"stop_at": 17})
    )
    assert by_token == by_text
    assert any(17 in answer for answer in by_text)


def test_the_cost_of_a_candidate_with_stop_strings_does_not_grow_with_its_answer():
    class Counting(IdText):
        def push(self, token_id):
            pushed.append(token_id)
            return super().push(token_id)

    counts = []
    for num_tokens in (10, 20):
        pushed = []
        answer = sequence_of([8, 9], use_beam_search=True, stop=("x",), max_tokens=num_tokens)
        engine = Engine(PagedLogits(), decode=sample_loop)
        add(engine, BeamSearch([answer], width=3, text=Counting()))
        run(engine)
        counts.append(len(pushed))
    assert counts[1] - counts[0] <= 10 * (6 + 3), "six candidates and three beams in each step"


def test_fewer_allowed_tokens_than_beams_leave_fewer_beams():
    """Two tokens are allowed: the first step leaves two beams, the next four, of which three continue."""
    group_options = {"n": 3, "max_tokens": 4, "allowed_token_ids": (6, 7), "length_penalty": 0.0}
    answers = alone([1, 2], **group_options)
    scored = []
    for code in range(16):
        history = [1, 2]
        score = 0.0
        for bit in range(4):
            token_id = 6 + (code >> bit & 1)
            row = logits_after(history).astype(np.float64)
            score += row[token_id] - np.log(np.exp(row).sum())
            history.append(token_id)
        scored.append((score, history[2:]))
    assert len({tuple(answer) for answer in answers}) == 3
    assert answers[0] in [history for _, history in sorted(scored)[-4:]]


def test_rules_that_leave_no_token_fail_the_search_and_no_other():
    engine = Engine(PagedLogits(), decode=sample_loop)
    group = search_of([1, 2], n=2, max_tokens=9, allowed_token_ids=(6,), no_repeat_ngram_size=1)
    other = sequence_of([3], max_tokens=9)
    add(engine, group)
    engine.add(other)
    failed = {}
    while (result := engine.step()) is not None:
        engine.check_integrity()
        failed |= result.failed
    assert set(failed) == set(group.choices)
    assert all(isinstance(error, InvalidRequest) for error in failed.values())
    assert other.finish_reason is FinishReason.LENGTH


def test_a_failing_detokenizer_fails_its_search_and_no_other():
    class Broken(IdText):
        def push(self, token_id):
            raise RuntimeError("no text")

    engine = Engine(PagedLogits(), decode=sample_loop)
    answer = sequence_of([5, 6], use_beam_search=True, stop=("x",))
    add(engine, BeamSearch([answer], width=2, text=Broken()))
    other = search_of([7], max_tokens=4, width=2)
    add(engine, other)
    result = engine.step()
    assert [error.message for error in result.failed.values()] == ["beam search failed"]
    run(engine)
    assert answers_of(other) == alone([7], max_tokens=4, width=2)


@pytest.mark.parametrize("effect", ["nan", "raise"])
def test_a_failing_forward_fails_all_answers_and_frees_all_blocks(effect):
    model = PagedLogits()
    model.poison[5] = effect
    engine = Engine(model, decode=sample_loop)
    group = search_of([5, 6], n=2, max_tokens=4)
    add(engine, group)
    result = engine.step()
    assert result is not None
    assert set(result.failed) == set(group.choices)
    assert engine.num_running == engine.num_waiting == 0
    engine.check_integrity()


def test_logits_on_another_device_give_the_same_answers():
    class TorchLogits(PagedLogits):
        def forward(self, batch):
            return torch.from_numpy(super().forward(batch))

    engine, group = Engine(TorchLogits(), decode=sample_loop), search_of([3, 4], n=2, max_tokens=8)
    add(engine, group)
    run(engine)
    assert answers_of(group) == alone([3, 4], n=2, max_tokens=8)


def test_the_prompt_of_a_search_is_read_from_the_prefix_cache_and_stays_there():
    engine = Engine(PagedLogits(max_num_seqs=8), decode=sample_loop)
    prompt = list(range(30))
    groups = [search_of(prompt, max_tokens=5) for _ in range(2)]
    for group in groups:
        add(engine, group)
        run(engine)
    assert [group.choices[0].num_cached_tokens for group in groups] == [0, 28]
    assert answers_of(groups[0]) == answers_of(groups[1])


def test_an_expired_search_returns_its_best_hypotheses():
    clock = Clock()
    engine = Engine(PagedLogits(), decode=sample_loop, clock=clock)
    group = search_of([3, 4], n=2, max_tokens=20, deadline_s=5.0)
    add(engine, group)
    for _ in range(4):
        engine.step()
    clock.now_s = 6.0
    engine.step()
    assert [answer.stop_reason for answer in group.choices] == ["deadline"] * 2
    assert answers_of(group) == alone([3, 4], n=2, max_tokens=5)
    assert engine.num_running == 0
    engine.check_integrity()


@pytest.mark.parametrize("budget", [64, 68, 100, 128, 200, 256])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_the_longest_accepted_search_finishes(budget, width):
    model = PagedLogits(max_num_seqs=4, max_length=64, block_size=4, num_blocks=budget // 4)
    engine = Engine(model, decode=sample_loop)
    longest = max_tokens_per_sequence(model, width)
    assert width * (longest + 4) > budget or longest == 64
    for num_prompt_tokens in (1, longest - 1):
        group = search_of([7] * num_prompt_tokens, width=width, max_length=longest)
        add(engine, group)
        assert run(engine) == 0
        assert len(group.choices[0].token_ids) == longest
