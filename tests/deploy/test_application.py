"""What a replica that Serve calls does besides answering as `ModelReplica`."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from genserve.deploy.calls.call_channel import CallChannel
from genserve.deploy.ray.application import ServedModel
from genserve.deploy.ray.application_args import ApplicationArgs
from genserve.deploy.replica_messages import Call
from genserve.engine.generation_request import GenerationRequest
from genserve.errors import ModelNotReady
from genserve.sampling.sampling_params import SamplingParams
from genserve.server.observe import engine_watch
from genserve.textmodel.sequence_builder import SequenceBuilder
from tests.support.step_gate import StepGate

CALL = Call(
    identity="",
    request=GenerationRequest(
        id="mine",
        model="tiny",
        prompt="Hello",
        prompt_token_ids=(5,),
        params=SamplingParams(max_tokens=1),
        seeds=(1,),
    ),
)


def test_a_replica_writes_a_log_with_the_ids_of_requests(
    tiny_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    build = SequenceBuilder.sequences

    def build_and_log(builder: SequenceBuilder, request: GenerationRequest) -> Any:
        logging.getLogger("genserve.plugin").info("prepares")
        return build(builder, request)

    monkeypatch.setattr(SequenceBuilder, "sequences", build_and_log)
    args = ApplicationArgs(
        model_repository=(tiny_repository,), models={"tiny": ()}, settings={"log_file": str(log)}
    )
    replica = ServedModel(args, "tiny")

    async def call() -> None:
        status = await replica.status()
        port = status.port
        assert port is not None
        channel = await CallChannel.open(port, on_end=lambda: None)
        async for _deltas in channel.call("generate", replace(CALL, identity=status.identity)):
            pass
        channel.close()
        stopping = replica.__del__()
        assert stopping is not None
        await stopping

    asyncio.run(call())
    lines = log.read_text().splitlines()
    assert any("INFO genserve.repository" in line and "tiny" in line for line in lines)
    assert any(line.endswith("INFO genserve.plugin: [mine] prepares") for line in lines)


def test_a_replica_whose_engine_hangs_says_so_and_is_to_be_replaced(
    tiny_repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_watch, "_INTERVAL_S", 0.05)
    replica = ServedModel(ApplicationArgs(model_repository=(tiny_repository,), models={"tiny": ()}), "tiny")
    gate = StepGate(replica._replica.repository.text_model())

    async def hang() -> None:
        status = await replica.status()
        assert status.is_ready
        assert status.port is not None
        replica.check_health()
        channel = await CallChannel.open(status.port, on_end=lambda: None)
        gate.shut()
        items = channel.call("generate", replace(CALL, identity=status.identity))
        reading = asyncio.ensure_future(anext(items))
        while (await replica.status()).is_ready:
            await asyncio.sleep(0.01)
        with pytest.raises(ModelNotReady, match="hangs"):
            replica.check_health()
        gate.open()
        await reading
        while not (await replica.status()).is_ready:
            await asyncio.sleep(0.01)
        replica.check_health()
        channel.close()
        stopping = replica.__del__()
        assert stopping is not None
        await stopping

    try:
        asyncio.run(hang())
    finally:
        gate.remove()
