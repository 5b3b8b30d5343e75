"""Decoder module: any decoder as a torch module over packed tokens and a paged KV cache, for TorchScript."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from genserve.export.decoder import Attention, Decoder, Rotary, alibi_slopes
from genserve.export.decoder_weights import DecoderWeights
from genserve.export.export_options import Precision

_TYPES = {"fp32": torch.float32, "fp16": torch.float16}


class _Batch(NamedTuple):
    """T new tokens of B sequences, as indices for attention."""

    slots: Tensor       # [T], the slots of the tokens' keys and values in the flattened cache
    all_slots: Tensor   # [B, L], the slots of each sequence, padded with its last one
    queries: Tensor     # [B, S], the tokens of each sequence, padded with tokens of others
    rows: tuple[Tensor, Tensor]             # [T] each, the indices of the tokens in `queries`
    masks: Mapping[int | None, Tensor]      # by the window of an attention


class DecoderModule(nn.Module):
    """The model that `decoder_graph.py` writes in ONNX, in operators of torch, for tracing.

    `forward` derives all tensors from its inputs and weights, because a trace would keep the device of a new
    one. Therefore a table of positions is a weight.
    """

    def __init__(self, weights: DecoderWeights, decoder: Decoder, *, dtype: torch.dtype) -> None:
        """Read all weights.

        Raises:
            ExportError: the checkpoint lacks a tensor.
        """
        super().__init__()
        self._decoder = decoder
        self._roles = weights.roles - ({"head.weight"} if decoder.tied else set())
        self._tables: dict[Rotary, str] = {}
        for role in sorted(self._roles):
            self._keep(role, torch.from_numpy(weights.load(role)).to(dtype))
        self._keep("arange", torch.arange(decoder.context_length))
        if decoder.alibi:
            self._keep("slopes", torch.from_numpy(alibi_slopes(decoder.num_heads)).to(dtype))
        for index, rotary in enumerate(decoder.rotaries):
            self._tables[rotary] = f"rotary.{index}"
            tables = map(torch.from_numpy, rotary.tables(decoder.context_length))
            self._keep(self._tables[rotary], torch.stack([*tables]).to(dtype))

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        cumulative_sequence_length: Tensor,
        past_seqlens: Tensor,
        block_table: Tensor,
        logits_indices: Tensor,
        past_key_values: Sequence[Tensor],
    ) -> Tensor:
        """Run T new tokens of B sequences, and append their keys and values to the cache.

        Args:
            input_ids: [T] int64, the tokens of a sequence contiguous and in order.
            position_ids: [T] int64, of each token in its sequence.
            cumulative_sequence_length: [B + 1] int32, sequence b has the tokens from entry b up to entry
                b + 1.
            past_seqlens: [B] int32, the number of cached tokens per sequence.
            block_table: [B, max_blocks] int32, the blocks of each sequence, in order, with any padding.
            logits_indices: [R] int64, the tokens that reach the head.
            past_key_values: keys and values of each layer in turn, [num_blocks, block_size, kv_heads,
                head_dim] each; modified.

        Returns:
            [R, vocab] float32.
        """
        batch = self._batch(
            position_ids,
            cumulative_sequence_length.long(),
            past_seqlens.long(),
            block_table.long(),
            block_size=past_key_values[0].size(1),
        )
        residual = self._embedded(input_ids, position_ids)
        for index, attention in enumerate(self._decoder.attentions):
            layer, (keys, values) = f"layers.{index}", past_key_values[2 * index : 2 * index + 2]
            x = self._norm(residual, f"{layer}.attention.norm")
            query, key, value = self._heads(x, attention, f"{layer}.attention", positions=position_ids)
            x = self._attended(
                query[batch.queries],
                _stored(key, keys, batch),
                _stored(value, values, batch),
                batch.masks[attention.window],
            )[batch.rows]
            if index + 1 == len(self._decoder.attentions):
                # After the last keys and values, only the tokens that reach the head matter.
                x, residual = x[logits_indices], residual[logits_indices]
            residual = self._after_attention(x, residual, layer)
        return self._logits(self._norm(residual, "norm"))

    def _batch(
        self, positions: Tensor, starts: Tensor, past: Tensor, block_table: Tensor, *, block_size: int
    ) -> _Batch:
        """Compute the indices of a batch; the arguments are those of `forward`, in int64."""

        def slots(sequences: Tensor, positions: Tensor) -> Tensor:
            return block_table[sequences, positions // block_size] * block_size + positions % block_size

        tokens, lengths = _counted(positions), starts.diff()
        sequence, ends = torch.searchsorted(starts[1:], tokens, right=True), past + lengths
        offsets, keys = self._tensor("arange")[: lengths.max()], self._tensor("arange")[: ends.max()]
        distances = keys - (past[:, None] + offsets)[..., None]
        return _Batch(
            slots=slots(sequence, positions),
            all_slots=slots(_counted(past)[:, None], torch.minimum(keys, ends[:, None] - 1)),
            queries=torch.minimum(starts[:-1, None] + offsets, tokens[-1]),
            rows=(sequence, tokens - starts[sequence]),
            masks={
                window: self._mask(distances[:, None, None], window=window)
                for window in dict.fromkeys(attention.window for attention in self._decoder.attentions)
            },
        )

    def _embedded(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x = functional.embedding(input_ids, self._tensor("embedding.weight"))
        if self._decoder.embedding_scale is not None:
            x = x * self._decoder.embedding_scale
        if self._has("positions"):
            x = x + functional.embedding(positions, self._tensor("positions.weight"))
        return self._norm(x, "embedding.norm") if self._has("embedding.norm") else x

    def _mask(self, distances: Tensor, *, window: int | None) -> Tensor:
        """Return the mask of the scores or, with ALiBi, their bias.

        Args:
            distances: [B, 1, 1, S, L], the position of a key less that of the query.
            window: of the attention.

        Returns:
            [B, 1, 1, S, L] bool, or a bias [B, kv_heads, heads per kv_head, S, L].
        """
        visible = distances <= 0
        if window is not None:
            visible = visible & (distances > -window)
        if not self._decoder.alibi:
            return visible
        slopes = self._tensor("slopes").view(self._decoder.num_kv_heads, -1, 1, 1)
        return torch.where(visible, distances * slopes, float("-inf"))

    def _heads(
        self, x: Tensor, attention: Attention, layer: str, *, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, heads, head_dim], keys and values [T, kv_heads, head_dim] of the tokens."""
        query, key, value = (
            torch.unflatten(self._linear(x, f"{layer}.{part}"), -1, (-1, self._decoder.head_dim))
            for part in ("query", "key", "value")
        )
        if self._has(f"{layer}.query_norm"):
            query = self._norm(query, f"{layer}.query_norm")
            key = self._norm(key, f"{layer}.key_norm")
        if attention.rotary is not None:
            angles = self._tensor(self._tables[attention.rotary])[:, positions][..., None, :]
            query, key = _rotated(query, angles[0], angles[1]), _rotated(key, angles[0], angles[1])
        return query, key, value

    def _attended(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Attention of each sequence: [B, S, heads * head_dim].

        Heads that share keys and values are computed as more rows of one head, so nothing is repeated.

        Args:
            query: [B, S, heads, head_dim].
            keys: [B, L, kv_heads, head_dim].
            values: the same.
            mask: see `_mask`.
        """
        decoder, keys, values = self._decoder, keys.transpose(1, 2), values.transpose(1, 2)
        groups = torch.unflatten(query.transpose(1, 2), 1, (decoder.num_kv_heads, -1))
        mask = mask.expand(-1, -1, groups.size(2), -1, -1).flatten(2, 3)
        rows, scale = groups.flatten(2, 3), decoder.attention_scale
        if decoder.attention_softcap is None:
            heads = functional.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scale)
        else:
            cap = decoder.attention_softcap
            scores = cap * torch.tanh(rows @ keys.transpose(2, 3) * (scale / cap))
            weights = torch.softmax(scores.float().masked_fill(~mask, float("-inf")), dim=-1)
            heads = weights.to(values.dtype) @ values
        return torch.unflatten(heads, 2, (groups.size(2), -1)).flatten(1, 2).transpose(1, 2).flatten(2)

    def _after_attention(self, x: Tensor, residual: Tensor, layer: str) -> Tensor:
        """Return the rest of a layer, up to the new residual."""
        x = self._post_norm(self._linear(x, f"{layer}.attention.output"), f"{layer}.attention")
        if self._decoder.parallel:
            return residual + x + self._mlp(self._norm(residual, f"{layer}.mlp.norm"), f"{layer}.mlp")
        residual = residual + x
        x = self._mlp(self._norm(residual, f"{layer}.mlp.norm"), f"{layer}.mlp")
        return residual + self._post_norm(x, f"{layer}.mlp")

    def _mlp(self, x: Tensor, layer: str) -> Tensor:
        up = self._linear(x, f"{layer}.up")
        if self._has(f"{layer}.gate"):
            return self._linear(self._activated(self._linear(x, f"{layer}.gate")) * up, f"{layer}.down")
        return self._linear(self._activated(up), f"{layer}.down")

    def _activated(self, x: Tensor) -> Tensor:
        match self._decoder.activation:
            case "silu":
                return functional.silu(x)
            case "gelu":
                return functional.gelu(x)
            case "gelu_tanh":
                return functional.gelu(x, approximate="tanh")
            case "relu":
                return functional.relu(x)

    def _logits(self, x: Tensor) -> Tensor:
        head = "embedding.weight" if self._decoder.tied else "head.weight"
        logits = functional.linear(x, self._tensor(head)).float()
        cap = self._decoder.logits_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        bias = self._tensor(f"{name}.bias") if f"{name}.bias" in self._roles else None
        return functional.linear(x, self._tensor(f"{name}.weight"), bias)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, epsilon = self._tensor(f"{name}.weight"), self._decoder.norm_epsilon
        if self._decoder.norm == "rms":
            return functional.rms_norm(x, weight.shape, weight, epsilon)
        bias = self._tensor(f"{name}.bias") if f"{name}.bias" in self._roles else None
        return functional.layer_norm(x, weight.shape, weight, bias, epsilon)

    def _post_norm(self, x: Tensor, part: str) -> Tensor:
        return self._norm(x, f"{part}.post_norm") if self._has(f"{part}.post_norm") else x

    def _has(self, part: str) -> bool:
        return f"{part}.weight" in self._roles

    def _keep(self, name: str, value: Tensor) -> None:
        self.register_buffer(name.replace(".", "_"), value)

    def _tensor(self, name: str) -> Tensor:
        tensor: Tensor = getattr(self, name.replace(".", "_"))
        return tensor


def _counted(like: Tensor) -> Tensor:
    """[0, 1, ..., n - 1] for a tensor [n] of int64, on its device."""
    return torch.ones_like(like).cumsum(0) - 1


def _stored(new: Tensor, cache: Tensor, batch: _Batch) -> Tensor:
    """Append the tokens' keys or values to a layer's cache, and return those of all tokens so far.

    Args:
        new: [T, kv_heads, head_dim].
        cache: [num_blocks, block_size, kv_heads, head_dim].
        batch: has their slots.

    Returns:
        [B, L, kv_heads, head_dim].
    """
    slots = cache.view(-1, new.size(1), new.size(2))
    slots[batch.slots] = new
    return slots[batch.all_slots]


def _rotated(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Apply rotary positions to the first numbers of each head, paired by halves.

    Args:
        heads: [T, heads, head_dim].
        cosines: [T, 1, n], for 2 * n rotated numbers.
        sines: the same.
    """
    size = cosines.size(-1)
    first, second = heads[..., :size], heads[..., size : 2 * size]
    rotated = (first * cosines - second * sines, second * cosines + first * sines, heads[..., 2 * size :])
    return torch.cat(rotated, dim=-1)


def write_torchscript(
    weights: DecoderWeights,
    decoder: Decoder,
    path: Path,
    *,
    precision: Precision,
    metadata: Mapping[str, str],
) -> None:
    """Write a decoder as a TorchScript file, with the whole model in memory.

    `precision` is "fp32" or "fp16"; `metadata` is stored in the file, with the sizes of the cache.

    Raises:
        ExportError: the checkpoint lacks a tensor.
    """
    sizes = decoder.dimensions
    dtype = _TYPES[precision]
    module = DecoderModule(weights, decoder, dtype=dtype).eval()
    # Two sequences of two tokens and one token; the second has two cached tokens.
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
        # torch recommends torch.export, whose files other programs cannot load without Python.
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(module, example, check_trace=False)  # type: ignore[no-untyped-call]
        stored = {
            **metadata,
            "genserve.num_layers": str(sizes.num_layers),
            "genserve.num_kv_heads": str(sizes.num_kv_heads),
            "genserve.head_dim": str(sizes.head_dim),
            "genserve.vocab_size": str(sizes.vocab_size),
        }
        torch.jit.save(traced, str(path), _extra_files={"genserve.json": json.dumps(stored)})
