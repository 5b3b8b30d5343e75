"""Deadlines of an answer whose replica sends nothing, or that no replica has accepted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from genserve.completion import Delta, join_deltas
from genserve.deploy.ingress import remote_engine
from genserve.deploy.ingress.failover import Failover
from genserve.deploy.ingress.live_replicas import LiveReplicas
from genserve.deploy.ingress.remote_engine import RemoteEngine, RemoteLogits
from genserve.deploy.replica.model_replica import ModelReplica
from genserve.deploy.replica.replica_load import ReplicaLoad
from genserve.deploy.replica_messages import Call
from genserve.engine.admission_control import REPLICAS_FULL
from genserve.engine.generation_request import GenerationOutput, GenerationRequest
from genserve.errors import Overloaded
from genserve.generation_metrics import Metrics
from genserve.sampling.sampling_params import SamplingParams
from genserve.textmodel.sequence_builder import SequenceBuilder
from tests.support.thinking_model import END, copy_with_tags

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

    async def generate(self, _call: Call[GenerationRequest]) -> AsyncIterator[Sequence[Delta]]:
        for delta in self._deltas:
            yield [delta]
        await asyncio.Event().wait()


class Deltas(list[Delta]):
    """An `OutputSink` that keeps the deltas."""

    def deliver(self, outputs: Sequence[GenerationOutput]) -> None:
        self += [one.content for one in outputs if isinstance(one.content, Delta)]


def request(replica: ModelReplica, *, seeds: tuple[int, ...] = (3,), **params: Any) -> GenerationRequest:
    return GenerationRequest(
        model="tiny",
        prompt=PROMPT,
        prompt_token_ids=tuple(replica.repository.text_model().encode(PROMPT)),
        params=SamplingParams(ignore_eos=True, **params),
        seeds=seeds,
        arrived_s=time.monotonic(),
    )


async def generated(replica: ModelReplica, **params: Any) -> list[Delta]:
    call = Call(identity=replica.identity, request=request(replica, **params))
    return [delta async for some in replica.generate(call) for delta in some]


def engine_over(
    replicas: LiveReplicas, builder: SequenceBuilder, *, vocab_size: int, metrics: Metrics
) -> RemoteEngine:
    return RemoteEngine(
        "tiny",
        replicas,
        event_loop=asyncio.get_running_loop(),
        logits=RemoteLogits("tiny", replicas, identity="", vocab_size=vocab_size, metadata={}),
        builder=builder,
        rejections=metrics.rejections,
    )


async def expired(
    replica: ModelReplica, received: Sequence[Delta], *, seeds: tuple[int, ...] = (3,), **params: Any
) -> list[Delta]:
    """Return the deltas of a call whose deadline passes after some deltas were received."""
    model = replica.repository.text_model()
    replicas = LiveReplicas("tiny", SilentReplicas(received))
    engine = engine_over(replicas, model.builder, vocab_size=model.vocab_size, metrics=Metrics())
    sink = Deltas()
    engine.submit(request(replica, seeds=seeds, max_time_ms=1, **params), sink=sink)
    await asyncio.to_thread(engine.drain, timeout_s=60)
    assert not engine.num_accepted
    return sink


async def test_an_answer_ends_at_its_deadline_with_the_text_that_was_held_back(replica):
    """The text equals the text of an answer with the same tokens that ends otherwise."""
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


class SlowReplicas:
    """A `ReplicaSet` of one replica, which pauses after some tokens of a request that may reason on.

    Attributes:
        requests: what the replica was asked for.
        paused: set when it pauses.
    """

    def __init__(self, replica: ModelReplica) -> None:
        self.requests: list[GenerationRequest] = []
        self.paused = asyncio.Event()
        self._replica = replica

    async def generate(self, call: Call[GenerationRequest]) -> AsyncIterator[Sequence[Delta]]:
        self.requests.append(call.request)
        num_tokens = 0
        async for deltas in self._replica.generate(replace(call, identity=self._replica.identity)):
            for delta in deltas:
                yield [delta]
                num_tokens += len(delta.token_ids)
                if num_tokens > 3 and not call.request.ends_reasoning:
                    self.paused.set()
                    await asyncio.Event().wait()


async def test_an_answer_goes_on_without_the_rest_of_its_reasoning(tiny_repository, tmp_path):
    replica = ModelReplica([copy_with_tags(tiny_repository, tmp_path / "repository")], "tiny")
    try:
        model, slow, sink = replica.repository.text_model(), SlowReplicas(replica), Deltas()
        live = LiveReplicas("tiny", Failover(slow, name="tiny", metrics=Metrics()))
        engine = engine_over(live, model.builder, vocab_size=model.vocab_size, metrics=Metrics())
        limits = {"max_tokens": 20, "suppress_tokens": (END,), "reasoning_budget_message": "so."}
        asked = replace(request(replica, temperature=1.0, **limits), begins_reasoning=True)
        engine.submit(asked, sink=sink)
        await slow.paused.wait()
        engine.end_reasoning(asked)
        engine.end_reasoning(asked)     # again
        await asyncio.to_thread(engine.drain, timeout_s=60)
        answer = join_deltas(sink)
        message = tuple(model.tokenizer.encode("so.", add_special_tokens=False))
        end = answer.token_ids.index(END)
        assert answer.token_ids[end - len(message) : end] == message
        assert 4 + len(message) <= end < 8 + len(message)
        assert answer.usage.completion_tokens == len(answer.token_ids) == 20
        assert [one.ends_reasoning for one in slow.requests] == [False, True]
    finally:
        replica.close()


class FullReplicas(SilentReplicas):
    """A `ReplicaSet` that reports how many more requests it has room for."""

    num_free: int | None = None

    def load(self, _identity: str) -> ReplicaLoad:
        return ReplicaLoad(num_free=self.num_free, seconds_per_slot=0.2)


async def test_a_request_for_which_all_replicas_are_full_is_rejected_before_its_prompt_is_rendered(replica):
    replicas, metrics = FullReplicas([]), Metrics()
    live = LiveReplicas("tiny", replicas)
    builder = replica.repository.text_model().builder
    engine = engine_over(live, builder, vocab_size=320, metrics=metrics)
    engine.reserve(9).release()     # nothing is known
    replicas.num_free = 3
    with engine.reserve(2):
        with pytest.raises(Overloaded, match=r"\b1\b") as rejected:
            engine.reserve(2)
        engine.reserve(2, priority=-1).release()
        engine.reserve(2, is_resumed=True).release()
    engine.reserve(3).release()
    assert rejected.value.reason == REPLICAS_FULL
    assert rejected.value.retry_after_s == pytest.approx(0.1)
    labels = {"model": "tiny", "reason": "replicas_full"}
    assert metrics.registry.get_sample_value("genserve_admission_rejections_total", labels) == 1
