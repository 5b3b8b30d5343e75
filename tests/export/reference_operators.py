"""Reference operators: operators of ONNX Runtime, written in torch for onnx's evaluator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import inliner
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from torch.nn import functional

__all__ = ["reference_evaluator"]


class PagedAttention(OpRun):
    """com.microsoft.PagedAttention over packed queries, keys and values; computes in float32."""

    op_domain = "com.microsoft"

    def _run(
        self,
        query: np.ndarray,
        key: None,
        value: None,
        key_cache: np.ndarray,
        value_cache: np.ndarray,
        cumulative_sequence_length: np.ndarray,
        past_seqlens: np.ndarray,
        block_table: np.ndarray,
        cos_cache: np.ndarray | None = None,
        sin_cache: np.ndarray | None = None,
        slot_mapping: None = None,
        head_sink: None = None,
        q_norm_weight: np.ndarray | None = None,
        k_norm_weight: np.ndarray | None = None,
        k_scale: None = None,
        v_scale: None = None,
        attention_metadata: np.ndarray | None = None,
        **attributes: Any,
    ) -> tuple[np.ndarray, ...]:
        num_heads, kv_num_heads = attributes["num_heads"], attributes["kv_num_heads"]
        bounds = cumulative_sequence_length
        assert attention_metadata is not None
        assert np.diff(bounds).max() <= attention_metadata[0]
        assert (np.diff(bounds) + past_seqlens).max() <= attention_metadata[1]
        block_size, head_dim = key_cache.shape[1], key_cache.shape[3]
        caches = [torch.from_numpy(cache.copy()) for cache in (key_cache, value_cache)]
        heads = torch.tensor(query).view(len(query), -1, head_dim).split(
            [num_heads, kv_num_heads, kv_num_heads], dim=1
        )
        outputs = []
        for sequence, past in enumerate(past_seqlens.tolist()):
            tokens = slice(int(bounds[sequence]), int(bounds[sequence + 1]))
            positions = torch.arange(past, past + tokens.stop - tokens.start)
            queries, keys, values = (part[tokens].float() for part in heads)
            if q_norm_weight is not None:
                epsilon = attributes["qk_norm_epsilon"]
                queries = _normed(queries, q_norm_weight, epsilon)
                keys = _normed(keys, k_norm_weight, epsilon)
            if attributes["do_rotary"]:
                queries, keys = (_rotated(x, cos_cache, sin_cache, positions) for x in (queries, keys))
            blocks = torch.from_numpy(block_table[sequence].astype(np.int64))
            everything = torch.arange(past + len(positions))
            slots = blocks[everything // block_size] * block_size + everything % block_size
            read = []
            for cache, new in zip(caches, (keys, values), strict=True):
                flat = cache.view(-1, kv_num_heads, head_dim)
                flat[slots[past:]] = new.to(cache.dtype)
                read.append(flat[slots].float().repeat_interleave(num_heads // kv_num_heads, dim=1))
            scores = torch.einsum("qhd,khd->hqk", queries, read[0]) * attributes["scale"]
            if attributes["softcap"]:
                scores = attributes["softcap"] * torch.tanh(scores / attributes["softcap"])
            distance = positions[:, None] - everything
            hidden = distance < 0
            if attributes["local_window_size"] > 0:
                hidden |= distance >= attributes["local_window_size"]
            shares = functional.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
            outputs.append(torch.einsum("hqk,khd->qhd", shares, read[1]).flatten(1))
        output = torch.cat(outputs).to(caches[0].dtype)
        return output.numpy(), *(cache.numpy() for cache in caches)


class SimplifiedLayerNormalization(OpRun):
    """ONNX Runtime's RMS norm, which is in the domain of ONNX although ONNX does not define it."""

    op_domain = ""

    def _run(
        self, x: np.ndarray, weight: np.ndarray, epsilon: float = 1e-5, **_others: Any
    ) -> tuple[np.ndarray]:
        return (_normed(torch.tensor(x).float(), weight, epsilon).numpy().astype(x.dtype),)


def reference_evaluator(path: Path) -> ReferenceEvaluator:
    """A graph with functions replaced by their bodies, as in a runtime without our kernels."""
    model = inliner.inline_local_functions(onnx.load(path))
    return ReferenceEvaluator(model, new_ops=[PagedAttention, SimplifiedLayerNormalization])


def _normed(x: torch.Tensor, weight: Any, epsilon: float) -> torch.Tensor:
    shares = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + epsilon)
    return shares * torch.tensor(weight).float()


def _rotated(x: torch.Tensor, cos_cache: Any, sin_cache: Any, positions: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions to the first numbers of every head, paired by halves."""
    cosines, sines = (torch.tensor(table).float()[positions][:, None] for table in (cos_cache, sin_cache))
    half = cosines.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines, rest], dim=-1)
