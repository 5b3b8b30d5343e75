"""Build: compiles the kernels, one library per instruction set.

    python genserve/kernels/build.py

The compiler is clang, from the package ziglang. The build hook runs this file without genserve installed.
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

SOURCES = Path(__file__).parent / "src"
LIBRARIES = Path(__file__).parent / "lib"

# The instruction sets of each architecture, the most preferred first, with the compiler's names for them.
INSTRUCTION_SETS = {
    "x86_64": {
        "amx": "x86_64_v4+avx512vnni+amx_int8+amx_tile",
        "avx512vnni": "x86_64_v4+avx512vnni",
        "avxvnni": "x86_64_v3+avxvnni",
        "avx2": "x86_64_v3",
        "portable": "x86_64",
    },
    "aarch64": {"neon": "generic+v8_2a+dotprod", "portable": "generic"},
}

# -ffp-contract=off: only fma() is fused, so that all libraries compute equal bits.
# -nostdlib++: the kernels use no C++ library, so none is built.
FLAGS = [
    *("-std=c++17", "-O3", "-g0", "-ffp-contract=off", "-fno-sanitize=undefined"),
    *("-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics", "-nostdlib++", "-fvisibility=hidden"),
    *("-Wall", "-Wextra", "-Wno-psabi"),
]


class BuildError(RuntimeError):
    """The kernels cannot be compiled on this machine."""


def _machine() -> str:
    """Return this machine's architecture in the compiler's terms: `x86_64` or `aarch64`."""
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def _target() -> tuple[str, str]:
    """Return the compiler's target, with the oldest C library or system it supports, and the wheel's tag."""
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
    """Return the platform tag of a wheel, such as `manylinux_2_17_x86_64`."""
    return _target()[1]


def library_name(instruction_set: str) -> str:
    """Return the file name of an instruction set's library on this platform."""
    suffix = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
    return f"libgenserve_{instruction_set}{suffix}"


def compile_command(cpu: str, *, compile_for: str) -> list[str]:
    """Return the start of a compiler command for a CPU and a target; sources and output follow."""
    return [sys.executable, "-m", "ziglang", "c++", *FLAGS, "-target", compile_for, f"-mcpu={cpu}"]


def build(into: Path = LIBRARIES) -> list[Path]:
    """Compile the libraries of this machine's architecture in parallel, and return their paths.

    Args:
        into: the folder of the libraries, created if missing; libraries in it are replaced.

    Raises:
        BuildError: the architecture is unknown, the compiler is missing or fails, or the folder is not
            writable.
    """
    sets = INSTRUCTION_SETS.get(_machine())
    if sets is None:
        msg = (
            f"genserve has no kernels for {platform.machine()} ({sys.platform}); "
            "it runs on x86-64 and aarch64, on Linux, macOS and Windows"
        )
        raise BuildError(msg)
    try:
        into.mkdir(parents=True, exist_ok=True)
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            return [*pool.map(lambda name: _compile_library(name, sets[name], into), sets)]
    except OSError as error:
        msg = (
            f"genserve's kernels could not be written ({error}): make {into} writable, and on Windows "
            "stop the processes that have loaded them"
        )
        raise BuildError(msg) from error


def _compile_library(instruction_set: str, cpu: str, into: Path) -> Path:
    """Compile one library, and put it into a folder atomically."""
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
        # Replace it atomically: one process may have loaded the old library, another may be loading it now.
        with tempfile.TemporaryDirectory(prefix=".", dir=into) as same_disk:
            shutil.copyfile(made, Path(same_disk) / path.name).replace(path)
    return path


def _compiler_has_cache() -> bool:
    """Whether the compiler's global cache is writable: ZIG_GLOBAL_CACHE_DIR, or a folder of the user."""
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
