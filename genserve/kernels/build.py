"""Build: compile the kernels, one library for each instruction set, with the compiler that pip brings.

    python genserve/kernels/build.py

The compiler is clang, in the package ziglang. The build hook runs this where genserve is not installed.
"""

from __future__ import annotations

import concurrent.futures
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

__all__ = ["BuildError", "build", "compile_command", "library_name", "wheel_platform"]

SOURCES = Path(__file__).parent / "src"
LIBRARIES = Path(__file__).parent / "lib"

# By machine: the instruction sets from the most wanted to the least, each with what the compiler calls it.
INSTRUCTION_SETS = {
    "x86_64": {
        "avx512vnni": "x86_64_v4+avx512vnni",
        "avxvnni": "x86_64_v3+avxvnni",
        "avx2": "x86_64_v3",
        "portable": "x86_64",
    },
    "aarch64": {"neon": "generic+v8_2a+dotprod", "portable": "generic"},
}

# -ffp-contract=off: only what is written as fma() is fused, so that all libraries give equal bits.
# -nostdlib++: nothing of a C++ library is used, and none is built.
FLAGS = [
    *("-std=c++17", "-O3", "-g0", "-ffp-contract=off", "-fno-sanitize=undefined"),
    *("-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics", "-nostdlib++", "-fvisibility=hidden"),
    *("-Wall", "-Wextra", "-Wno-psabi"),
]


class BuildError(RuntimeError):
    """The kernels cannot be compiled on this machine."""


def _machine() -> str:
    """Name this machine's architecture as the compiler does: `x86_64` or `aarch64`."""
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def _target() -> tuple[str, str]:
    """Say what is compiled for.

    Returns:
        The compiler's name for this platform, with the oldest C library or system that a wheel runs on, and
        the platform tag of that wheel.
    """
    arch = _machine()
    if sys.platform == "win32":
        return f"{arch}-windows-gnu", sysconfig.get_platform().replace("-", "_")
    if sys.platform == "darwin":
        apple = {"x86_64": "x86_64", "aarch64": "arm64"}.get(arch, arch)
        return f"{arch}-macos.11.0", f"macosx_11_0_{apple}"
    if "musl" in (sysconfig.get_config_var("HOST_GNU_TYPE") or ""):
        return f"{arch}-linux-musl", f"musllinux_1_2_{arch}"
    return f"{arch}-linux-gnu.2.17", f"manylinux_2_17_{arch}"


def wheel_platform() -> str:
    """Name the platform in a wheel's file name, such as `manylinux_2_17_x86_64`."""
    return _target()[1]


def library_name(instruction_set: str) -> str:
    """Name the file of an instruction set's library on this platform."""
    suffix = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
    return f"libgenserve_{instruction_set}{suffix}"


def compile_command(cpu: str, *, compile_for: str) -> list[str]:
    """Begin a command of the compiler, for a CPU and a target as it names them; sources and output follow."""
    return [sys.executable, "-m", "ziglang", "c++", *FLAGS, "-target", compile_for, f"-mcpu={cpu}"]


def build(into: Path = LIBRARIES) -> list[Path]:
    """Compile every library of this machine's architecture, as many at a time as there are cores.

    Args:
        into: the folder of the libraries; it is made, and libraries in it are replaced.

    Returns:
        The libraries' paths.

    Raises:
        BuildError: the architecture is unknown, there is no compiler, it fails, or the folder cannot be
            written.
    """
    sets = INSTRUCTION_SETS.get(_machine())
    if sets is None:
        msg = (
            f"genserve has no kernels for {platform.machine()} ({sys.platform}): "
            "it runs on x86-64 and aarch64, under Linux, macOS and Windows"
        )
        raise BuildError(msg)
    try:
        into.mkdir(parents=True, exist_ok=True)
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            return [*pool.map(lambda name: _compile_library(name, sets[name], into), sets)]
    except OSError as error:
        msg = (
            f"genserve's kernels could not be written ({error}): make {into} writable, and under Windows "
            "stop what has loaded them"
        )
        raise BuildError(msg) from error


def _compile_library(instruction_set: str, cpu: str, into: Path) -> Path:
    """Compile one library and put it into a folder, whole or not at all."""
    path = into / library_name(instruction_set)
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / path.name
        command = compile_command(cpu, compile_for=_target()[0])
        command += ["-shared", "-fPIC", "-s", str(SOURCES / "operators.cpp"), "-o", str(made)]
        cache = {"ZIG_LOCAL_CACHE_DIR": scratch}
        if not _compiler_has_cache():
            cache["ZIG_GLOBAL_CACHE_DIR"] = scratch
        answer = subprocess.run(command, env=os.environ | cache, capture_output=True, text=True, check=False)
        if answer.returncode != 0:
            reason, remedy = answer.stderr.strip()[:2000], "report this"
            if "No module named ziglang" in reason:
                reason = "the package ziglang is missing"
                remedy = "install the compiler (pip install ziglang)"
            msg = (
                f"genserve's kernels for {instruction_set} could not be compiled ({reason}): {remedy}, or "
                "install a wheel (pip install --only-binary genserve genserve)"
            )
            raise BuildError(msg)
        # It takes the old one's place at once: a process may have that loaded, and another may load it now.
        with tempfile.TemporaryDirectory(prefix=".", dir=into) as beside:
            shutil.copyfile(made, Path(beside) / path.name).replace(path)
    return path


def _compiler_has_cache() -> bool:
    """Tell whether the compiler can write where it keeps what it compiles for all programs.

    That is ZIG_GLOBAL_CACHE_DIR, or a folder of the user's, who may have none.
    """
    if sys.platform == "win32" or "ZIG_GLOBAL_CACHE_DIR" in os.environ:
        return True
    home = os.environ.get("XDG_CACHE_HOME") or os.environ.get("HOME")
    if not home:
        return False
    nearest = next(path for path in (Path(home), *Path(home).parents) if path.exists())
    return os.access(nearest, os.W_OK)


if __name__ == "__main__":
    try:
        for library in build():
            print(library)  # noqa: T201
    except BuildError as error:
        sys.exit(str(error))
