"""Targets: the servers and engines that `serving.py` compares, each as a context manager."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

from servers import free_port, genserve_server, running

from genserve.bench.datasets import random_prompts
from genserve.machine import num_cores
from genserve.repository.index import scan

__all__ = ["PEERS", "Measured", "Target", "Work", "bare_loop", "genserve", "server_at"]

# Raw measurements: elapsed_s, prompt_tokens and new_tokens per answer, first_text_s per request, gaps_s
# between texts.
Measured: TypeAlias = Mapping[str, Any]

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
    shared_words: int = 0   # words at the beginning of every prompt
    seed: int = 0           # another seed yields other texts

    def prompts(self) -> list[str]:
        """The texts of the requests."""
        return random_prompts(
            self.num_requests, words=self.prompt_words, shared_words=self.shared_words, seed=self.seed
        )


class Target(Protocol):
    """A running server or engine."""

    def measure(self, work: Work) -> Measured:
        """Run the load to its end."""


class _Server:
    """A server that `genserve bench`, in a process of its own, loads over HTTP."""

    def __init__(self, port: int, *, model: str, backend: str, extra: Mapping[str, Any]) -> None:
        self._command = [sys.executable, "-m", "genserve", "bench", model, f"--url=http://127.0.0.1:{port}"]
        self._command += [f"--backend={backend}", f"--extra-body={json.dumps(extra)}", "--ignore-eos"]
        self._command += ["--num-warmups=0", "--json", "--save-detailed"]

    def measure(self, work: Work) -> Measured:
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            print(*work.prompts(), sep="\n", file=file, flush=True)
            flags = [f"--dataset-path={file.name}", f"--max-concurrency={work.concurrency}"]
            flags += [f"--output-len={work.new_tokens}", "--tokenizer=none"]
            done = subprocess.run([*self._command, *flags], check=True, stdout=subprocess.PIPE)
        return _measured(json.loads(done.stdout)["runs"][0])


def _measured(run: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the details of a load."""
    if run["failed"]:
        raise SystemExit(f"requests failed: {run['errors_by_kind']}")
    tokens = list(zip(run["is_complete"], run["input_lens"], run["output_lens"], strict=True))
    return {
        "elapsed_s": run["duration"],
        "prompt_tokens": [prompt for is_complete, prompt, _ in tokens if is_complete],
        "new_tokens": [new for is_complete, _, new in tokens if is_complete],
        "first_text_s": [time_s for time_s in run["ttfts"] if time_s is not None],
        "gaps_s": [*itertools.chain.from_iterable(run["itls"])],
    }


class _EngineProcess:
    """A script of `peers/`, which answers each line with a line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._answer()

    def measure(self, work: Work) -> Measured:
        load = {"prompts": work.prompts(), "concurrency": work.concurrency, "new_tokens": work.new_tokens}
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
    """The forward alone, with one sequence per concurrent request."""

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
    repository: Path, *, model: str, backend: str = "tgi", flags: Sequence[str] = ()
) -> Iterator[Target]:
    """Run `genserve serve`, to be measured over HTTP."""
    with genserve_server(repository, flags=flags) as server:
        yield _Server(server.http, model=model, backend=backend, extra={})


def server_at(port: int, *, model: str) -> Target:
    """Return a running server that speaks OpenAI's completions."""
    return _Server(port, model=model, backend="openai", extra={})


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
    with running(command, ready_url=f"http://127.0.0.1:{port}/health"):
        yield _Server(port, model=model, backend="openai", extra={})


@contextmanager
def _transformers(program: str, model: str) -> Iterator[Target]:
    """`transformers serve` with continuous batching, on a Hugging Face folder."""
    port, block_tokens = free_port(), 32
    command = [program, "serve", model, "--continuous-batching", "--host=127.0.0.1", f"--port={port}"]
    command += ["--device=cpu", f"--cb-block-size={block_tokens}", f"--cb-max-batch-tokens={BATCH_TOKENS}"]
    command += [f"--cb-num-blocks={SLOTS * SLOT_TOKENS // block_tokens}"]
    # transformers has no ignore_eos, but an eos token that does not exist never ends an answer.
    config = json.dumps({"do_sample": False, "eos_token_id": -1})
    extra = {"generation_config": config, "ignore_eos": None, "stream_options": None}
    with running(command, ready_url=f"http://127.0.0.1:{port}/health"):
        yield _Server(port, model=model, backend="openai", extra=extra)


@contextmanager
def _genserve(program: str, repository: str) -> Iterator[Target]:
    """Run the genserve of another environment or commit, on a repository with one model."""
    [model] = (entry.name for entry in scan([Path(repository)]).values() if entry.is_ensemble)
    with genserve_server(Path(repository), command=(program,)) as server:
        yield _Server(server.http, model=model, backend="tgi", extra={})


def _engine(script: str) -> Callable[[str, str], AbstractContextManager[Target]]:
    """Return a function that runs an engine in a process, with the Python that has it installed."""

    @contextmanager
    def start(program: str, model: str) -> Iterator[Target]:
        command = [program, str(HERE / "peers" / script), model]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            yield _EngineProcess(process)

    return start


# By kind, the function that starts a peer from a program (a server, or an engine's Python) and a model.
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
