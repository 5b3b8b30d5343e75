from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from genserve.backends.generation_ensemble import GenerationEnsemble
from genserve.errors import Closed
from genserve.metrics import Metrics
from genserve.repository.options import ControlMode, RepositoryOptions
from genserve.repository.repository import Repository
from genserve.sampling.params import SamplingParams
from genserve.server.services import Services
from genserve.settings import ServerSettings


class Outdated(Repository):
    """Finds an older model once, as a request does that was prepared while another was loaded."""

    older: list[GenerationEnsemble]

    def get(self, name: str | None = None) -> GenerationEnsemble:
        return self.older.pop() if self.older else super().get(name)


def test_a_request_for_a_model_that_was_replaced_meanwhile_goes_to_the_next(
    tiny_repository: Path, tmp_path: Path
) -> None:
    root = tmp_path / "models"
    shutil.copytree(tiny_repository, root)
    repository = Outdated([root], options=RepositoryOptions(control_mode=ControlMode.EXPLICIT))
    repository.older = []
    repository.start(["tiny"])
    old = repository.get("tiny")
    config = root / "tiny_decoder" / "config.pbtxt"
    config.write_text(config.read_text() + "# changed\n")
    repository.load("tiny")
    old.loop.close()
    settings = ServerSettings(model_repository=(root,))
    services = Services(settings=settings, repository=repository, metrics=Metrics())

    async def ask() -> int:
        opened = await services.open("tiny", ["hello"], SamplingParams(max_tokens=3, ignore_eos=True))
        return sum([len(delta.token_ids) async for deltas in opened.stream for delta in deltas])

    repository.older = [old]
    assert asyncio.run(ask()) == 3
    repository.older = [old, old]   # nothing has taken its place
    with pytest.raises(Closed):
        asyncio.run(ask())
    repository.close()
