"""The kernels alone, run by driver.cpp: with sanitizers, and on an emulated machine."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

from genserve.kernels import build
from tests.kernels.c_types import library

DRIVER = Path(__file__).parent / "driver.cpp"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="ziglang is not installed"),
]


def run(*command: str) -> str:
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr[-4000:]
    return answer.stdout


def compile_driver(into: Path, *flags: str, cpu: str, compile_for: str) -> str:
    command = build.compile_command(cpu, compile_for=compile_for)
    path = into / ("driver.o" if "-c" in flags else "driver")
    run(*command, *flags, "-I", str(build.SOURCES), str(DRIVER), "-o", str(path))
    return str(path)


@pytest.fixture(scope="module")
def hashes(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output of the portable kernels on this machine."""
    cpu = build.INSTRUCTION_SETS["x86_64"]["portable"]
    return run(
        compile_driver(tmp_path_factory.mktemp("driver"), cpu=cpu, compile_for="x86_64-linux-gnu.2.31")
    )


x86_only = pytest.mark.skipif(build._machine() != "x86_64", reason="compares with x86-64")


@x86_only
@pytest.mark.parametrize("sanitizer", ["address", "thread", "undefined"])
@pytest.mark.parametrize("name", ["amx", "avx512vnni", "avx2"])
def test_a_sanitizer_finds_nothing(sanitizer: str, name: str, hashes: str, tmp_path: Path) -> None:
    """The compiler of ziglang instruments the code; the runtime is that of g++."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed, and with it the sanitizers' runtime")
    if not library("portable").genserve_cpu_supports(name.encode()):
        pytest.skip(f"this processor does not have {name}")
    # ziglang drops "address", so it is passed to the compiler proper, which does not know "undefined".
    wanted = f"-fsanitize={sanitizer}"
    chosen = ("-Xclang", wanted) if sanitizer != "undefined" else (wanted, "-fno-sanitize-recover=undefined")
    flags = ("-c", "-O1", "-g", *chosen)
    cpu = build.INSTRUCTION_SETS["x86_64"][name]
    made = compile_driver(tmp_path, *flags, cpu=cpu, compile_for="x86_64-linux-gnu.2.31")
    called = {"address": b"__asan_report", "thread": b"__tsan_func", "undefined": b"__ubsan_handle"}
    assert called[sanitizer] in Path(made).read_bytes(), "the sanitizer is not compiled in"
    program = str(tmp_path / "program")
    run("g++", made, "-o", program, f"-fsanitize={sanitizer}", "-pthread")
    assert run(program) == hashes


@x86_only
@pytest.mark.parametrize("name", ["neon", "portable"])
def test_aarch64_computes_the_bits_of_x86(name: str, hashes: str, tmp_path: Path) -> None:
    qemu = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if qemu is None:
        pytest.skip("qemu-aarch64 is not installed (Debian has it in qemu-user)")
    cpu = build.INSTRUCTION_SETS["aarch64"][name]
    program = compile_driver(tmp_path, "-static", cpu=cpu, compile_for="aarch64-linux-musl")
    assert run(qemu, program) == hashes
