"""Targets: the servers and engines that `serving.py` compares, each as a context manager."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

from servers import free_port, genserve_server, running

from genserve.backends.onnx_session import num_cores
from genserve.cli.load_generator import random_prompts
from genserve.repository.index import scan

__all__ = ["PEERS", "Measured", "Target", "Work", "bare_loop", "genserve"]

Measured: TypeAlias = Mapping[str, Any]     # the fields of `genserve.cli.load_generator.LoadResult`

HERE = Path(__file__).parent
SLOTS = 32
SLOT_TOKENS = 1024
BATCH_TOKENS = 256  # per step; by default transformers allocates attention masks for 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A load that is the same for all targets; a word is about one token."""

    concurrency: int
    num_requests: int
    new_tokens: int
    prompt_words: int
    shared_words: int = 0   # at the beginning of every prompt
    seed: int = 0           # another seed yields other texts
    num_answers: int | None = None  # ends the load (servers only); None: all requests are answered


class Target(Protocol):
    """A running server or engine."""

    def measure(self, work: Work) -> Measured:
        """Run the load to its end."""


class _Server:
    """A server, loaded over HTTP by the process `load.py`."""

    def __init__(
        self,
        port: int,
        *,
        model: str,
        api: str,
        extra: Mapping[str, Any],
        keep_alive: bool = True,
        pid: int | None = None,
    ) -> None:
        self._pid = pid
        self._flags = [f"--port={port}", f"--model={model}", f"--api={api}", f"--extra={json.dumps(extra)}"]
        if not keep_alive:
            self._flags.append("--no-keep-alive")

    def measure(self, work: Work) -> Measured:
        flags = [
            f"--concurrency={work.concurrency}",
            f"--requests={work.num_requests}",
            f"--new-tokens={work.new_tokens}",
            f"--prompt-words={work.prompt_words}",
            f"--shared-words={work.shared_words}",
            f"--seed={work.seed}",
        ]
        if work.num_answers is not None:
            flags.append(f"--answers={work.num_answers}")
        if self._pid is None:
            return _run("load.py", *self._flags, *flags)
        before_s = _cpu_s(self._pid)
        measured = _run("load.py", *self._flags, *flags)
        return measured | {"server_cpu_s": _cpu_s(self._pid) - before_s}


def _cpu_s(pid: int) -> float:
    """The CPU time of a process so far; Linux only."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


class _EngineProcess:
    """A script of `peers/`, which answers each line with a line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._answer()

    def measure(self, work: Work) -> Measured:
        prompts = random_prompts(
            work.num_requests, words=work.prompt_words, shared_words=work.shared_words, seed=work.seed
        )
        load = {"prompts": prompts, "concurrency": work.concurrency, "new_tokens": work.new_tokens}
        assert self._process.stdin is not None
        print(json.dumps(load), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args} ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


class _BareLoop:
    """The forward alone, with one row per concurrent request."""

    def __init__(self, repository: Path, *, model: str) -> None:
        self._flags = [f"--repository={repository}", f"--model={model}"]

    def measure(self, work: Work) -> Measured:
        flags = [
            f"--rows={work.concurrency}",
            f"--prompt-tokens={work.prompt_words}",
            f"--new-tokens={work.new_tokens}",
        ]
        return _run("bare_loop.py", *self._flags, *flags)


def _run(script: str, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, str(HERE / script), *arguments]
    answer: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return answer


@contextmanager
def genserve(
    repository: Path, *, model: str, api: str = "generate", flags: Sequence[str] = ()
) -> Iterator[Target]:
    """`genserve serve` over HTTP; on Linux, its CPU time is `server_cpu_s`."""
    with genserve_server(repository, flags=flags) as server:
        pid = server.pid if Path("/proc/self/stat").exists() else None
        yield _Server(server.http, model=model, api=api, extra={}, pid=pid)


def bare_loop(repository: Path, *, model: str) -> Target:
    """The forward of the exported graph alone, in one batch of `concurrency` rows, without latencies."""
    return _BareLoop(repository, model=model)


@contextmanager
def _llama_server(program: str, model: str) -> Iterator[Target]:
    """llama.cpp's server with continuous batching, on a GGUF file."""
    port = free_port()
    command = [program, "--model", model, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--threads", str(num_cores()), "--parallel", str(SLOTS), "--cont-batching"]
    command += ["--ctx-size", str(SLOTS * SLOT_TOKENS)]
    extra = {"ignore_eos": True, "stream_options": {"include_usage": True}}
    with running(command, ready_url=f"http://127.0.0.1:{port}/health"):
        # It announces keep-alive, but closes the connection after a stream.
        yield _Server(port, model=model, api="completions", extra=extra, keep_alive=False)


@contextmanager
def _transformers(program: str, model: str) -> Iterator[Target]:
    """`transformers serve` with continuous batching, on a Hugging Face folder."""
    port, block_tokens = free_port(), 32
    command = [program, "serve", model, "--continuous-batching", "--host=127.0.0.1", f"--port={port}"]
    command += ["--device=cpu", f"--cb-block-size={block_tokens}", f"--cb-max-batch-tokens={BATCH_TOKENS}"]
    command += [f"--cb-num-blocks={SLOTS * SLOT_TOKENS // block_tokens}"]
    # It has no ignore_eos; an eos token that does not exist never ends an answer.
    extra = {"generation_config": json.dumps({"do_sample": False, "eos_token_id": -1})}
    with running(command, ready_url=f"http://127.0.0.1:{port}/health"):
        yield _Server(port, model=model, api="completions", extra=extra)


@contextmanager
def _genserve(program: str, repository: str) -> Iterator[Target]:
    """The genserve of another environment or commit, on a repository with one model."""
    [model] = (entry.name for entry in scan([Path(repository)]).values() if entry.is_ensemble)
    with genserve_server(Path(repository), command=(program,)) as server:
        yield _Server(server.http, model=model, api="generate", extra={})


def _engine(script: str) -> Callable[[str, str], AbstractContextManager[Target]]:
    """An engine in a separate process, run by the Python that has it installed."""

    @contextmanager
    def start(program: str, model: str) -> Iterator[Target]:
        command = [program, str(HERE / "peers" / script), model]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            yield _EngineProcess(process)

    return start


# By kind: starts a peer from a program (a server, or the Python of an engine) and a model.
PEERS: Mapping[str, Callable[[str, str], AbstractContextManager[Target]]] = MappingProxyType(
    {
        "llama-server": _llama_server,
        "transformers": _transformers,
        "openvino": _engine("openvino_engine.py"),
        "onnxruntime-genai": _engine("onnxruntime_genai_engine.py"),
        "engine": _engine("genserve_engine.py"),
        "genserve": _genserve,
    }
)
