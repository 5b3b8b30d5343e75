"""Adapters: tokens per second of streams with LoRA adapters, beside the same streams without.

    python benchmarks/adapters.py --model-repository model_repository --model smollm2

loads random adapters of all linear layers, lets the streams of a round have adapters in turn, and measures
rounds with and without adapters alternately. Rounds before these bring all prompts into the prefix cache,
which has them for each adapter apart. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from report import markdown

from genserve.completion import join_deltas
from genserve.engine.delta_streams import DeltaStream
from genserve.repository.repository import Repository
from genserve.sampling.sampling_params import SamplingParams
from genserve.textmodel.adapters import Adapters
from genserve.textmodel.runtimes.onnx_logits import OnnxLogits
from genserve.textmodel.text_model import TextModel

_MODULES = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def write_adapter(folder: Path, shapes: Mapping[str, tuple[int, int]], *, rank: int, seed: int) -> None:
    """Write an adapter of random numbers; `shapes` has the inputs and outputs of modules."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for module, (inputs, outputs) in shapes.items():
        for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            name = f"base_model.model.{module}.lora_{part}.weight"
            tensors[name] = rng.normal(0, 0.02, shape).astype(np.float32)
    header: dict[str, Any] = {}
    at = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    folder.mkdir()
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.tobytes())
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(_MODULES.values())}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def shapes_of(logits: OnnxLogits) -> dict[str, tuple[int, int]]:
    """Return the inputs and outputs of the linear layers of a model of Llama's kind."""
    shapes = {}
    for role, target in logits.graphs[0].adapter_targets.items():
        layer, number, part = role.split(".", 2)
        shapes[f"model.{layer}.{number}.{_MODULES[part]}"] = (target.shape.in_features, target.num_outputs)
    return shapes


def tokens_per_s(model: TextModel, adapters: Sequence[str | None], *, num_tokens: int) -> float:
    """Run a stream for each of the adapters, and return the tokens per second of all together."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0)
    requests = [
        model.prepare(f"Write about the number {number}.", params, adapter=adapter)
        for number, adapter in enumerate(adapters)
    ]

    def run(request: Any) -> int:
        with DeltaStream(model.engine, request) as stream:
            return len(join_deltas(stream).token_ids)

    started_s = time.perf_counter()
    with ThreadPoolExecutor(len(requests)) as threads:
        total = sum(threads.map(run, requests))
    return total / (time.perf_counter() - started_s)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-repository", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--adapters", type=int, default=64, help="adapters in memory")
    parser.add_argument("--used", type=int, default=16, help="adapters of a round")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="of each stream")
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    repository = Repository([args.model_repository])
    repository.start()
    model = repository.text_model(args.model)
    assert isinstance(model, TextModel)
    assert isinstance(model.logits, OnnxLogits)
    assert isinstance(model.adapters, Adapters)
    model.adapters._max_loaded = args.adapters
    with tempfile.TemporaryDirectory() as scratch:
        shapes, names = shapes_of(model.logits), [f"adapter-{number}" for number in range(args.adapters)]
        loads_s = []
        for seed, name in enumerate(names):
            write_adapter(Path(scratch) / name, shapes, rank=args.rank, seed=seed)
            started_s = time.perf_counter()
            model.adapters.load(name, Path(scratch) / name)
            loads_s.append(time.perf_counter() - started_s)
        rounds: dict[str, list[float]] = {"without": [], "with": []}
        num_unmeasured = -(-args.adapters // args.used)     # so many rounds have had all adapters
        for number in range(num_unmeasured + args.rounds):
            first = number * args.used
            used = [names[(first + stream % args.used) % len(names)] for stream in range(args.streams)]
            for side, adapters in (("without", [None] * args.streams), ("with", used)):
                speed = tokens_per_s(model, adapters, num_tokens=args.tokens)
                if number >= num_unmeasured:
                    rounds[side].append(speed)
    repository.close()
    ratios = [mine / other for mine, other in zip(rounds["with"], rounds["without"], strict=True)]
    heading = f"{args.streams} streams, {args.used} of {args.adapters} adapters of rank {args.rank}"
    rows = [[f"tokens/s {side} adapters", f"{statistics.median(rounds[side]):.0f}"] for side in rounds]
    rows += [["ratio, median of rounds", f"{statistics.median(ratios):.2f}"]]
    rows += [["ratios", f"{min(ratios):.2f} to {max(ratios):.2f}"]]
    rows += [["load of an adapter", f"{1000 * statistics.median(loads_s):.0f} ms"]]
    print(markdown((heading, ""), rows))


if __name__ == "__main__":
    main()
