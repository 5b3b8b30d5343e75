"""genserve contacts nothing but what the user asks for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import built_once
from tests.support.live_server import line_with, serving
from tests.support.python_models import CONFIG, write_model

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(
        sys.platform != "linux" or find_spec("ziglang") is None, reason="needs LD_PRELOAD and a compiler"
    ),
]
SOURCE = Path(__file__).parents[1] / "support" / "contacts.c"
IMPORTS_ONNXRUNTIME = """
import onnxruntime

class TritonPythonModel:
    def execute(self, requests):
        raise NotImplementedError
"""
IN_A_PROCESS = 'parameters { key: "EXECUTION" value { string_value: "process" } }'


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def build(folder: Path) -> None:
        folder.mkdir()
        command = [sys.executable, "-m", "ziglang", "cc", "-shared", "-fPIC", "-o", folder / "contacts.so"]
        subprocess.run([*command, SOURCE], check=True)

    return built_once(tmp_path_factory, "contacts", build) / "contacts.so"


@pytest.fixture
def contacts(recorder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Return what a test's child processes, and their children, look up and connect to outside loopback."""
    monkeypatch.setenv("LD_PRELOAD", str(recorder))
    monkeypatch.setenv("CONTACTS", str(log := tmp_path / "contacts"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    log.touch()
    return lambda: log.read_text().splitlines()


def test_the_recorder_sees_look_ups_and_connections_of_children(contacts: Callable[[], list[str]]) -> None:
    program = """
import contextlib, socket
with contextlib.suppress(OSError):
    socket.getaddrinfo("recorded.invalid", 443)
addresses = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"), (socket.AF_INET, "127.0.0.1"))
for family, address in addresses:
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as connected:
        connected.connect((address, 9))
        connected.sendmsg([b""])
with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unconnected:
    unconnected.sendto(b"", ("192.0.2.2", 9))
"""
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {program!r}])"
    subprocess.run([sys.executable, "-c", parent], check=True)
    assert contacts() == [
        "getaddrinfo recorded.invalid", "connect 192.0.2.1", "connect 2001:db8::1", "sendto 192.0.2.2",
    ]  # fmt: skip


def test_a_server_a_chat_and_an_export_contact_nobody(
    contacts: Callable[[], list[str]], tiny_repository: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    write_model(tmp_path / "models", "stub", code=IMPORTS_ONNXRUNTIME, config=CONFIG + IN_A_PROCESS)
    for stage in tiny_repository.iterdir():
        (tmp_path / "models" / stage.name).symlink_to(stage)
    local = ("--model-repository", str(tmp_path / "models"))
    target = ("--name", "tiny", "--model-repository", str(tmp_path / "exported"))
    with serving(tmp_path / "models") as server:
        url = line_with(server, "Ready at").split()[2]
        _run("chat", "tiny", "Tea", "--url", url, "--max-tokens", "2")
        _run("chat", "tiny", "Tea", *local, "--max-tokens", "2")
        _run("export", str(tiny_checkpoint), *target)
        server.terminate()
        server.communicate()
    assert contacts() == []
    # ONNX Runtime writes it before it contacts anybody.
    assert [*tmp_path.rglob("deviceid")] == []


def _run(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "genserve", *arguments], check=True, stdin=subprocess.DEVNULL)
