"""The folder and the server that pages and examples name; their smollm2 is a tiny random model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from genserve.export import export_model
from genserve.export.export_options import SilentProgress
from tests.docs.snippets import ROOT
from tests.support.live_server import LiveServer
from tests.support.tiny_llama import tiny_llama_checkpoint


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the pages name: model_repository with smollm2, my-checkpoint, README.md."""
    folder = tmp_path_factory.mktemp("workspace")
    checkpoint = tiny_llama_checkpoint(folder / "my-checkpoint", context=2048)
    export_model(
        str(checkpoint),
        repository=folder / "model_repository",
        name="smollm2",
        precision="fp32",
        progress=SilentProgress(),
    )
    (folder / "model.py").write_text(
        "class TritonPythonModel:\n    def execute(self, requests):\n        return [None] * len(requests)\n"
    )
    (folder / "notes.txt").write_text("The sea is blue.\n")
    (folder / "prompts.jsonl").write_text('{"prompt": "The sea is", "max_tokens": 4}\n')
    (folder / "openai_batch.jsonl").write_text(
        '{"custom_id": "q-3", "method": "POST", "url": "/v1/chat/completions", '
        '"body": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}}\n'
    )
    for name in ("README.md", "deploy", "benchmarks", "examples"):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.fixture(scope="session")
def server(workspace: Path) -> Iterator[LiveServer]:
    # No draw ends an answer before its first word, or lets it fill the context.
    defaults = '{"temperature": 0, "max_new_tokens": 64}'
    with LiveServer(workspace / "model_repository", override_generation_config=defaults) as server:
        yield server
