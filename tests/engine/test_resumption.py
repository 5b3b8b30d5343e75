from __future__ import annotations

import pytest

from genserve.completion import join_deltas
from genserve.engine.admission_control import QueueLimits
from genserve.engine.engine import Engine
from genserve.engine.resumption import RepeatedSequence, ReplayedSequence
from genserve.engine.speculation import Speculation
from genserve.engine.token_sequence import TokenSequence
from genserve.errors import NotResumable, Overloaded
from tests.fakes.drafts import Foreseen
from tests.fakes.engines import GatedLogits, RecordingSink, engine_thread
from tests.fakes.logits import PagedLogits
from tests.fakes.sequences import Clock, sample_loop, sequence_of
from tests.support.representatives import with_extended

PROMPT = [5, 6, 7]
SAMPLED = {
    "temperature": 1.5, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_tokens": 20, "seed": 7,
    "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1, "max_tokens": 30, "dry_multiplier": 1.0,
}  # fmt: skip
KINDS = pytest.mark.parametrize("kind", [ReplayedSequence, RepeatedSequence])


def run(engine, *sequences):
    """Return the deltas of each sequence."""
    deltas = {sequence: [] for sequence in sequences}
    for sequence in sequences:
        engine.add(sequence)
    while (result := engine.step()) is not None:
        engine.check_integrity()
        for error in result.failed.values():
            raise error
        for sequence in result.advanced:
            if (delta := sequence.pop_delta()) is not None:
                deltas[sequence].append(delta)
    return [deltas[sequence] for sequence in sequences]


def resumed(kind, received, **params):
    sequence = sequence_of(PROMPT, kind=kind, eos_token_ids=[3], **params)
    sequence.resume(received)
    return sequence


def undisturbed(**params):
    sequence = sequence_of(PROMPT, eos_token_ids=[3], **params)
    [deltas] = run(Engine(PagedLogits(), decode=sample_loop), sequence)
    return sequence, deltas


@KINDS
@pytest.mark.parametrize("prefix_cache", [True, pytest.param(False, marks=pytest.mark.extended)])
@pytest.mark.parametrize("error_rate", with_extended([0.0, 0.2, None], always=(0.2, None)))
def test_a_resumed_answer_is_the_undisturbed_one_with_drafts_and_preemptions(kind, prefix_cache, error_rate):
    plain, deltas = undisturbed(**SAMPLED)
    drafts = None if error_rate is None else Speculation(Foreseen([plain], error_rate=error_rate))
    model = PagedLogits(max_num_seqs=6, num_blocks=20)
    engine = Engine(model, decode=sample_loop, prefix_cache=prefix_cache, speculation=drafts, clock=Clock())
    answer = plain.token_ids[len(PROMPT) :]
    cuts = range(1, len(deltas))
    sequences = [resumed(kind, answer[:cut], **SAMPLED) for cut in cuts]
    for cut, after in zip(cuts, run(engine, *sequences), strict=True):
        assert join_deltas([*deltas[:cut], *after]) == join_deltas(deltas)
    assert any(sequence.num_preemptions for sequence in sequences)
    if drafts:
        assert max(max(counts) for counts in model.forwards) > 1


def test_replayed_tokens_are_computed_together():
    plain, _ = undisturbed(**SAMPLED)
    model = PagedLogits()
    sequence = resumed(ReplayedSequence, plain.token_ids[3:23], **SAMPLED)
    run(Engine(model, decode=sample_loop), sequence)
    assert model.forwards == [(23,)] + [(1,)] * 9


@KINDS
def test_drafted_tokens_may_extend_beyond_the_received_ones(kind):
    plain, deltas = undisturbed(**SAMPLED)
    engine = Engine(
        PagedLogits(),
        decode=sample_loop,
        speculation=Speculation(Foreseen([plain], error_rate=0.0)),
        clock=Clock(),
    )
    [after] = run(engine, resumed(kind, plain.token_ids[3:6], **SAMPLED))
    assert join_deltas([*deltas[:3], *after]) == join_deltas(deltas)
    assert [len(delta.logprobs) for delta in after] == [len(delta.token_ids) for delta in after]


def test_repeated_tokens_must_be_the_received_ones():
    plain, _ = undisturbed(max_tokens=8)
    *first, last = plain.token_ids[3:6]
    with pytest.raises(NotResumable, match=r"\b3\b"):
        run(
            Engine(PagedLogits(), decode=sample_loop),
            resumed(RepeatedSequence, [*first, last ^ 1], max_tokens=8),
        )
    with pytest.raises(NotResumable, match=r"\b8\b"):
        run(
            Engine(PagedLogits(), decode=sample_loop),
            resumed(RepeatedSequence, [*plain.token_ids[3:], 1], max_tokens=8),
        )


def test_a_repeated_answer_that_expires_fails():
    """There is no finish reason for it that the caller could get."""
    plain, _ = undisturbed(max_tokens=8)
    clock = Clock()
    sequence = sequence_of(PROMPT, kind=RepeatedSequence, max_tokens=8, deadline_s=1.0)
    sequence.resume(plain.token_ids[3:8])
    engine = Engine(PagedLogits(), decode=sample_loop, clock=clock)
    engine.add(sequence)
    engine.step()
    clock.now_s = 2.0
    assert [type(error) for error in engine.step().failed.values()] == [NotResumable]


def test_a_resumed_sequence_goes_before_others_of_its_priority():
    plain, _ = undisturbed(max_tokens=8)
    engine = Engine(PagedLogits(max_num_seqs=1), decode=sample_loop)
    sequences = [sequence_of([i], max_tokens=2) for i in range(2)]
    sequences.append(resumed(ReplayedSequence, plain.token_ids[3:5], max_tokens=8))
    sequences.append(sequence_of([9], max_tokens=2, priority=-1))
    for sequence in sequences:
        engine.add(sequence)
    ended: list[TokenSequence] = []
    while (result := engine.step()) is not None:
        ended += [sequence for sequence in result.advanced if sequence.finished]
    assert ended == [sequences[i] for i in (3, 2, 0, 1)]


def test_a_resumed_sequence_is_accepted_into_a_full_queue():
    model, sink = GatedLogits(max_num_seqs=1), RecordingSink()
    engine = engine_thread(model, limits=QueueLimits(max_requests=0))
    try:
        engine.submit_sequences(sequence_of(PROMPT, max_tokens=8), sink=sink)
        with pytest.raises(Overloaded):
            engine.submit_sequences(sequence_of(PROMPT, max_tokens=8), sink=sink)
        plain, _ = undisturbed(max_tokens=8)
        engine.submit_sequences(resumed(ReplayedSequence, plain.token_ids[3:5], max_tokens=8), sink=sink)
    finally:
        model.open_gate()
        engine.drain(timeout_s=30)
        engine.close()
    assert [one.content.usage.completion_tokens for one in sink.outputs if one.content.usage] == [8, 8]
