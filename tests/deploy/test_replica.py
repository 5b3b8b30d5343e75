"""A replica answers the calls of an ingress as its engine does."""

from __future__ import annotations

import asyncio
import pickle
import shutil
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from genserve.completion import Completion, join_deltas
from genserve.deploy.replica.model_replica import ModelReplica
from genserve.deploy.replica_messages import GenerationCall
from genserve.errors import Closed, Overloaded, ReplicaLost
from genserve.generation.delta_streams import DeltaStream
from genserve.repository.options import RepositoryOptions
from genserve.sampling.sampling_params import SamplingParams
from tests.fakes.local_replicas import LocalReplicas

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


def call(replica: ModelReplica, text: str = "Hello", *, seed: int = 7, **fields: object) -> GenerationCall:
    token_ids = replica.repository.text_model().encode(text)
    made = GenerationCall(
        **{
            "model": "tiny",
            "prompt": text,
            "prompt_token_ids": tuple(token_ids),
            "params": PARAMS,
            "seeds": (seed,),
            **fields,
        }
    )
    copied: GenerationCall = pickle.loads(pickle.dumps(made))
    return copied


async def whole(replicas: LocalReplicas, call: GenerationCall) -> Completion:
    return join_deltas([delta async for deltas in replicas.generate(call) for delta in deltas])


def test_answers_with_the_text_of_a_request_to_the_model(
    replica: ModelReplica, runner: asyncio.Runner
) -> None:
    model = replica.repository.text_model()
    sequence = model.prepare("Hello", SamplingParams(max_tokens=12, temperature=0.8, seed=7, ignore_eos=True))
    expected = join_deltas(DeltaStream(model.engine, sequence))
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
