"""A replica answers the calls of an ingress as its engine does."""

from __future__ import annotations

import asyncio
import pickle
import shutil
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from genserve.completion import Completion, join_deltas
from genserve.deploy.replica.model_replica import ModelReplica
from genserve.deploy.replica_messages import Call
from genserve.engine.delta_streams import DeltaStream
from genserve.engine.generation_request import GenerationRequest
from genserve.errors import Closed, Overloaded, ReplicaLost
from genserve.repository.options import RepositoryOptions
from genserve.sampling.sampling_params import SamplingParams
from tests.fakes.local_replicas import LocalReplicas
from tests.support.python_models import ADD, write_model
from tests.support.step_gate import StepGate

PARAMS = SamplingParams(max_tokens=12, temperature=0.8, ignore_eos=True)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """The event loop of the replica."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def replica(tiny_repository: Path) -> Iterator[ModelReplica]:
    replica = ModelReplica([tiny_repository], "tiny")
    yield replica
    replica.close()


def call(
    replica: ModelReplica, text: str = "Hello", *, params: SamplingParams = PARAMS
) -> Call[GenerationRequest]:
    token_ids = replica.repository.text_model().encode(text)
    request = GenerationRequest(
        model="tiny", prompt=text, prompt_token_ids=tuple(token_ids), params=params, seeds=(7,)
    )
    copied: Call[GenerationRequest] = pickle.loads(
        pickle.dumps(Call(identity=replica.identity, request=request))
    )
    return copied


async def whole(replicas: LocalReplicas, call: Call[GenerationRequest]) -> Completion:
    return join_deltas([delta async for deltas in replicas.generate(call) for delta in deltas])


def test_answers_with_the_text_of_a_request_to_the_model(
    replica: ModelReplica, runner: asyncio.Runner
) -> None:
    model = replica.repository.text_model()
    request = model.prepare("Hello", SamplingParams(max_tokens=12, temperature=0.8, seed=7, ignore_eos=True))
    expected = join_deltas(DeltaStream(model.engine, request))
    assert runner.run(whole(LocalReplicas(replica), call(replica))) == expected


def test_a_closed_iterator_cancels_its_sequence(replica: ModelReplica, runner: asyncio.Runner) -> None:
    engine = replica.repository.text_model().engine

    async def first_deltas() -> None:
        endless = SamplingParams(ignore_eos=True)
        async with aclosing(replica.generate(call(replica, params=endless))) as items:
            await anext(items)

    runner.run(first_deltas())
    engine.drain(timeout_s=30)
    assert engine.num_accepted == 0


def test_a_full_queue_rejects_before_the_first_delta(tiny_repository: Path) -> None:
    replica = ModelReplica([tiny_repository], "tiny", options=RepositoryOptions(max_queue=1))
    capacity = replica.repository.text_model().engine.capacity

    async def too_many() -> None:
        endless = call(replica, params=SamplingParams(ignore_eos=True))
        streams = [replica.generate(endless) for _ in range(capacity)]
        first = [asyncio.ensure_future(anext(stream)) for stream in streams]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await anext(replica.generate(endless))
        for task in first:
            task.cancel()
        await asyncio.gather(*first, return_exceptions=True)

    try:
        asyncio.run(too_many())
    finally:
        replica.close()


def test_an_answer_without_a_token_at_its_deadline_is_none_of_its_own(
    replica: ModelReplica, runner: asyncio.Runner
) -> None:
    """A request with several choices makes a call for each; the ingress knows whether all are empty."""
    model = replica.repository.text_model()
    gate = StepGate(model)
    gate.shut()

    async def expired() -> Completion:
        running = [
            asyncio.ensure_future(whole(LocalReplicas(replica), call(replica)))
            for _ in range(model.max_num_seqs)
        ]
        while model.engine.num_accepted < len(running):
            await asyncio.sleep(0)
        late = call(replica, params=replace(PARAMS, max_time_ms=1))
        waiting = asyncio.ensure_future(whole(LocalReplicas(replica), late))
        while model.engine.num_accepted == len(running):
            await asyncio.sleep(0)
        until_s = model.engine.now_s + 0.002
        while model.engine.now_s < until_s:
            await asyncio.sleep(0)
        gate.open()
        await asyncio.gather(*running)
        return await waiting

    try:
        found = runner.run(expired())
    finally:
        gate.remove()
    assert (found.stop_reason, found.token_ids) == ("deadline", ())


def test_a_killed_replica_ends_its_calls(replica: ModelReplica, runner: asyncio.Runner) -> None:
    async def killed() -> None:
        replicas = LocalReplicas(replica)
        endless = call(replica, params=SamplingParams(ignore_eos=True))
        deltas = replicas.generate(endless)
        await anext(deltas)
        replicas.kill(0)
        with pytest.raises(ReplicaLost):
            await anext(deltas)

    runner.run(killed())


def test_a_closed_replica_rejects_what_comes(tiny_repository: Path) -> None:
    replica = ModelReplica([tiny_repository], "tiny")
    later = call(replica)
    replica.close()
    with pytest.raises(Closed):
        asyncio.run(whole(LocalReplicas(replica), later))


def test_its_load_is_that_of_its_model_and_not_of_those_that_it_needs(
    tiny_repository: Path, tmp_path: Path
) -> None:
    for folder in tiny_repository.iterdir():
        copied = shutil.copytree(folder, tmp_path / folder.name.replace("tiny", "other"))
        config = copied / "config.pbtxt"
        config.write_text(config.read_text().replace("tiny", "other"))
    replica = ModelReplica([tiny_repository, tmp_path], "tiny", needed=["other"])
    try:
        assert len(replica.repository.text_models) == 2
        assert replica.load().num_blocks == replica.repository.text_model("tiny").logits.num_blocks
    finally:
        replica.close()


def test_a_status_does_not_wait_for_the_ready_check_of_a_model(
    runner: asyncio.Runner, tmp_path: Path
) -> None:
    """A check of the model that fails for a while ends none of its calls; Serve asks it for its health."""
    check = """
        def is_ready(self):
            return False
"""
    write_model(tmp_path, "m", code=ADD.replace("{number}", "1") + check)
    replica = ModelReplica([tmp_path], "m")
    assert not replica.ready
    assert runner.run(replica.status()).is_ready
    replica.close()
    assert not runner.run(replica.status()).is_ready
