"""Install: the size of an installation, the time to the first answer, and the memory of a server.

    python benchmarks/install.py --before 9aaf304

builds the wheels of the checkout and of an older commit and prints one table: for each of them the smallest
installation that serves, and one with the extras. uv installs them; its caches, the home and the models are
in temporary folders, so that nothing is used that this machine already has. On Linux torch is the build for
CPUs (`--torch-links`). A time is the least of the repetitions, which a busy machine distorts least. It
needs Linux, for the memory.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

from report import markdown
from servers import genserve_server

ROOT = Path(__file__).parents[1]
MODEL = "smollm2"

# The figures of an installation, and how the table formats them.
ROWS = {
    "environment, MB": "{:,.0f}",
    "packages": "{:.0f}",
    "install with a cold cache, s": "{:.1f}",
    "install with a warm cache, s": "{:.1f}",
    "nothing to first answer, cold cache, s": "{:.1f}",
    "nothing to first answer, warm cache, s": "{:.1f}",
    "of that, CPU time, s": "{:.1f}",
    "from genserve import LLM, s": "{:.2f}",
    "genserve --help, s": "{:.2f}",
    "server ready, s": "{:.1f}",
    "resident when ready, MB": "{:.0f}",
    "resident after an answer, MB": "{:.0f}",
    "the same, shared pages divided by their processes, MB": "{:.0f}",
    "of that, mapped weights, MB": "{:.0f}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """What to install, and the commands to the first answer.

    Attributes:
        requirement: the requirement for genserve, with extras and the file of the wheel.
        constraints: the versions of the dependencies.
        tools: further packages that the first answer needs.
        first_answer: the arguments of `genserve` in the commands of a new user.
    """

    name: str
    requirement: str
    constraints: Path
    tools: Sequence[str]
    first_answer: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Uv:
    """uv, with everything that it writes in a temporary folder."""

    program: str
    python: str
    torch_links: str
    folders: Callable[[], Path]

    def run(self, *command: str, cache: Path, home: Path) -> str:
        """Run uv as a new user would, with "hello" as standard input, and return its output."""
        home.mkdir(exist_ok=True)
        own = {
            "HOME": str(home),
            "GENSERVE_HOME": str(home / "genserve"),
            "GENSERVE_CACHE": str(home / "downloads"),
            "UV_CACHE_DIR": str(cache),
        }
        foreign = ("PYTHON", "VIRTUAL_ENV", "GENSERVE_", "XDG_")
        env = {name: value for name, value in os.environ.items() if not name.startswith(foreign)} | own
        done = subprocess.run(
            [self.program, *command],
            cwd=home,
            env=env,
            input="hello\n",
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(map(str, done.args))} failed:\n{done.stderr[-4000:]}")
        return done.stdout

    def install(self, wanted: Installation, *, cache: Path) -> Path:
        """Install into a new environment, and return it."""
        home, environment = self.folders(), self.folders()
        self.run("venv", "--python", self.python, str(environment), cache=cache, home=home)
        into = ("pip", "install", "--python", str(environment), *self._sources(wanted))
        self.run(*into, wanted.requirement, cache=cache, home=home)
        return environment

    def first_answer(self, wanted: Installation, *, cache: Path) -> Path:
        """Run the commands of a new user with uvx, and return the model repository."""
        home = self.folders()
        tools = [flag for tool in wanted.tools for flag in ("--with", tool)]
        flags = ["--python", self.python, "--from", wanted.requirement, *tools, *self._sources(wanted)]
        answer = ""
        for command in wanted.first_answer:
            answer = self.run("tool", "run", *flags, "genserve", *command, cache=cache, home=home)
        if not answer.strip():
            raise SystemExit(f"{wanted.name}: the first answer is empty")
        return home / "genserve" / "model_repository"

    def num_packages(self, environment: Path, *, cache: Path) -> int:
        """The number of packages in an environment."""
        command = ("pip", "list", "--format", "json", "--python", str(environment))
        return len(json.loads(self.run(*command, cache=cache, home=self.folders())))

    def _sources(self, wanted: Installation) -> list[str]:
        return ["--constraints", str(wanted.constraints), "--find-links", self.torch_links]


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        numbers = count()
        uv = Uv(
            program=shutil.which(options.uv) or options.uv,
            python=options.python,
            torch_links=options.torch_links,
            folders=lambda: Path(temporary, str(next(numbers))),
        )
        figures = {}
        for wanted in installations(uv, options.before):
            figures[wanted.name] = measure(uv, wanted, repeat=options.repeat)
            print(f"{wanted.name}: {figures[wanted.name]}", file=sys.stderr)
    print(f"\n{table(figures)}\n")
    print(f"Python {options.python}, {os.cpu_count()} cores, {options.repeat} repetitions.")
    if options.json:
        options.json.write_text(json.dumps({"arguments": sys.argv[1:], "figures": figures}, indent=2) + "\n")


def installations(uv: Uv, before: str | None) -> Iterable[Installation]:
    """Build the wheels, and return the installations to measure."""
    if before:
        checkout = uv.folders()
        _git("worktree", "add", "--quiet", "--detach", str(checkout), before)
        try:
            build = _Build.of(uv, checkout)
        finally:
            _git("worktree", "remove", "--force", str(checkout))
        # The older commit needs torch for the default model, and pip for downloads; its chat reads questions.
        flag = "--model-repository=genserve/model_repository"
        commands = (("pull", MODEL, flag), ("chat", MODEL, flag))
        for extras in ("[cpu]", "[cpu,otel,plot]"):
            name = f"{before}: genserve{extras}"
            yield build.installation(name, extras, tools=["pip"], first_answer=commands)
    build = _Build.of(uv, ROOT)
    for extras in ("", "[all]"):
        yield build.installation(f"genserve{extras}", extras, first_answer=(("chat", MODEL, "hello"),))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Build:
    """The wheel of a checkout, and the constraints with which it is installed."""

    wheel: Path
    constraints: Path

    @classmethod
    def of(cls, uv: Uv, checkout: Path) -> _Build:
        folder = uv.folders()
        command = [uv.program, "build", "--quiet", "--wheel", str(checkout), "-o", str(folder)]
        subprocess.run(command, check=True)
        [wheel] = folder.glob("*.whl")
        constraints = (checkout / "constraints.txt").read_text()
        if sys.platform == "linux":
            constraints = re.sub("^(torch==.*)$", r"\1+cpu", constraints, flags=re.MULTILINE)
        (folder / "constraints.txt").write_text(constraints)
        return cls(wheel=wheel, constraints=folder / "constraints.txt")

    def installation(
        self, name: str, extras: str, *, tools: Sequence[str] = (), first_answer: Sequence[Sequence[str]]
    ) -> Installation:
        return Installation(
            name=name,
            requirement=f"genserve{extras} @ {self.wheel.as_uri()}",
            constraints=self.constraints,
            tools=tools,
            first_answer=first_answer,
        )


def _git(*command: str) -> None:
    subprocess.run(["git", "-C", str(ROOT), *command], check=True)


def measure(uv: Uv, wanted: Installation, *, repeat: int) -> dict[str, float]:
    """Measure an installation; return its figures by the names of the rows."""
    install = partial(uv.install, wanted, cache=uv.folders())
    cold_s, environment = _timed(install)
    figures = {
        "environment, MB": _size(environment) / 1e6,
        "packages": uv.num_packages(environment, cache=uv.folders()),
        "install with a cold cache, s": cold_s,
        "install with a warm cache, s": min(_timed(install)[0] for _ in range(repeat)),
    }
    cache = uv.folders()
    answer = partial(uv.first_answer, wanted, cache=cache)
    figures["nothing to first answer, cold cache, s"], repository = _timed(answer)
    for environments in cache.glob("environments-*"):
        shutil.rmtree(environments)     # uvx would not install again
    before_s = _cpu_s()
    figures["nothing to first answer, warm cache, s"], _ = _timed(answer)
    figures["of that, CPU time, s"] = _cpu_s() - before_s
    python = environment / "bin" / "python"
    for row, command in {
        "from genserve import LLM, s": ("-c", "from genserve import LLM"),
        "genserve --help, s": ("-m", "genserve", "--help"),
    }.items():
        run = partial(subprocess.run, [python, "-I", *command], check=True, capture_output=True)
        figures[row] = min(_timed(run)[0] for _ in range(repeat + 1))
    return figures | serving_figures(python, repository, repeat=repeat)


def serving_figures(python: Path, repository: Path, *, repeat: int) -> dict[str, float]:
    """Measure the start of a server, and the memory of its processes."""
    figures = {"server ready, s": float("inf")}
    for _ in range(repeat):
        started_s = time.perf_counter()
        with genserve_server(repository, command=(str(python), "-I", "-m", "genserve")) as server:
            figures["server ready, s"] = min(time.perf_counter() - started_s, figures["server ready, s"])
            figures["resident when ready, MB"] = _resident(server.pid)
            _ask(server.http)
            figures["resident after an answer, MB"] = _resident(server.pid)
            row = "the same, shared pages divided by their processes, MB"
            figures[row] = _resident(server.pid, count="Pss")
            figures["of that, mapped weights, MB"] = _resident(server.pid, of="model.onnx")
    return figures


def _ask(port: int) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 64}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        answer.read()


def _resident(pid: int, *, of: str = "", count: str = "Rss") -> float:
    """Return the memory of a process and its children, in MB.

    Args:
        pid: the id of the process.
        of: count only mapped files with such a path.
        count: `Rss` counts a shared page for each process; `Pss` divides it among the processes.
    """
    total = 0
    is_wanted = not of
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if of and re.match("[0-9a-f]+-", line):
            is_wanted = of in line
        elif is_wanted and line.startswith(f"{count}:"):
            total += int(line.split()[1]) * 1024
    children = " ".join(file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/children"))
    return total / 1e6 + sum(_resident(int(child), of=of, count=count) for child in children.split())


def _timed(call: Callable[[], object]) -> tuple[float, object]:
    started_s = time.perf_counter()
    result = call()
    return time.perf_counter() - started_s, result


def _cpu_s() -> float:
    """Return the CPU time of all ended child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*"))


def table(figures: Mapping[str, Mapping[str, float]]) -> str:
    """Return the figures as a Markdown table, with a column for each installation."""
    rows = [[row, *(form.format(each[row]) for each in figures.values())] for row, form in ROWS.items()]
    return markdown(["", *figures], rows)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--before", metavar="COMMIT", help="compare with this commit")
    parser.add_argument("--uv", default="uv", help="the program")
    parser.add_argument("--python", default=f"3.{sys.version_info.minor}", help="version or path")
    torch_links = "https://download.pytorch.org/whl/cpu/torch/"
    parser.add_argument("--torch-links", default=torch_links, help="page or folder with torch's wheels")
    parser.add_argument("--folder", type=Path, help="where the temporary folders are; 5 GB")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
