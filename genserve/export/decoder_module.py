"""Decoder module: any decoder as a module of torch, over a KV cache with a slot for each row."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from genserve.export.decoder import Attention, Decoder, Rotary, alibi_slopes
from genserve.export.weights import DecoderWeights

__all__ = ["DecoderModule"]

_Masks = Mapping[int | None, Tensor]    # by the window of an attention


class DecoderModule(nn.Module):
    """What `decoder_graph.py` writes in ONNX, in operators of torch; to be traced.

    Nothing in `forward` makes a tensor from nothing, since a trace would keep the device of the example:
    positions come from a table among the weights.
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
        self._keep("places", torch.arange(decoder.context_length))
        if decoder.alibi:
            self._keep("slopes", torch.from_numpy(alibi_slopes(decoder.num_heads)).to(dtype))
        for attention in decoder.attentions:
            if attention.rotary and attention.rotary not in self._tables:
                tables = map(torch.from_numpy, attention.rotary.tables(decoder.context_length))
                self._tables[attention.rotary] = f"rotary.{len(self._tables)}"
                self._keep(self._tables[attention.rotary], torch.stack([*tables]).to(dtype))

    def forward(self, input_ids: Tensor, past: Tensor, rows: Tensor, kv_cache: Tensor) -> Tensor:
        """Run new tokens, and write their keys and values into the cache.

        Args:
            input_ids: [batch, sequence] int64.
            past: [batch] int64, how many tokens each row has in the cache.
            rows: [num_rows] int64, which of the batch * sequence hidden rows reach the head.
            kv_cache: [batch, layers, 2, kv_heads, length, head_dim], keys and values; modified. The new
                tokens of every row fit into `length`.

        Returns:
            [num_rows, vocab] float32.
        """
        places = self._tensor("places")
        positions = past[:, None] + places[: input_ids.size(1)]
        distances = places[: kv_cache.size(4)] - positions[..., None]
        masks = {
            window: self._mask(distances[:, None, None], window=window)
            for window in dict.fromkeys(attention.window for attention in self._decoder.attentions)
        }
        residual = self._embedded(input_ids, positions)
        for index, attention in enumerate(self._decoder.attentions):
            layer, cache = f"layers.{index}", kv_cache[:, index]
            x = self._norm(residual, f"{layer}.attention.norm")
            query = self._extended(x, attention, f"{layer}.attention", positions=positions, cache=cache)
            x = self._attended(query, cache, masks[attention.window])
            if index + 1 == len(self._decoder.attentions):
                # Past the last keys and values, only the rows that reach the head matter.
                x, residual = x.flatten(0, 1)[rows], residual.flatten(0, 1)[rows]
            residual = self._after_attention(x, residual, layer)
        return self._logits(self._norm(residual, "norm"))

    def _embedded(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x = functional.embedding(input_ids, self._tensor("embedding.weight"))
        if self._decoder.embedding_scale is not None:
            x = x * self._decoder.embedding_scale
        if self._has("positions"):
            x = x + functional.embedding(positions, self._tensor("positions.weight"))
        return self._norm(x, "embedding.norm") if self._has("embedding.norm") else x

    def _mask(self, distances: Tensor, *, window: int | None) -> Tensor:
        """What a score is masked by or, with ALiBi, what is added to it.

        Args:
            distances: [batch, 1, 1, sequence, length], of a key from a query; 0: it is its own.
            window: of the attention.

        Returns:
            [batch, 1, 1, sequence, length] bool; or [batch, kv_heads, heads of each, sequence, length].
        """
        visible = distances <= 0
        if window is not None:
            visible = visible & (distances > -window)
        if not self._decoder.alibi:
            return visible
        slopes = self._tensor("slopes").view(self._decoder.num_kv_heads, -1, 1, 1)
        return torch.where(visible, distances * slopes, float("-inf"))

    def _extended(
        self, x: Tensor, attention: Attention, layer: str, *, positions: Tensor, cache: Tensor
    ) -> Tensor:
        """Write keys and values into a layer's cache; the queries [batch, sequence, heads, head_dim]."""
        query, key, value = (
            torch.unflatten(self._linear(x, f"{layer}.{part}"), -1, (-1, self._decoder.head_dim))
            for part in ("query", "key", "value")
        )
        if self._has(f"{layer}.query_norm"):
            query = self._norm(query, f"{layer}.query_norm")
            key = self._norm(key, f"{layer}.key_norm")
        if attention.rotary is not None:
            angles = self._tensor(self._tables[attention.rotary])[:, positions][..., None, :]
            query, key = _turned(query, angles[0], angles[1]), _turned(key, angles[0], angles[1])
        for part, heads in enumerate((key, value)):
            new = heads.transpose(1, 2)
            cache[:, part].scatter_(2, positions[:, None, :, None].expand_as(new), new)
        return query

    def _attended(self, query: Tensor, cache: Tensor, mask: Tensor) -> Tensor:
        """Attention over a layer's cache: [batch, sequence, heads * head_dim].

        The heads that share keys and values are computed as more rows of one head: nothing is repeated.
        """
        decoder, keys, values = self._decoder, cache[:, 0], cache[:, 1]
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
        """The rest of a layer, to the new residual."""
        x = self._post_norm(self._linear(x, f"{layer}.attention.output"), f"{layer}.attention")
        if self._decoder.parallel:
            return residual + x + self._mlp(self._norm(residual, f"{layer}.mlp.norm"), f"{layer}.mlp")
        residual = residual + x
        x = self._mlp(self._norm(residual, f"{layer}.mlp.norm"), f"{layer}.mlp")
        return residual + self._post_norm(x, f"{layer}.mlp")

    def _mlp(self, x: Tensor, layer: str) -> Tensor:
        raised = self._linear(x, f"{layer}.up")
        if self._has(f"{layer}.gate"):
            return self._linear(self._activated(self._linear(x, f"{layer}.gate")) * raised, f"{layer}.down")
        return self._linear(self._activated(raised), f"{layer}.down")

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


def _turned(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn the first numbers of each head, one half against the other.

    Args:
        heads: [batch, sequence, heads, head_dim].
        cosines: [batch, sequence, 1, n], where 2 * n numbers turn.
        sines: the same.
    """
    size = cosines.size(-1)
    first, second = heads[..., :size], heads[..., size : 2 * size]
    turned = (first * cosines - second * sines, second * cosines + first * sines, heads[..., 2 * size :])
    return torch.cat(turned, dim=-1)
