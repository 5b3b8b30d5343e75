"""Decoder module: a torch module of any decoder, with packed tokens and a paged KV cache, for TorchScript."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from genserve.export.decoder import (
    Activation,
    Attention,
    Decoder,
    Experts,
    HeadNorm,
    Latent,
    Layer,
    QueryScale,
    Rotary,
    Router,
    alibi_slopes,
)
from genserve.export.decoder_weights import DecoderWeights
from genserve.export.export_options import Precision

_TYPES = {"fp32": torch.float32, "fp16": torch.float16}


class _Batch(NamedTuple):
    """T new tokens of B sequences, as indices for attention."""

    slots: Tensor       # [T], the slots of the tokens' keys and values in the flattened cache
    all_slots: Tensor   # [B, L], the slots of each sequence, padded with its last slot
    queries: Tensor     # [B, S], the tokens of each sequence, padded with tokens of other sequences
    rows: tuple[Tensor, Tensor]             # [T] each, the indices of the tokens in `queries`
    masks: Mapping[int | None, Tensor]      # the mask for each attention window


class DecoderModule(nn.Module):
    """The same model as `decoder_graph.py` writes in ONNX, in operators of torch, for tracing.

    `forward` derives all tensors from its inputs and weights, because a trace would fix the device of a
    tensor that it creates. Therefore a table of positions is a weight.
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
        first = decoder.attentions[0]
        if first.alibi:
            self._keep("slopes", torch.from_numpy(alibi_slopes(first.num_heads)).to(dtype))
        for scale in {attention.query_scale for attention in decoder.attentions} - {None}:
            assert scale is not None
            table = torch.from_numpy(scale.table(decoder.context_length))
            self._keep(_scale_name(scale), table.to(dtype)[:, None, None])
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
            position_ids: [T] int64, the position of each token in its sequence.
            cumulative_sequence_length: [B + 1] int32, sequence b has the tokens from entry b up to entry
                b + 1.
            past_seqlens: [B] int32, the number of cached tokens per sequence.
            block_table: [B, max_blocks] int32, the blocks of each sequence, in order, with any padding.
            logits_indices: [R] int64, the tokens that reach the head.
            past_key_values: keys and values of each layer in turn, each [num_blocks, block_size, kv_heads,
                head_dim]; modified in place.

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
        for index, described in enumerate(self._decoder.layers):
            attention = described.attention
            assert attention is not None
            layer, (keys, values) = f"layers.{index}", past_key_values[2 * index : 2 * index + 2]
            x = self._optional_norm(residual, f"{layer}.attention.norm")
            query, key, value = self._heads(x, attention, f"{layer}.attention", positions=position_ids)
            x = self._attended(
                query[batch.queries],
                _stored(key, keys, batch),
                _stored(value, values, batch),
                batch.masks[attention.window],
                attention,
                sinks=f"{layer}.attention.sinks",
            )[batch.rows]
            if index + 1 == len(self._decoder.layers):
                # After the last keys and values, only the tokens that reach the head matter.
                x, residual = x[logits_indices], residual[logits_indices]
            residual = self._after_attention(x, residual, described, layer)
        return self._logits(self._norm(residual, "norm"))

    def _batch(
        self, positions: Tensor, starts: Tensor, past: Tensor, block_table: Tensor, *, block_size: int
    ) -> _Batch:
        """Compute the indices of a batch; the arguments are the same as for `forward`, in int64."""

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
        return self._optional_norm(x, "embedding.norm")

    def _mask(self, distances: Tensor, *, window: int | None) -> Tensor:
        """Return the mask of the scores or, with ALiBi, the bias of the scores.

        Args:
            distances: [B, 1, 1, S, L], the position of the key minus the position of the query.
            window: the number of attended tokens; None: all.

        Returns:
            [B, 1, 1, S, L] bool, or a bias [B, kv_heads, heads per kv_head, S, L].
        """
        visible = distances <= 0
        if window is not None:
            visible = visible & (distances > -window)
        if not self._decoder.attentions[0].alibi:
            return visible
        slopes = self._tensor("slopes").view(self._decoder.attentions[0].num_kv_heads, -1, 1, 1)
        return torch.where(visible, distances * slopes, float("-inf"))

    def _heads(
        self, x: Tensor, attention: Attention, layer: str, *, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [T, heads, head_dim], and keys and values [T, kv_heads, head_dim]."""
        if attention.latent is not None:
            query, key, value = self._latent_heads(x, attention, attention.latent, layer)
        else:
            projected = (self._linear(x, f"{layer}.{part}") for part in ("query", "key", "value"))
            query, key, value = (torch.unflatten(part, -1, (-1, attention.head_dim)) for part in projected)
        norm, clip = attention.head_norm, attention.clip
        if norm is not None and not norm.after_rotary:
            query, key = self._normed_heads(query, key, norm, layer)
        if clip is not None:
            query, key, value = (part.clamp(-clip, clip) for part in (query, key, value))
        if attention.rotary is not None:
            angles = self._tensor(self._tables[attention.rotary])[:, positions][..., None, :]
            query, key = _rotated(query, angles[0], angles[1]), _rotated(key, angles[0], angles[1])
        if norm is not None and norm.after_rotary:
            query, key = self._normed_heads(query, key, norm, layer)
        if attention.query_scale is not None:
            query = query * self._tensor(_scale_name(attention.query_scale))[positions]
        return query, key, value

    def _latent_heads(
        self, x: Tensor, attention: Attention, latent: Latent, layer: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same with one head of keys, whose vectors are the values too."""
        queries, heads = x, attention.num_heads
        if latent.query_rank is not None:
            queries = self._latent_norm(self._linear(x, f"{layer}.query_a"), f"{layer}.query_a_norm", latent)
        name = "latent_query" if latent.query_rank is None else "query_b"
        queries = self._linear(queries, f"{layer}.{name}")
        plain, turned = torch.split(queries, [heads * latent.nope, heads * latent.rope], -1)
        rope, vectors = torch.split(self._linear(x, f"{layer}.latent"), [latent.rope, latent.rank], -1)
        vectors = self._latent_norm(vectors, f"{layer}.latent_norm", latent)
        met = self._by_head(torch.unflatten(plain, -1, (heads, -1)), f"{layer}.latent_key")
        query = torch.cat([torch.unflatten(turned, -1, (heads, -1)), met], -1)
        key = torch.cat([rope, vectors], -1)[:, None]
        return query, key, key

    def _by_head(self, x: Tensor, name: str) -> Tensor:
        """The product [T, heads, outputs] of each head [T, heads, inputs] and its rows of a weight."""
        weight = torch.unflatten(self._tensor(f"{name}.weight"), 0, (x.size(1), -1))
        return torch.einsum("thi,hoi->tho", x, weight)

    def _latent_norm(self, x: Tensor, name: str, latent: Latent) -> Tensor:
        return functional.rms_norm(
            x, x.shape[-1:], self._tensor(f"{name}.weight"), latent.norm_epsilon
        )

    def _normed_heads(self, query: Tensor, key: Tensor, norm: HeadNorm, layer: str) -> tuple[Tensor, Tensor]:
        def normed(x: Tensor, name: str) -> Tensor:
            rows = x.flatten(1) if norm.joint else x
            weight = self._tensor(f"{name}.weight")
            shape, epsilon = rows.shape[-1:], self._decoder.norm_epsilon
            if norm.kind == "rms":
                rows = functional.rms_norm(rows, shape, None, epsilon) * weight
            else:
                rows = functional.layer_norm(rows, shape, None, None, epsilon) * weight
            if f"{name}.bias" in self._roles:
                rows = rows + self._tensor(f"{name}.bias")
            return rows.view_as(x)

        return normed(query, f"{layer}.query_norm"), normed(key, f"{layer}.key_norm")

    def _attended(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor,
        attention: Attention,
        *,
        sinks: str,
    ) -> Tensor:
        """Return the attention of each sequence: [B, S, heads * head_dim].

        Heads that share keys and values are computed as further rows of one head, so nothing is repeated.

        Args:
            query: [B, S, heads, head_dim].
            keys: [B, L, kv_heads, head_dim].
            values: [B, L, kv_heads, head_dim].
            mask: the result of `_mask`.
            attention: the description of the attention.
            sinks: the role of the heads' sinks.
        """
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        groups = torch.unflatten(query.transpose(1, 2), 1, (attention.num_kv_heads, -1))
        mask = mask.expand(-1, -1, groups.size(2), -1, -1).flatten(2, 3)
        rows, scale, cap = groups.flatten(2, 3), attention.scale, attention.softcap
        if cap is None and sinks not in self._roles:
            heads = functional.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scale)
        else:
            scores = rows @ keys.transpose(2, 3) * scale
            if cap is not None:
                scores = cap * torch.tanh(scores / cap)
            scores = scores.float().masked_fill(~mask, float("-inf"))
            if sinks in self._roles:
                # A key whose score is the sink, and whose value is zero.
                sink = self._tensor(sinks).view(1, attention.num_kv_heads, -1, 1, 1)
                sink = sink.expand(query.size(0), -1, -1, query.size(1), -1).flatten(2, 3)
                scores = torch.cat([scores, sink.to(scores.dtype)], -1)
            weights = torch.softmax(scores, dim=-1)[..., : keys.size(2)]
            heads = weights.to(values.dtype) @ values
        return torch.unflatten(heads, 2, (groups.size(2), -1)).flatten(1, 2).transpose(1, 2).flatten(2)

    def _after_attention(self, x: Tensor, residual: Tensor, described: Layer, layer: str) -> Tensor:
        """Return the rest of a layer, up to the new residual."""
        attention, activation = described.attention, described.activation
        assert attention is not None
        assert activation is not None
        if (latent := attention.latent) is not None:
            heads = torch.unflatten(x, -1, (attention.num_heads, -1))[..., latent.rope :]
            x = self._by_head(heads, f"{layer}.attention.latent_value").flatten(1)
        x = self._linear(x, f"{layer}.attention.output")
        attended = residual + self._optional_norm(x, f"{layer}.attention.post_norm")
        x = residual if described.parallel else attended
        x = self._optional_norm(x, f"{layer}.mlp.norm")
        if described.experts is None:
            x = self._mlp(x, activation, f"{layer}.mlp")
        else:
            x = self._experts(x, described.experts, activation, f"{layer}.mlp")
        return attended + self._optional_norm(x, f"{layer}.mlp.post_norm")

    def _mlp(self, x: Tensor, activation: Activation, layer: str) -> Tensor:
        up = self._linear(x, f"{layer}.up")
        if self._has(f"{layer}.gate"):
            gate = self._linear(x, f"{layer}.gate")
            if activation == "clamped_swiglu":
                gate, up = gate.clamp(max=7), up.clamp(-7, 7) + 1
                return self._linear(gate * torch.sigmoid(1.702 * gate) * up, f"{layer}.down")
            return self._linear(self._activated(gate, activation, layer) * up, f"{layer}.down")
        return self._linear(self._activated(up, activation, layer), f"{layer}.down")

    def _experts(self, x: Tensor, experts: Experts, activation: Activation, layer: str) -> Tensor:
        """Return the sum of the experts' outputs [T, hidden]; each one reads the rows that chose it."""
        weights = self._weights_of_experts(self._linear(x, f"{layer}.router"), experts, layer)
        total = torch.zeros_like(x)
        if experts.shared:
            total = self._mlp(x, activation, f"{layer}.shared")
            if self._has(f"{layer}.shared.score"):
                total = total * torch.sigmoid(self._linear(x, f"{layer}.shared.score"))
        for index in range(experts.count):
            rows = torch.nonzero(weights[:, index], as_tuple=True)[0]
            own, before = weights[rows, index, None].to(x.dtype), experts.router.scales_inputs
            found = self._mlp(x[rows] * own if before else x[rows], activation, f"{layer}.experts.{index}")
            total = total.index_add(0, rows, found if before else found * own)
        return total

    def _weights_of_experts(self, logits: Tensor, experts: Experts, layer: str) -> Tensor:
        """Return the weights [T, experts], which are 0 for experts that are not chosen."""
        router, logits = experts.router, logits.float()
        if router.score == "sparsemixer":
            return self._mixed(logits, router)
        scores = logits
        if router.score == "softmax":
            scores = torch.softmax(logits, -1)
        elif router.score == "sigmoid":
            scores = torch.sigmoid(logits)
        choice = scores
        if f"{layer}.choice" in self._roles:
            choice = choice + self._tensor(f"{layer}.choice")
        if router.groups is not None:
            groups = torch.unflatten(choice, -1, (router.groups.count, -1))
            best = groups.topk(router.groups.top, dim=-1).values.sum(-1)
            kept = _chosen(best, router.groups.kept)[..., None]
            choice = groups.masked_fill(~kept, float("-inf")).flatten(-2)
        chosen = _chosen(choice, experts.top_k)
        if router.score == "softmax_of_top":
            scores = torch.softmax(scores.masked_fill(~chosen, float("-inf")), -1)
        elif router.score == "sigmoid_of_top":
            scores = torch.sigmoid(scores)
        weights = scores * chosen
        if router.normalise is not None:
            weights = weights / (weights.sum(-1, keepdim=True) + router.normalise)
        return weights * router.scale

    def _mixed(self, logits: Tensor, router: Router) -> Tensor:
        left, weights = logits, torch.zeros_like(logits)
        for _ in range(2):
            highest = left.max(-1, keepdim=True).values
            is_far = (highest - logits) / torch.maximum(logits.abs(), highest) > 2 * router.jitter
            chosen = _chosen(left, 1)
            weights = weights + torch.softmax(left.masked_fill(is_far, float("-inf")), -1) * chosen
            left = left.masked_fill(chosen, float("-inf"))
        return weights * router.scale

    def _activated(self, x: Tensor, activation: Activation, layer: str) -> Tensor:
        match activation:
            case "silu":
                return functional.silu(x)
            case "gelu":
                return functional.gelu(x)
            case "gelu_tanh":
                return functional.gelu(x, approximate="tanh")
            case "relu":
                return functional.relu(x)
            case "relu2":
                return functional.relu(x).square()
            case "xielu":
                names = ("alpha_p", "alpha_n", "beta")
                above, below, beta = (self._tensor(f"{layer}.{name}") for name in names)
                positive, negative = functional.relu(x), -functional.relu(-x)
                curve = (beta + below) * (torch.expm1(negative) - negative)
                return above * positive.square() + curve + beta * x
            case "clamped_swiglu":
                raise AssertionError("it has two inputs")

    def _logits(self, x: Tensor) -> Tensor:
        head = "embedding.weight" if self._decoder.tied else "head.weight"
        bias = self._tensor("head.bias") if "head.bias" in self._roles else None
        logits = functional.linear(x, self._tensor(head), bias).float()
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

    def _optional_norm(self, x: Tensor, name: str) -> Tensor:
        return self._norm(x, name) if self._has(name) else x

    def _has(self, part: str) -> bool:
        return f"{part}.weight" in self._roles

    def _keep(self, name: str, value: Tensor) -> None:
        self.register_buffer(name.replace(".", "_"), value)

    def _tensor(self, name: str) -> Tensor:
        tensor: Tensor = getattr(self, name.replace(".", "_"))
        return tensor


def _chosen(scores: Tensor, count: int) -> Tensor:
    """Return whether a score is among the best of its row; of equal ones, the first are the better."""
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :count]
    ones = torch.ones_like(order, dtype=torch.bool)     # a trace cannot scatter a Python bool
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, ones)


def _scale_name(scale: QueryScale) -> str:
    return f"query_scale.{scale.beta}.{scale.length}.{scale.first}"


def _counted(like: Tensor) -> Tensor:
    """Return [0, 1, ..., n - 1], as int64 on the device of a tensor [n]."""
    return torch.ones_like(like).cumsum(0) - 1


def _stored(new: Tensor, cache: Tensor, batch: _Batch) -> Tensor:
    """Append the new keys or values to a layer's cache, and return the cached and the new ones.

    Args:
        new: [T, kv_heads, head_dim].
        cache: [num_blocks, block_size, kv_heads, head_dim].
        batch: has the slots of the new tokens.

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
        sines: [T, 1, n].
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
    sizes, [cache, *_] = decoder.dimensions, decoder.dimensions.caches
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
            torch.zeros((3, 2, cache.num_kv_heads, cache.head_dim), dtype=dtype)
            for _ in range(2 * sizes.num_layers)
        ],
    )
    with torch.no_grad(), warnings.catch_warnings():
        # torch recommends torch.export instead, whose files other programs cannot load without Python.
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(module, example, check_trace=False)  # type: ignore[no-untyped-call]
        stored = {
            **metadata,
            "genserve.num_layers": str(sizes.num_layers),
            "genserve.num_kv_heads": str(cache.num_kv_heads),
            "genserve.head_dim": str(cache.head_dim),
            "genserve.vocab_size": str(sizes.vocab_size),
        }
        torch.jit.save(traced, str(path), _extra_files={"genserve.json": json.dumps(stored)})
