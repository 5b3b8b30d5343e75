from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from genserve.errors import Closed
from genserve.export import export_model
from genserve.export.export_options import SilentProgress
from genserve.generation_metrics import Metrics
from genserve.repository.options import ControlMode, RepositoryOptions
from genserve.repository.repository import Repository
from genserve.sampling.sampling_params import SamplingParams
from genserve.server.dialects.generation_handler import submit
from genserve.server.services import Services
from genserve.settings import ServerSettings
from genserve.textmodel.text_model import TextModel
from tests.server.gated import gated
from tests.support.live_server import LiveServer


class Outdated(Repository):
    """Returns an older model once, as for a request that was prepared while another model was loaded."""

    older: list[TextModel]

    def text_model(self, name: str | None = None) -> TextModel:
        return self.older.pop() if self.older else super().text_model(name)


def test_a_request_for_a_replaced_model_goes_to_its_replacement(
    tiny_repository: Path, tmp_path: Path
) -> None:
    root = tmp_path / "models"
    shutil.copytree(tiny_repository, root)
    repository = Outdated([root], options=RepositoryOptions(control_mode=ControlMode.EXPLICIT))
    repository.older = []
    repository.start(["tiny"])
    old = repository.text_model("tiny")
    config = root / "tiny_decoder" / "config.pbtxt"
    config.write_text(config.read_text() + "# changed\n")
    repository.load("tiny")
    old.engine.close()
    settings = ServerSettings(model_repository=(root,))
    services = Services(settings=settings, repository=repository, metrics=Metrics())

    async def ask() -> int:
        submitted = await submit(services, "tiny", ["hello"], SamplingParams(max_tokens=3, ignore_eos=True))
        return sum([len(delta.token_ids) async for deltas in submitted.stream for delta in deltas])

    repository.older = [old]
    assert asyncio.run(ask()) == 3
    repository.older = [old, old]  # nothing has taken its place
    with pytest.raises(Closed):
        asyncio.run(ask())
    repository.close()


# What the template of the model `odd` does where the message is the name of it.
ODD = {
    "hang": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "fill": "{{ 'a' * 10 ** 10 }}",
    "write": "{{ 'a' * 10 ** 7 }}",
    "fail": "{{ 'a' + 1 }}",
    "leave": "{{ ''.__class__.__mro__ }}",
}


# Takes a while, and fails.
LINGER = "{% for i in range(30) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{{ 'a' + 1 }}"


@pytest.fixture(scope="module")
def neighbours(
    tiny_repository: Path,
    tiny_checkpoint: Path,
    tmp_path_factory: pytest.TempPathFactory,
    endless_templates_end_soon: None,
) -> Iterator[LiveServer]:
    """A server of the models `tiny` and `odd`, where a request may wait for a second."""
    root = tmp_path_factory.mktemp("neighbours") / "models"
    shutil.copytree(tiny_repository, root)
    export_model(
        str(tiny_checkpoint), repository=root, name="odd", precision="fp32", progress=SilentProgress()
    )
    where = "{{% if messages[0].content == {!r} %}}{}{{% endif %}}"
    source = "".join(where.format(name, does) for name, does in {**ODD, "linger": LINGER}.items())
    (root / "odd_tokenizer" / "1" / "chat_template.jinja").write_text(source + "{{ messages[0].content }}")
    with LiveServer(root, max_queue_wait_s=1.0) as server:
        yield server


def chat(server: LiveServer, model: str, content: str, **body: Any) -> httpx2.Response:
    body |= {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 2}
    return httpx2.post(f"{server.url}/v1/chat/completions", json=body, timeout=100)


def rejections(server: LiveServer, model: str, reason: str) -> float:
    registry = server.server.services.metrics.registry
    labels = {"model": model, "reason": reason}
    return registry.get_sample_value("genserve_admission_rejections_total", labels) or 0


@pytest.mark.parametrize(("does", "stream"), [*((does, False) for does in ODD), ("fail", True)])
def test_errors_of_a_chat_template_hide_the_servers_internals(
    neighbours: LiveServer, caplog: pytest.LogCaptureFixture, does: str, stream: bool
) -> None:
    response = chat(neighbours, "odd", does, stream=stream)
    assert response.status_code == 500
    error = response.json()["error"]
    assert error["code"] == "model_failed"
    assert error["message"].startswith("model 'odd'")
    assert "log" in error["remedy"]
    assert not re.search(r"/\w+/|jinja2|Error|class", response.text)
    assert str(Path("odd_tokenizer", "1", "chat_template.jinja")) in caplog.text
    assert chat(neighbours, "odd", "hello").status_code == 200


def test_hanging_chat_templates_block_no_other_model(neighbours: LiveServer) -> None:
    with ThreadPoolExecutor(41) as pool:
        hanging = [pool.submit(chat, neighbours, "odd", "linger") for _ in range(41)]
        answer = chat(neighbours, "tiny", "hello")
        assert not all(one.done() for one in hanging)
    assert answer.status_code == 200
    assert {(one.result().status_code, one.result().json()["error"]["code"]) for one in hanging} == {
        (500, "model_failed"),
        (429, "overloaded"),
    }
    assert rejections(neighbours, "odd", "queue_timeout") > 0
    assert chat(neighbours, "odd", "hello").status_code == 200


def test_concurrent_long_prompts_count_against_the_queue_during_preparation(
    tiny_repository: Path, tmp_path: Path
) -> None:
    repository = gated(tmp_path, tiny_repository)  # one slot
    body = {"model": "tiny", "prompt": "long " * 50_000, "max_tokens": 1}

    def ask(_: int) -> int:
        return httpx2.post(f"{server.url}/v1/completions", json=body, timeout=100).status_code

    with LiveServer(repository, max_queue=0) as server, ThreadPoolExecutor(10) as pool:
        statuses = list(pool.map(ask, range(10)))
        assert rejections(server, "tiny", "max_queue") == statuses.count(429)
        assert server.model.engine.num_preparing == 0
    assert set(statuses) == {400, 429}  # the context is shorter
