"""The libraries: their selection, their errors, and their build."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from genserve import kernels
from genserve.errors import GenserveError
from tests.kernels.c_types import instruction_sets, library

ROOT = Path(__file__).parents[2]


def has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@pytest.fixture
def build() -> ModuleType:
    from genserve.kernels import build

    return build


def test_the_best_supported_instruction_set_is_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GENSERVE_KERNELS", raising=False)
    assert kernels.instruction_set() == instruction_sets()[0]
    assert kernels.library_path().exists()


@pytest.mark.parametrize("name", instruction_sets())
def test_each_supported_instruction_set_may_be_selected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GENSERVE_KERNELS", name)
    assert kernels.instruction_set() == name
    function = library(name).genserve_instruction_set
    function.restype = ctypes.c_char_p
    assert function().decode() == name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("AVX2", r"GENSERVE_KERNELS is 'AVX2', which is not an instruction set \(set it to .*portable"),
        (
            "neon" if platform.machine() == "x86_64" else "avx2",
            "for which no kernels are built on this machine",
        ),
    ],
)
def test_another_name_is_refused(name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GENSERVE_KERNELS", name)
    with pytest.raises(GenserveError, match=message):
        kernels.library_path()


def test_an_unsupported_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = [
        name
        for name in kernels.INSTRUCTION_SETS
        if kernels._path_of(name).exists() and name not in instruction_sets()
    ]
    if not lacking:
        pytest.skip("this processor has every instruction set that is built here")
    monkeypatch.setenv("GENSERVE_KERNELS", lacking[0])
    with pytest.raises(GenserveError, match="which this processor or its operating system does not"):
        kernels.library_path()


@pytest.mark.skipif("amx" not in instruction_sets(), reason="this machine does not have AMX")
def test_a_process_that_is_refused_amx_has_other_kernels() -> None:
    """Linux refuses its registers where a stack for signals has no room for them."""
    script = """
import ctypes, sys
class Stack(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))
memory = ctypes.create_string_buffer(4096)
small = Stack(ctypes.addressof(memory), 0, len(memory))
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(small), None) == 0
import onnxruntime
from genserve.kernels import instruction_set
print(instruction_set())
try:
    onnxruntime.SessionOptions().register_custom_ops_library(sys.argv[1])
except Exception as error:
    print(error)
"""
    env = {name: value for name, value in os.environ.items() if name != "GENSERVE_KERNELS"}
    command = [sys.executable, "-c", script, str(kernels._path_of("amx"))]
    answer = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    name, error = answer.stdout.splitlines()
    assert name == instruction_sets()[1]
    assert "operating system does not support these kernels" in error


def test_the_error_without_libraries_has_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "LIBRARIES", tmp_path)
    kernels._choose.cache_clear()
    with pytest.raises(GenserveError, match=r"kernels are not built for .* \(install a wheel of genserve"):
        kernels.library_path()
    kernels._choose.cache_clear()


def test_the_error_for_a_broken_library_has_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a library of another architecture, in a shared folder."""
    (tmp_path / kernels.library_path().with_stem("libgenserve_portable").name).write_bytes(b"\x7fELF")
    monkeypatch.setattr(kernels, "LIBRARIES", tmp_path)
    kernels._choose.cache_clear()
    kernels._loaded.cache_clear()
    with pytest.raises(GenserveError, match=r"kernels cannot be loaded: .* \(install a wheel of genserve"):
        kernels.library_path()
    kernels._choose.cache_clear()


def test_the_digests_depend_on_how_adapters_are_rounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Receipts, and blocks of the disk cache that an adapter computed, are of one rounding."""
    changed = tmp_path / "low_rank.py"
    changed.write_bytes(kernels._LOW_RANK.read_bytes() + b"\n")
    for digest in (kernels.build_sha256, kernels.sources_sha256):
        digest.cache_clear()
        before = digest()
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "_LOW_RANK", changed)
            digest.cache_clear()
            assert digest() != before
        digest.cache_clear()


def test_an_unknown_architecture_is_a_readable_error(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(build.BuildError, match=r"no kernels for riscv64 .*; it runs on x86-64 and aarch64"):
        build.build(tmp_path)


def test_a_missing_compiler_is_a_readable_error(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interpreter without installed packages has no compiler."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    with pytest.raises(build.BuildError, match=r"the package ziglang is missing.*pip install ziglang"):
        build.build(tmp_path)


def test_an_unwritable_folder_is_a_readable_error(build: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(build.BuildError, match=r"could not be written .*: make .*lib writable"):
        build.build(tmp_path / "file" / "lib")


@pytest.mark.skipif(sys.platform == "win32", reason="every user has a folder there")
@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HOME": "{}"}, True),
        ({"HOME": "{}/not/yet/made"}, True),
        ({}, False),
        ({"HOME": ""}, False),
        ({"HOME": "{}/locked"}, False),
        ({"HOME": "{}", "XDG_CACHE_HOME": "{}/locked/not/made"}, False),
        ({"HOME": "{}/locked", "ZIG_GLOBAL_CACHE_DIR": "{}"}, True),
    ],
    ids=str,
)
def test_the_compiler_has_a_cache_if_the_user_has_a_home(
    environment: dict[str, str],
    expected: bool,
    build: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    if not expected and environment.get("HOME") and os.access(locked, os.W_OK):
        pytest.skip("nothing is locked for root")
    for name in ("HOME", "XDG_CACHE_HOME", "ZIG_GLOBAL_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value.format(tmp_path))
    assert build._compiler_has_cache() is expected


@pytest.mark.slow
@pytest.mark.skipif(not has("ziglang"), reason="ziglang is not installed")
def test_a_user_without_a_home_can_build(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = build.INSTRUCTION_SETS[build._machine()]
    monkeypatch.setitem(build.INSTRUCTION_SETS, build._machine(), {"portable": sets["portable"]})
    for name in ("HOME", "XDG_CACHE_HOME", "ZIG_GLOBAL_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    (path,) = build.build(tmp_path)
    assert ctypes.CDLL(str(path)).genserve_cpu_supports(b"portable")
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize(
    ("system", "machine", "tag", "file"),
    [
        ("linux", "x86_64", "manylinux_2_17_x86_64", "libgenserve_avx2.so"),
        ("linux", "aarch64", "manylinux_2_17_aarch64", "libgenserve_avx2.so"),
        ("darwin", "arm64", "macosx_11_0_arm64", "libgenserve_avx2.dylib"),
    ],
)
def test_names_by_platform(
    system: str, machine: str, tag: str, file: str, build: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert (build.wheel_platform(), build.library_name("avx2")) == (tag, file)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    not (has("ziglang") and has("hatchling")), reason="ziglang and hatchling are not installed"
)
def test_a_wheel_has_its_tag_the_libraries_and_the_data_files(build: ModuleType, tmp_path: Path) -> None:
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns(
        ".git", ".venv", "lib", "__pycache__", "tests", ".*_cache", ".hypothesis"
    )
    shutil.copytree(ROOT, source, ignore=ignored)
    stray = source / "genserve/kernels/lib/libgenserve_of_another_machine.so"
    stray.parent.mkdir()
    stray.touch()
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith(f"-py3-none-{build.wheel_platform()}.whl")
    names = {Path(name) for name in zipfile.ZipFile(wheel).namelist()}
    libraries = {path.name for path in names if path.parent.name == "lib"}
    assert libraries == {build.library_name(name) for name in build.INSTRUCTION_SETS[build._machine()]}
    export = ROOT / "genserve/export"
    folders = (export / "recordings", export / "templates", export / "texts")
    data = {path.relative_to(ROOT) for folder in folders for path in folder.iterdir()}
    assert len(data) == 11
    assert data <= names
