"""Deadlines of an answer whose replica sends nothing, or that no replica has taken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from genserve.completion import Delta, join_deltas
from genserve.deploy.ingress import remote_engine
from genserve.deploy.ingress.live_replicas import LiveReplicas
from genserve.deploy.ingress.remote_engine import RemoteEngine
from genserve.deploy.replica.model_replica import ModelReplica
from genserve.deploy.replica_messages import GenerationCall
from genserve.sampling.sampling_params import SamplingParams

PROMPT = "Tell me"


@pytest.fixture(scope="module")
def replica(tiny_repository: Path) -> Iterator[ModelReplica]:
    replica = ModelReplica([tiny_repository], "tiny")
    yield replica
    replica.close()


@pytest.fixture(autouse=True)
def no_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_engine, "DEADLINE_MARGIN_S", 0.0)


class SilentReplicas:
    """A `ReplicaSet` that sends some deltas, and then nothing more."""

    def __init__(self, deltas: Sequence[Delta]) -> None:
        self._deltas = deltas

    async def generate(self, _call: GenerationCall) -> AsyncIterator[Sequence[Delta]]:
        for delta in self._deltas:
            yield [delta]
        await asyncio.Event().wait()


class Deltas(list[Delta]):
    """An `OutputSink` that keeps the deltas."""

    def deliver(self, outputs: Sequence[tuple[Any, Delta]]) -> None:
        self += [delta for _, delta in outputs]


async def generated(replica: ModelReplica, **params: Any) -> list[Delta]:
    call = GenerationCall(
        model="tiny",
        prompt=PROMPT,
        prompt_token_ids=tuple(replica.repository.text_model().encode(PROMPT)),
        params=SamplingParams(ignore_eos=True, **params),
        seeds=(3,),
    )
    return [delta async for some in replica.generate(call) for delta in some]


async def expired(
    replica: ModelReplica, received: Sequence[Delta], *, seeds: tuple[int, ...] = (3,), **params: Any
) -> list[Delta]:
    """Return the deltas of a call whose deadline passes behind those that were received."""
    model = replica.repository.text_model()
    sequences = model.inputs.sequences(
        PROMPT,
        SamplingParams(ignore_eos=True, max_time_ms=1, **params),
        token_ids=model.encode(PROMPT),
        begins_reasoning=False,
        seeds=seeds,
    )
    engine = RemoteEngine(
        "tiny",
        LiveReplicas("tiny", SilentReplicas(received)),
        event_loop=asyncio.get_running_loop(),
        logits=model.logits,
        capacity=2,
    )
    sink = Deltas()
    engine.submit(*sequences, sink=sink)
    await asyncio.to_thread(engine.drain, timeout_s=60)
    assert not engine.num_accepted
    return sink


async def test_an_answer_ends_at_its_deadline_with_the_text_that_was_held_back(replica):
    """It is that of an answer with the same tokens and another end."""
    stop = join_deltas(await generated(replica, max_tokens=5)).text[-2:] + "\0"
    expected = join_deltas(await generated(replica, max_tokens=5, stop=(stop,)))
    received = [Delta(text=expected.text[:-2], token_ids=expected.token_ids)]
    answer = join_deltas(await expired(replica, received, stop=(stop,)))
    assert replace(answer, usage=expected.usage) == replace(expected, stop_reason="deadline")
    assert answer.usage.completion_tokens == 5


async def test_answers_that_no_replica_begins_end_empty(replica):
    [delta] = await expired(replica, [])
    assert (delta.text, delta.token_ids, delta.stop_reason) == ("", (), "deadline")
    assert delta.usage is not None
    assert (delta.usage.prompt_tokens > 0, delta.usage.completion_tokens) == (True, 0)


async def test_the_answers_of_a_search_end_together(replica):
    deltas = await expired(replica, [], seeds=(3, 4), use_beam_search=True, beam_width=3)
    assert [(delta.token_ids, delta.stop_reason) for delta in deltas] == [((), "deadline")] * 2
