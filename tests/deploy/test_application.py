"""What a replica that Serve calls does besides answering as `ModelReplica`."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from genserve.deploy.calls.call_channel import CallChannel
from genserve.deploy.ray.application import ServedModel
from genserve.deploy.ray.application_args import ApplicationArgs
from genserve.deploy.replica_messages import GenerationCall
from genserve.sampling.sampling_params import SamplingParams
from genserve.textmodel.input_processor import InputProcessor

CALL = GenerationCall(
    model="tiny",
    prompt="Hello",
    prompt_token_ids=(5,),
    params=SamplingParams(max_tokens=1),
    seeds=(1,),
    request_id="mine",
)


def test_a_replica_writes_a_log_with_the_ids_of_requests(
    tiny_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    prepare = InputProcessor.sequences

    def prepare_and_log(inputs: InputProcessor, *args: Any, **options: Any) -> Any:
        logging.getLogger("genserve.plugin").info("prepares")
        return prepare(inputs, *args, **options)

    monkeypatch.setattr(InputProcessor, "sequences", prepare_and_log)
    args = ApplicationArgs(
        model_repository=(tiny_repository,), models={"tiny": ()}, settings={"log_file": str(log)}
    )
    replica = ServedModel(args, "tiny")

    async def call() -> None:
        port = (await replica.status()).port
        assert port is not None
        channel = await CallChannel.open(port, on_end=lambda: None)
        async for _deltas in channel.call("generate", CALL):
            pass
        stopping = replica.__del__()
        assert stopping is not None
        await stopping

    asyncio.run(call())
    lines = log.read_text().splitlines()
    assert any("INFO genserve.repository" in line and "tiny" in line for line in lines)
    assert any(line.endswith("INFO genserve.plugin: [mine] prepares") for line in lines)
