"""Export memory: the peak memory of an export of random weights, in the shapes of models.

    python benchmarks/export_memory.py [--layers N] [SHAPE ...]

Writes a checkpoint in bfloat16 into a temporary folder, exports it in a process of its own, and samples that
process' memory: anonymous memory, which must fit, and pages of mapped files, which the system takes back when
it needs them. Memory does not depend on the number of layers, which is small by default: running the source
and comparing a whole model of 9 billion weights takes half an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.support.tiny_llama import tiny_tokenizer

_LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048,
    "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "vocab_size": 128256, "tie_word_embeddings": True,
}  # fmt: skip
_GEMMA = {
    "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "hidden_size": 3584,
    "intermediate_size": 14336, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
    "query_pre_attn_scalar": 256, "vocab_size": 256000, "tie_word_embeddings": True,
}  # fmt: skip
# The config and the number of layers of the whole model.
SHAPES: Mapping[str, tuple[Mapping[str, Any], int]] = {
    "1B": (_LLAMA, 16),     # Llama 3.2 1B: a head of 263 million weights
    "9B": (_GEMMA, 42),     # Gemma 2 9B: a head of 917 million weights
}


def write_checkpoint(folder: Path, config: Mapping[str, Any], *, layers: int) -> int:
    """Write random weights, repeated from a block; return their number."""
    from transformers import AutoConfig, AutoModelForCausalLM

    full = AutoConfig.for_model(**config, num_hidden_layers=layers, max_position_embeddings=4096)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(full)
    shapes = {name: tensor.shape for name, tensor in model.named_parameters()}
    block = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).mul(0.02).bfloat16()
    tiny_tokenizer(vocab_size=320).save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(full.to_json_string(use_diff=False))
    total = 0
    index = {}
    for number, (name, shape) in enumerate(shapes.items()):
        size = shape.numel()
        values = block.repeat(-(-size // len(block)))[:size].reshape(shape)
        file = f"model-{number:05}.safetensors"
        save_file({name: values.contiguous()}, folder / file)
        index[name], total = file, total + size
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return total


def sampled(command: list[str]) -> tuple[int, int, float]:
    """Run a command; return the peaks of anonymous memory and of all memory in bytes, and the seconds."""
    started, peaks = time.perf_counter(), [0, 0]
    with subprocess.Popen(command) as process:
        while process.poll() is None:
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
            except OSError:
                break
            found = dict(line.split(":", 1) for line in status.splitlines() if line.startswith("Rss"))
            kib = {name: int(value.split()[0]) for name, value in found.items()}
            if kib:
                peaks[0] = max(peaks[0], kib["RssAnon"] << 10)
                peaks[1] = max(peaks[1], sum(kib.values()) << 10)
            time.sleep(0.01)
    if process.returncode:
        print(f"the export failed: exit status {process.returncode}")
    return peaks[0], peaks[1], time.perf_counter() - started


def main() -> None:
    """Measure the shapes that are named, by default all."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("shapes", nargs="*", default=list(SHAPES), metavar="SHAPE", help=", ".join(SHAPES))
    parser.add_argument("--layers", type=int, default=2, help="0: all")
    parser.add_argument("--precision", default="int8")
    options = parser.parse_args()
    for name in options.shapes:
        config, all_layers = SHAPES[name]
        layers = options.layers or all_layers
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "source"
            source.mkdir()
            total = write_checkpoint(source, config, layers=layers)
            command = [
                sys.executable, "-m", "genserve", "export", str(source), "--name", "fake",
                "--precision", options.precision, "--model-repository", f"{folder}/repository",
            ]  # fmt: skip
            anonymous, everything, seconds = sampled(command)
        print(
            f"{name} in {options.precision}, {layers} of {all_layers} layers, {total / 1e6:,.0f}M weights: "
            f"{anonymous / 1e9:.2f} GB, with mapped files {everything / 1e9:.2f} GB, {seconds:.0f} s"
        )


if __name__ == "__main__":
    main()
