"""Same file: a GGUF file in genserve and in llama-server: tokens, distance from fp32, and memory.

    genserve export MODEL.gguf --name model --precision source --model-repository REPOSITORY
    python benchmarks/same_file.py --model-repository REPOSITORY --model model \
        --llama-server PROGRAM --gguf MODEL.gguf

Both continue the same token ids greedily. Where they first choose different tokens, transformers computes the
logits in fp32 from the dequantized file. Nearer to these is the server whose log-probabilities of the two
tokens differ by a more similar amount. `serving.py` compares the speeds.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from servers import free_port, genserve_server, running

from genserve.export.checkpoint_reader import read_checkpoint
from genserve.export.source_model import source_model
from genserve.machine import num_cores
from genserve.text.tokenizer import Tokenizer

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village",
    "Water boils at a temperature of",
    "The quick brown fox",
    "In 1969, the first humans",
    "def fibonacci(n):\n    ",
    "To make bread, you need flour,",
    "The largest planet of the solar system is",
    "A good friend is someone who",
    "Die Hauptstadt von Deutschland ist",
    "Le chat est assis sur",
    "The three primary colours are",
    "Photosynthesis is the process by which",
    "My favourite book is about",
    "SELECT name, age FROM users WHERE",
    "The meaning of the word 'ocean' is",
    "Two plus two equals",
    "The Great Wall of China was built",
    "Dear Sir or Madam,\n\nI am writing to",
    "El agua es importante porque",
)
CANDIDATES = 20     # log-probabilities of each token that both servers return


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The tokens of an answer, and for each one the log-probabilities of the likeliest tokens by id."""

    ids: Sequence[int]
    likeliest: Sequence[Mapping[int, float]]


def main() -> None:
    options = _options()
    [folder] = (options.model_repository / f"{options.model}_tokenizer").glob("[0-9]*")
    tokenizer = Tokenizer.from_folder(folder)
    prompts = [list(tokenizer.encode(text)) for text in PROMPTS]
    with ExitStack() as stack:
        ours = stack.enter_context(genserve_server(options.model_repository))
        port = free_port()
        command = [options.llama_server, "--model", str(options.gguf), "--host", "127.0.0.1"]
        command += ["--port", str(port), "--threads", str(num_cores())]
        command += ["--ctx-size", "4096", "--parallel", "1"]
        theirs = stack.enter_context(running(command, ready_url=f"http://127.0.0.1:{port}/health"))
        same_prompts = sum(
            _post(port, "/tokenize", content=text, add_special=True)["tokens"] == ids
            for text, ids in zip(PROMPTS, prompts, strict=True)
        )
        mine = [_genserve(ours.http, ids, options=options) for ids in prompts]
        other = [_llama(port, ids, options=options) for ids in prompts]
        memory = {"genserve": _resident_bytes(ours.pid), "llama-server": _resident_bytes(theirs)}
    print(f"prompts with the same token ids: {same_prompts} of {len(prompts)}")
    _compare(prompts, mine, other, options=options)
    for name, parts in memory.items():
        print(f"{name}: " + ", ".join(f"{part} {size / 1e6:.0f} MB" for part, size in parts.items()))


def _compare(
    prompts: Sequence[Sequence[int]],
    mine: Sequence[Answer],
    other: Sequence[Answer],
    *,
    options: argparse.Namespace,
) -> None:
    common = [_common(a.ids, b.ids) for a, b in zip(mine, other, strict=True)]
    equal = sum(length == options.tokens for length in common)
    print(f"answers of {options.tokens} tokens that are equal: {equal} of {len(prompts)}")
    mean = sum(common) / len(common)
    print(f"tokens before the first difference: mean {mean:.1f}, median {median(common):.0f}")
    if equal == len(prompts):
        return
    model = source_model(read_checkpoint(options.gguf, source=options.gguf.name))
    nearer = {"genserve": 0, "llama-server": 0}
    first = {"genserve": 0, "llama-server": 0, "neither": 0}
    for prompt, a, b, at in zip(prompts, mine, other, common, strict=True):
        if at == options.tokens:
            continue
        with torch.inference_mode():
            ids = torch.tensor([[*prompt, *a.ids[:at]]])
            logits = torch.log_softmax(model(ids).logits[0, -1].double(), -1)
        pair = a.ids[at], b.ids[at]
        best = int(logits.argmax())
        first["genserve" if best == pair[0] else "llama-server" if best == pair[1] else "neither"] += 1
        expected = float(logits[pair[0]] - logits[pair[1]])
        gaps = [likeliest[at][pair[0]] - likeliest[at][pair[1]] for likeliest in (a.likeliest, b.likeliest)]
        distances = [abs(gap - expected) for gap in gaps]
        nearer["genserve" if distances[0] < distances[1] else "llama-server"] += 1
        print(
            f"  after {at:2} tokens: {pair[0]} or {pair[1]}; difference of their logits in fp32 "
            f"{expected:+.3f}, genserve {gaps[0]:+.3f}, llama-server {gaps[1]:+.3f}"
        )
    print("nearer to fp32: " + ", ".join(f"{name} {count}" for name, count in nearer.items()))
    print("chose the token of fp32: " + ", ".join(f"{name} {count}" for name, count in first.items()))


def _genserve(port: int, ids: Sequence[int], *, options: argparse.Namespace) -> Answer:
    answer = _post(
        port, "/v1/completions", model=options.model, prompt=list(ids), max_tokens=options.tokens,
        temperature=0, ignore_eos=True, logprobs=CANDIDATES, return_token_ids=True,
        return_tokens_as_token_ids=True,
    )  # fmt: skip
    [choice] = answer["choices"]
    tops = [
        {int(token.removeprefix("token_id:")): value for token, value in top.items()}
        for top in choice["logprobs"]["top_logprobs"]
    ]
    return Answer(ids=choice["token_ids"], likeliest=tops)


def _llama(port: int, ids: Sequence[int], *, options: argparse.Namespace) -> Answer:
    answer = _post(
        port, "/completion", prompt=list(ids), n_predict=options.tokens, temperature=0, ignore_eos=True,
        n_probs=CANDIDATES, return_tokens=True, cache_prompt=False,
    )  # fmt: skip
    tops = [
        {each["id"]: each["logprob"] for each in token["top_logprobs"]}
        for token in answer["completion_probabilities"]
    ]
    return Answer(ids=[token["id"] for token in answer["completion_probabilities"]], likeliest=tops)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the number of tokens before the first difference."""
    pairs = enumerate(zip(a, b, strict=True))
    return next((i for i, (x, y) in pairs if x != y), len(a))


def _resident_bytes(pid: int) -> dict[str, int]:
    """Return the resident memory of a process: its own, and pages of mapped files; Linux only."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith(("VmRSS", "Rss"))}
    names = {"VmRSS": "resident", "RssAnon": "of its own", "RssFile": "of mapped files"}
    return {name: kib[key] << 10 for key, name in names.items()}


def _post(port: int, path: str, **body: Any) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        return json.loads(response.read())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model-repository", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--llama-server", required=True, metavar="PROGRAM")
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=32)
    return parser.parse_args()


if __name__ == "__main__":
    main()
