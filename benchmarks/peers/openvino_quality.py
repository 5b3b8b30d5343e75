"""OpenVINO quality: the distance of a model for `openvino_engine.py` from its source.

    PYTHON benchmarks/peers/openvino_quality.py FOLDER HUGGING_FACE_FOLDER TEXT_FILE

with the Python that made the folder. The first half of the tokens is prefilled, the others are decoded one
by one. Prints the top-1 agreement, the mean Kullback-Leibler divergence in nats, and the ratio of
perplexities, all compared with transformers in float32.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import openvino
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

NUM_TOKENS = 512


def main(folder: Path, source: Path, text: Path) -> None:
    encoded = Tokenizer.from_file(str(source / "tokenizer.json")).encode(text.read_text())
    ids = np.array(encoded.ids[:NUM_TOKENS], dtype=np.int64)
    expected, found = _log_softmax(_source_logits(source, ids)), _log_softmax(_logits(folder, ids))
    same = (expected.argmax(axis=-1) == found.argmax(axis=-1)).mean()
    divergence = (np.exp(expected) * (expected - found)).sum(axis=-1).mean()
    rows, following = np.arange(len(ids) - 1), ids[1:]
    ratio = np.exp((expected[rows, following] - found[rows, following]).mean())
    print(f"{folder.name}: top-1 {same:.1%}, KL {divergence:.4f}, perplexity x{ratio:.3f}")


def _source_logits(source: Path, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    model = AutoModelForCausalLM.from_pretrained(source, torch_dtype=torch.float32)
    with torch.inference_mode():
        logits: NDArray[np.float32] = model(torch.from_numpy(ids)[None]).logits[0].numpy()
    return logits


def _logits(folder: Path, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    model = openvino.Core().compile_model(folder / "openvino_model.xml", "CPU")
    request = model.create_infer_request()  # has the cache
    half = len(ids) // 2
    bounds = [(0, half), *((past, past + 1) for past in range(half, len(ids)))]
    rows = []
    for past, end in bounds:
        inputs = {
            "input_ids": ids[None, past:end],
            "attention_mask": np.ones((1, end), dtype=np.int64),
            "position_ids": np.arange(past, end)[None],
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
        rows.append(request.infer(inputs)["logits"][0].copy())
    return np.concatenate(rows)


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: NDArray[np.float32] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
