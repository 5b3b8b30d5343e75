"""Answers of hybrid models, to the bit: alone, among others, in chunks, after snapshots and wrong drafts."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from genserve.completion import TokenLogprob
from genserve.engine.engine import Engine
from genserve.engine.speculation import Speculation
from genserve.engine.token_sequence import TokenSequence
from genserve.textmodel.runtimes.onnx_logits import OnnxLogits
from tests.export.graphs import write_graph
from tests.export.tiny_models import TINY_MODELS, tiny_checkpoint
from tests.fakes.drafts import Foreseen
from tests.fakes.sequences import Clock, sample_loop, sequence_of
from tests.support.representatives import with_extended

HYBRIDS = with_extended(["lfm2", "qwen3_5", "falcon_h1"], always=["lfm2"])
MAX_LENGTH = 240


@pytest.fixture(scope="module", params=HYBRIDS)
def model(request, tmp_path_factory) -> Iterator[OnnxLogits]:
    folder = tmp_path_factory.mktemp(request.param)
    config = TINY_MODELS[request.param] | {"max_position_embeddings": MAX_LENGTH}
    checkpoint = tiny_checkpoint(folder / "checkpoint", **config)
    logits = write_graph(checkpoint, folder / "graph").logits(max_num_seqs=4, max_length=MAX_LENGTH)
    yield logits
    logits.close()


def asked(model: OnnxLogits, *, count: int = 4) -> list[TokenSequence]:
    """Sequences of which pairs share a long beginning."""
    rng = random.Random(0)
    common = [rng.randrange(model.vocab_size) for _ in range(150)]
    return [
        sequence_of(
            [*common[: 150 - 40 * (i % 2)], *(rng.randrange(model.vocab_size) for _ in range(11 + i))],
            max_length=MAX_LENGTH,
            vocab_size=model.vocab_size,
            max_tokens=30,
            temperature=1.0,
            seed=i,
            logprobs=True,
        )
        for i in range(count)
    ]


def answers(engine: Engine, *sequences: TokenSequence) -> dict[TokenSequence, list[TokenLogprob]]:
    """Run the sequences, and return the log-probabilities of their answers."""
    found: dict[TokenSequence, list[TokenLogprob]] = {sequence: [] for sequence in sequences}
    for sequence in sequences:
        engine.add(sequence)
    while (result := engine.step()) is not None:
        engine.check_integrity()
        assert not result.failed
        for sequence in result.advanced:
            delta = sequence.pop_delta()
            found[sequence] += delta.logprobs if delta else ()
    return found


def engine_of(model: OnnxLogits, **options) -> Engine:
    return Engine(model, decode=sample_loop, clock=Clock(), **options)


@pytest.fixture(scope="module")
def alone(model) -> tuple[list[TokenSequence], list[list[TokenLogprob]]]:
    """The answers, each computed by an engine that has seen nothing, in as few steps as there can be."""
    sequences = asked(model)
    found = [answers(engine_of(model, prefix_cache=False), sequence)[sequence] for sequence in sequences]
    return sequences, found


@pytest.mark.parametrize("chunk", [7, 64])
def test_company_chunks_and_shared_states_change_no_bit(model, alone, chunk):
    engine = engine_of(model, max_num_batched_tokens=chunk)
    assert [*answers(engine, *asked(model)).values()] == alone[1]
    again = asked(model)
    assert [*answers(engine, *again).values()] == alone[1]
    assert min(sequence.num_cached_tokens for sequence in again) >= 96, "from snapshots"


def test_wrong_drafts_change_no_bit(model, alone):
    drafts = Foreseen(alone[0], error_rate=0.2)
    engine = engine_of(model, speculation=Speculation(drafts))
    sequences = asked(model)
    assert [*answers(engine, *sequences).values()] == alone[1]
    for sequence in sequences:
        assert 0 < sequence.num_accepted_tokens < sequence.num_drafted_tokens


def test_what_follows_an_answer_that_was_left_is_the_same_to_the_bit(model):
    """A client leaves in the middle of an answer, and asks for what follows what it has."""
    engine = engine_of(model)
    [left] = asked(model, count=1)
    engine.add(left)
    for _ in range(12):
        engine.step()
    engine.remove([left])

    def following() -> TokenSequence:
        return sequence_of(
            left.token_ids, max_length=MAX_LENGTH, vocab_size=model.vocab_size, max_tokens=8, logprobs=True
        )

    warm, cold = following(), following()
    found = answers(engine, warm)[warm]
    assert warm.num_cached_tokens == len(left.token_ids) - 1
    assert found == answers(engine_of(model, prefix_cache=False), cold)[cold]
