"""The models of the Triton examples, complete with small networks, on one live server."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from examples.networks import EXAMPLES, write_networks
from tests.support.live_server import LiveServer


@pytest.fixture(scope="session")
def articles_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models of all Triton examples; the one that needs TensorFlow only where that is installed."""
    copy, root = tmp_path_factory.mktemp("examples"), tmp_path_factory.mktemp("articles") / "models"
    ignored = shutil.ignore_patterns("__pycache__", *([] if find_spec("tensorflow") else ["shansou_rank"]))
    for models in EXAMPLES.glob("*/models"):
        shutil.copytree(models, copy / models.relative_to(EXAMPLES), ignore=ignored)
    write_networks(copy)
    for models in copy.glob("*/models"):
        shutil.copytree(models, root, dirs_exist_ok=True)
    return root


@pytest.fixture(scope="session")
def server(articles_repository: Path) -> Iterator[LiveServer]:
    with LiveServer(articles_repository) as server:
        yield server
