"""TorchScript: a decoder as one file of torch, traced over a paged KV cache."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch

from genserve.export.decoder import Decoder
from genserve.export.decoder_module import DecoderModule
from genserve.export.report import Precision
from genserve.export.weights import DecoderWeights

__all__ = ["write_torchscript"]

_TYPES = {"fp32": torch.float32, "fp16": torch.float16}


def write_torchscript(
    weights: DecoderWeights,
    decoder: Decoder,
    path: Path,
    *,
    precision: Precision,
    metadata: Mapping[str, str],
) -> None:
    """Write a decoder for `backends/logits_torchscript.py`; the whole model is in memory.

    Args:
        weights: of the decoder.
        decoder: what it computes.
        path: of the file.
        precision: "fp32" or "fp16".
        metadata: kept in the file, with the sizes of the cache.

    Raises:
        ExportError: the checkpoint lacks a tensor.
    """
    sizes = decoder.dimensions
    dtype = _TYPES[precision]
    module = DecoderModule(weights, decoder, dtype=dtype).eval()
    # Two sequences of two and one tokens, the second behind two others.
    example = (
        torch.tensor([0, 0, 0]),
        torch.tensor([0, 1, 2]),
        torch.tensor([0, 2, 3], dtype=torch.int32),
        torch.tensor([0, 2], dtype=torch.int32),
        torch.tensor([[0, 0], [1, 2]], dtype=torch.int32),
        torch.tensor([1, 2]),
        [
            torch.zeros((3, 2, sizes.num_kv_heads, sizes.head_dim), dtype=dtype)
            for _ in range(2 * sizes.num_layers)
        ],
    )
    with torch.no_grad(), warnings.catch_warnings():
        # torch recommends torch.export, which has no file that other programs load without Python.
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(module, example, check_trace=False)  # type: ignore[no-untyped-call]
        told = {
            **metadata,
            "genserve.num_layers": str(sizes.num_layers),
            "genserve.num_kv_heads": str(sizes.num_kv_heads),
            "genserve.head_dim": str(sizes.head_dim),
            "genserve.vocab_size": str(sizes.vocab_size),
        }
        torch.jit.save(traced, str(path), _extra_files={"genserve.json": json.dumps(told)})
