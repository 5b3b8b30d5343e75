"""Sampling: the time to sample the tokens of a step, by method, compared with plain torch.

    python benchmarks/sampling.py --model-repository model_repository --model smollm2

samples for 1, 8 and 32 token sequences with the engine's sampler, from rows of the model's logits over real
text (peaked) and from normal noise (flat), and in the same rounds with `plain_sampling.py`, which sorts. Both
run on one thread and are measured in CPU time, since a short call may wait long on a busy machine. Then each
method alternates with decode steps of the model, as in a server, which gives its share of a step. Prints
tables of medians in Markdown; a ratio or share is the median of the ratios or shares of the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from batches import forward_batch
from plain_sampling import plain_pick
from report import markdown, median, ratio

from genserve.engine.token_sequence import TokenSequence
from genserve.export.reference import read_text
from genserve.repository.index import scan
from genserve.repository.model_loader import load_stage_logits
from genserve.sampling.batch_sampler import sample
from genserve.sampling.sampling_params import SamplingParams
from genserve.text.tokenizer import Tokenizer
from genserve.textmodel.logits_runtime import LoadedLogits

DRAWN = {"temperature": 0.8}
NUCLEUS = {**DRAWN, "top_k": 50, "top_p": 0.9}
METHODS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "temperature": DRAWN,
    "top_k": {**DRAWN, "top_k": 50},
    "top_p": {**DRAWN, "top_p": 0.9},
    "top_k, top_p": NUCLEUS,
    "min_p": {**DRAWN, "min_p": 0.05},
    "typical_p": {**DRAWN, "typical_p": 0.95},
    "epsilon_cutoff": {**DRAWN, "epsilon_cutoff": 3e-4},
    "eta_cutoff": {**DRAWN, "eta_cutoff": 3e-4},
    "top_n_sigma": {**DRAWN, "top_n_sigma": 1.0},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "three penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 3},
    "logit_bias": {"logit_bias": dict.fromkeys(range(100), 1.0)},
    "logprobs": {"logprobs": True},
    "top_logprobs": {"logprobs": True, "top_logprobs": 5},
    "processed": {**NUCLEUS, "logprobs": True, "top_logprobs": 5, "logprobs_mode": "processed"},
}
HEADINGS = ("method", "rows x logits", "peaked, us", "plain, us", "ratio", "flat, us", "plain, us", "ratio")


class Size(NamedTuple):
    rows: int
    vocab_size: int

    def __str__(self) -> str:
        return f"{self.rows} x {self.vocab_size}"


class _NoText:
    """Implements `AnswerText` without any work."""

    stop: str | None = None

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class Model:
    """The logits stage, with sequences that have read a part of a text."""

    def __init__(self, repository: Path, name: str, *, rows: int, prompt_tokens: int) -> None:
        index = scan([repository])
        stage = index[f"{name}_logits"]
        self._logits: LoadedLogits = load_stage_logits(stage)
        tokenizer = Tokenizer.from_folder(index[f"{name}_tokenizer"].latest_version())
        text = tokenizer.encode(read_text("calibration"))
        lengths = range(prompt_tokens, prompt_tokens + rows)
        self.prompts = [(text * (1 + length // len(text)))[:length] for length in lengths]
        self._length = max(lengths) + 1
        self.rows = self._forward(self.prompts, past=[0] * rows).copy()

    def step(self) -> np.ndarray[Any, Any]:
        """Decode one token of each row, always at the same positions."""
        last = [prompt[-1:] for prompt in self.prompts]
        return self._forward(last, past=[len(prompt) for prompt in self.prompts])

    def _forward(self, token_ids: Sequence[Sequence[int]], *, past: Sequence[int]) -> np.ndarray[Any, Any]:
        logits = self._logits.forward(forward_batch(self._logits, token_ids, past=past, length=self._length))
        assert isinstance(logits, np.ndarray), "this is for a model on the CPU"
        return logits


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    rows = max(options.rows)
    model = Model(options.model_repository, options.model, rows=rows, prompt_tokens=options.prompt_tokens)
    sizes = [Size(rows, size) for size in options.vocab_sizes for rows in options.rows]
    pairs: dict[str, Any] = {}
    for size in sizes:
        for kind, logits in (("peaked", _peaked(model.rows, size)), ("flat", _flat(size))):
            for method in options.methods:
                pairs[f"{method} | {size} | {kind}"] = _compare(method, logits, options=options)
    print(f"{markdown(HEADINGS, [_pair_row(m, size, pairs) for m in options.methods for size in sizes])}\n")
    shares = {method: _between_steps(method, model, options=options) for method in options.methods}
    print(_share_table(shares, Size(*model.rows.shape)))
    if options.json:
        report = {"picks": pairs, "steps": shares, "vocab_size": model.rows.shape[1]}
        options.json.write_text(json.dumps(report, indent=2) + "\n")


def _peaked(rows: np.ndarray[Any, Any], size: Size) -> np.ndarray[Any, Any]:
    """Return rows of a model; additional tokens of a larger vocabulary get logits from the lower half."""
    rows = rows[: size.rows, : size.vocab_size]
    lower = np.sort(rows, axis=1)[:, : max(1, rows.shape[1] // 2)]
    more = np.random.default_rng(1).choice(lower, size.vocab_size - rows.shape[1], axis=1)
    return np.concatenate([rows, more], axis=1)


def _flat(size: Size) -> np.ndarray[Any, Any]:
    return np.random.default_rng(2).standard_normal(size, dtype=np.float32)


def _compare(
    method: str, logits: np.ndarray[Any, Any], *, options: argparse.Namespace
) -> list[dict[str, float]]:
    """Return the microseconds of both samplers in each round; rounds are short, and samplers alternate."""
    sequences = _sequences(method, len(logits), vocab_size=logits.shape[1], options=options)
    params, ours = sequences[0].params, logits.copy()
    rounds = []
    for _ in range(options.rounds + 1):
        np.copyto(ours, logits)
        started_s = time.thread_time()
        picks = sample(ours, sequences)
        ours_s = time.thread_time() - started_s
        theirs = torch.from_numpy(logits).clone()
        histories = [sequence.token_ids for sequence in sequences]
        started_s = time.thread_time()
        plain_pick(theirs, params, histories, num_prompt_tokens=options.history)
        theirs_s = time.thread_time() - started_s
        rounds.append({"ours_us": ours_s * 1e6, "plain_us": theirs_s * 1e6})
        for sequence, picked in zip(sequences, picks, strict=True):
            sequence.append(picked.token_id)
    return rounds[1:]  # the first round warms up memory


def _between_steps(method: str, model: Model, *, options: argparse.Namespace) -> list[dict[str, float]]:
    """Return the wall-clock milliseconds of decode steps, and the CPU milliseconds of sampling after them."""
    num_rows, vocab_size = model.rows.shape
    sequences = _sequences(method, num_rows, vocab_size=vocab_size, options=options)
    rounds = []
    for _ in range(options.rounds + 1):
        started_s = time.perf_counter()
        logits = model.step()
        step_s = time.perf_counter() - started_s
        started_s = time.thread_time()
        picks = sample(logits, sequences)
        pick_s = time.thread_time() - started_s
        rounds.append({"step_ms": step_s * 1e3, "pick_ms": pick_s * 1e3})
        for sequence, picked in zip(sequences, picks, strict=True):
            sequence.append(picked.token_id)
    return rounds[1:]


def _sequences(method: str, num: int, *, vocab_size: int, options: argparse.Namespace) -> list[TokenSequence]:
    """Return token sequences with prompts of random tokens; seeds make the draws reproducible."""
    rng = np.random.default_rng(3)
    return [
        TokenSequence(
            rng.integers(0, vocab_size, options.history).tolist(),
            params=SamplingParams(**METHODS[method]),
            seed=seed,
            eos_token_ids=frozenset(),
            text=_NoText(),
            max_length=options.history + options.rounds + 2,
            vocab_size=vocab_size,
        )
        for seed in range(num)
    ]


def _pair_row(method: str, size: Size, pairs: Mapping[str, Sequence[Mapping[str, float]]]) -> list[str]:
    cells = [method, str(size)]
    for kind in ("peaked", "flat"):
        rounds = pairs[f"{method} | {size} | {kind}"]
        inverse = [{"us": one["plain_us"]} for one in rounds]
        factor = ratio(inverse, [{"us": one["ours_us"]} for one in rounds], "us")
        cells += [f"{median(rounds, 'ours_us'):.0f}", f"{median(rounds, 'plain_us'):.0f}", f"{factor:.1f}"]
    return cells


def _share_table(shares: Mapping[str, Sequence[Mapping[str, float]]], size: Size) -> str:
    rows = []
    for method, rounds in shares.items():
        share = statistics.median(one["pick_ms"] / one["step_ms"] for one in rounds)
        rows.append(
            (method, f"{median(rounds, 'pick_ms'):.2f}", f"{median(rounds, 'step_ms'):.0f}", f"{share:.1%}")
        )
    return markdown((f"with decode steps of {size}", "sample, ms", "step, ms", "share"), rows)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model-repository", type=Path, default=Path("model_repository"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--vocab-sizes", type=int, nargs="+", default=[49152, 250880])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--history", type=int, default=512, help="tokens of each sequence's prompt")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="that the model has read before a step")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
