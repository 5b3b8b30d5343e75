"""Serving cost: what a running server adds to the measured steps of its engine."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import httpx2

from genserve.bench.answers import Answer, LoadResult
from genserve.bench.datasets import RandomLengths, random_dataset, server_counter
from genserve.bench.dialects import DIALECTS, Requested
from genserve.bench.load_generator import Load, Target, run_load
from genserve.config.edit import ConfigChange, change_text
from genserve.errors import Unreachable
from genserve.planner.step_model import StepModel
from genserve.tuning.measured_steps import MeasuredEngine, ServingCost, StepSize

_READY_S = 180.0
_NUM_ALONE = 8          # requests, one after the other
_NUM_ROUNDS = 3         # rounds of several requests at once
_CONCURRENCY = 8
_PROMPT_TOKENS, _NEW_TOKENS = 64, 48


def measure_serving_cost(engine: MeasuredEngine, *, url: str) -> ServingCost:
    """Measure what a server of the model adds to a first token and to a step.

    A request alone, and some at once, which begin together, are compared with the steps of `engine`. The
    server must be idle and draft no tokens.

    Raises:
        Unreachable: a request fails.
    """
    model = StepModel(engine.steps, max_tokens=engine.limits.max_num_batched_tokens)
    loads = _Loads(engine, url=url)
    loads.run(1)    # the first one is slower
    alone = [loads.run(1) for _ in range(_NUM_ALONE)]
    one_s = median(_extra_s(answers, model) for answers in alone)
    step_s, token_s = one_s, 0.0
    count = min(_CONCURRENCY, engine.limits.max_num_seqs)
    if count > 1:
        several_s = median(_extra_s(loads.run(count), model) for _ in range(_NUM_ROUNDS))
        token_s = max(0.0, (several_s - one_s) / (count - 1))
        step_s = one_s - token_s
    step_s = max(0.0, step_s)
    first_s = median(_first_s(answer) - _prefill_s(answer, model) for [answer] in alone)
    request_s = max(0.0, first_s - step_s - token_s)
    return ServingCost(request_s=request_s, busy_s=request_s, step_s=step_s, token_s=token_s)


@contextmanager
def serving(name: str, *, logits: str, repository: Path) -> Iterator[str]:
    """Serve a text model by a process of its own, without drafts, until the block ends; yields the URL.

    Args:
        name: the text model's name.
        logits: the folder of its logits stage.
        repository: the folder of its models, which stays as it is.

    Raises:
        Unreachable: the server does not become ready.
    """
    with TemporaryDirectory() as folder:
        models = Path(folder) / "models"
        shutil.copytree(repository.resolve(), models, copy_function=_link)
        config = models / logits / "config.pbtxt"
        text = config.read_text(encoding="utf-8")
        config.unlink()     # it is a link
        config.write_text(change_text(text, _NO_DRAFTS), encoding="utf-8")
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        flags = ["--host=127.0.0.1", f"--http-port={port}", "--allow-grpc=false", "--allow-metrics=false"]
        command = [sys.executable, "-m", "genserve", "serve", name, f"--model-repository={models}", *flags]
        with (Path(folder) / "log").open("w+b") as log:
            # Without the flags and keys of another server.
            environment = {key: value for key, value in os.environ.items() if not key.startswith("GENSERVE_")}
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
            try:
                url = f"http://127.0.0.1:{port}"
                _wait(process, url, log=Path(log.name))
                yield url
            finally:
                process.terminate()
                process.wait()


_NO_DRAFTS = ConfigChange(fields={}, parameters={"speculation": "none"})


class _Loads:
    """Sends requests to a server, some at once."""

    def __init__(self, engine: MeasuredEngine, *, url: str) -> None:
        third = engine.limits.max_length // 3
        lengths = RandomLengths(input_len=min(_PROMPT_TOKENS, third), output_len=min(_NEW_TOKENS, third))
        with httpx2.Client(base_url=url, trust_env=False) as http:
            counter = server_counter(http, model=engine.model)
            self._prompts = random_dataset(lengths, seed=0, counter=counter)
        self._target = Target(
            base_url=url,
            dialect=DIALECTS["openai"],
            requested=Requested(model=engine.model, temperature=0.0, ignore_eos=True),
        )

    def run(self, count: int) -> list[Answer]:
        """Return the answers to `count` requests that are sent at once."""
        result = LoadResult()
        load = Load(prompts=itertools.islice(self._prompts, count), arrivals_s=itertools.repeat(0.0))
        run_load(load, self._target, result)
        for failure in result.failures():
            raise Unreachable(f"{self._target.url} failed with {failure.kind}: {failure.message}")
        return result.complete()


def _extra_s(answers: Sequence[Answer], model: StepModel) -> float:
    """Return by how much the steps are longer, in the median, in which all of the requests decode."""
    first_s, last_s = max(a.text_times_s[0] for a in answers), min(a.text_times_s[-1] for a in answers)
    extra_s: list[float] = []
    for before_s, now_s in itertools.pairwise(answers[0].text_times_s):
        if before_s >= first_s and now_s <= last_s:
            num_sent = sum(time_s <= before_s for answer in answers for time_s in answer.text_times_s)
            context = num_sent + sum(answer.prompt_tokens or 0 for answer in answers)
            size = StepSize(
                decodes=len(answers),
                context_tokens=context,
                prompt_tokens=0,
                prompt_pairs=0,
                rows=len(answers),
            )
            extra_s.append(now_s - before_s - model.seconds(size))
    return median(extra_s) if extra_s else 0.0


def _first_s(answer: Answer) -> float:
    return answer.text_times_s[0] - answer.sent_s


def _prefill_s(answer: Answer, model: StepModel) -> float:
    num_tokens = answer.prompt_tokens or 0
    size = StepSize(
        decodes=0,
        context_tokens=0,
        prompt_tokens=num_tokens,
        prompt_pairs=num_tokens * (num_tokens + 1) // 2,
        rows=1,
    )
    return model.seconds(size)


def _link(source: str, target: str) -> None:
    """Link a file, or copy it where links are not possible."""
    try:
        Path(target).symlink_to(source)
    except OSError:
        shutil.copy2(source, target)


def _wait(process: subprocess.Popen[bytes], url: str, *, log: Path) -> None:
    deadline_s = time.monotonic() + _READY_S
    with httpx2.Client(base_url=url, trust_env=False) as http:
        while time.monotonic() < deadline_s and process.poll() is None:
            try:
                if http.get("/v2/health/ready").status_code == 200:
                    return
            except httpx2.TransportError:
                pass
            time.sleep(0.05)
    end = log.read_text(encoding="utf-8", errors="replace")[-2000:]
    raise Unreachable(f"the server to measure did not become ready: {end}")
