"""Torch sampler: rows of logits to token ids in one pass on the device of the logits; pure.

It applies the rules of `sampling.sampler` in the same order: a request's text does not depend on which of the
two samples it, except for draws that fall on a border between two tokens to the last digits of a float32.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from genserve.completion import TokenLogprob
from genserve.sampling.logits_processors import LogitsEdits, apply_edits
from genserve.sampling.sampler import LOWEST_LOGPROB, LogprobsRequest, SamplerOutput, SamplingMetadata
from genserve.sampling.sampler_chain import MASKED, ArrayOps, apply_chains

# A greedy row: whether it draws, and the fields of a SAMPLING_RULE.
_GREEDY = {"draws": 0.0, "uniform": 0.0, "temperature": 1.0, "top_k": 0.0, "top_p": 1.0, "log_min_p": -np.inf}


def sample_on_device(logits: torch.Tensor, metadata: SamplingMetadata) -> SamplerOutput:
    """Sample one token per row; see `sampler.sample_on_host`.

    Only ids, flags and log-probabilities come back from the device, in one copy; nothing else waits for it.
    """
    requests = metadata.logprobs
    rows = [request.row for request in requests]
    raw = logits[rows] if rows else logits  # a copy
    if metadata.edits is not None:
        _apply(logits, metadata.edits)
    token_ids = logits.argmax(dim=1)  # ties go to the lowest id, and NaN is above all numbers
    best = logits.gather(1, token_ids[:, None])
    scaled = logits - best
    if metadata.drawing:
        token_ids, scaled = _draw(scaled, token_ids, metadata)
    # A float64 holds any token id.
    sampled = [token_ids.double(), best[:, 0].isfinite().double()]
    if requests:
        processed = torch.tensor([[request.processed] for request in requests], device=logits.device)
        sampled += _logprobs(torch.where(processed, scaled[rows], raw), token_ids[rows], requests)
    sizes = [part.numel() for part in sampled]
    token_row, finite_row, *levels = np.split(torch.cat(sampled).cpu().numpy(), np.cumsum(sizes)[:-1])
    return SamplerOutput(
        token_ids=token_row.astype(np.int64),
        finite=finite_row.astype(np.bool_),
        logprobs=_read_logprobs(requests, *levels) if requests else (),
    )


def _apply(logits: torch.Tensor, edits: LogitsEdits) -> None:
    def to_device(array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(logits.device, non_blocking=True)

    with torch.inference_mode():  # a tensor that was made in this mode can be modified in it alone
        apply_edits(logits, edits, to_device=to_device)


def _draw(
    shifted: torch.Tensor, token_ids: torch.Tensor, metadata: SamplingMetadata
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens, drawn for the rows that draw: [R], and the logits after all rules: [R, V]."""
    num_rows, num_tokens = shifted.shape
    columns = np.repeat(np.array([*_GREEDY.values()])[:, None], num_rows, axis=1)
    rules = metadata.rules
    fields = [np.ones(len(rules)), *(rules[name] for name in [*_GREEDY][1:])]
    columns[:, list(metadata.drawing)] = np.stack(fields)
    columns[2][columns[2] == 0] = 1.0   # rows with a chain are drawn otherwise
    uploaded = torch.from_numpy(columns).to(shifted.device, non_blocking=True)
    draws, uniform, temperature, top_k, top_p, log_min_p = uploaded[:, :, None].unbind()
    uses_k, uses_p, uses_min_p = (columns[3] > 0).any(), (columns[4] < 1).any(), (columns[5] > -np.inf).any()
    scaled = shifted / temperature.float()
    if uses_k or uses_p:
        level = TORCH_OPS.truncation_level(
            scaled, top_k=top_k if uses_k else None, top_p=top_p if uses_p else None
        )
        scaled = torch.where(scaled >= level, scaled, -torch.inf)
    if uses_min_p:
        scaled = torch.where(scaled >= log_min_p, scaled, -torch.inf)
    for rows, indices in _chain_groups(metadata):
        chains = [chain for i in indices if (chain := metadata.chains[i]) is not None]
        chances = [metadata.chances[i] for i in indices]
        scaled[rows] = apply_chains(shifted[rows], chains, chances=chances, ops=TORCH_OPS)
    weights = torch.where(scaled == -torch.inf, 0.0, TORCH_OPS.exponentials(scaled))
    cumulative = weights.cumsum(1, dtype=torch.float64)
    drawn = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    return torch.where(draws[:, 0] > 0, drawn[:, 0].clamp(max=num_tokens - 1), token_ids), scaled


def _logprobs(
    rows: torch.Tensor, token_ids: torch.Tensor, requests: Sequence[LogprobsRequest]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return, flat, the log-probability of each row's token, and the other tokens' ids and log-probabilities.

    Each row has `_num_others` other tokens, even if it asks for fewer.
    """
    shifted = rows - rows.amax(dim=1, keepdim=True)
    total = TORCH_OPS.exponentials(shifted).sum(dim=1, keepdim=True, dtype=torch.float64).log()
    others = torch.zeros((len(requests), _num_others(requests)), dtype=torch.int64)
    for index, request in enumerate(requests):
        others[index, : len(request.token_ids)] = torch.tensor(request.token_ids, dtype=torch.int64)
    ids = others.to(rows.device)
    num_top = min(max(request.num_top for request in requests), rows.shape[1])
    if num_top:
        tops = torch.tensor([[request.num_top > 0] for request in requests], device=rows.device)
        ids[:, :num_top] = torch.where(tops, shifted.topk(num_top, dim=1).indices, ids[:, :num_top])
    own = shifted.gather(1, token_ids[:, None]) - total
    return own.flatten(), ids.flatten().double(), (shifted.gather(1, ids) - total).flatten()


def _num_others(requests: Sequence[LogprobsRequest]) -> int:
    return max(max(request.num_top, len(request.token_ids)) for request in requests)


def _read_logprobs(
    requests: Sequence[LogprobsRequest],
    own: NDArray[np.float64],
    ids: NDArray[np.float64],
    levels: NDArray[np.float64],
) -> tuple[TokenLogprob, ...]:
    """Return the log-probabilities that each row asks for, from the numbers of `_logprobs`."""
    others = np.stack([ids, levels], axis=1).reshape(len(requests), -1, 2)
    found = []
    for index, request in enumerate(requests):
        pairs = others[index, : request.num_top or len(request.token_ids)].tolist()
        top = [(int(i), max(x, LOWEST_LOGPROB)) for i, x in pairs if request.token_ids or x > -np.inf]
        top.sort(key=lambda pair: (-pair[1], pair[0]))
        found.append(TokenLogprob(logprob=max(float(own[index]), LOWEST_LOGPROB), top=tuple(top)))
    return tuple(found)


def _chain_groups(metadata: SamplingMetadata) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the rows that have the same samplers, and their indices among the rows that draw."""
    groups: defaultdict[object, list[int]] = defaultdict(list)
    for index, chain in enumerate(metadata.chains):
        if chain is not None:
            groups[chain.order, chain.spared_ids, chain.params.mirostat_mode].append(index)
    for indices in groups.values():
        yield [metadata.drawing[index] for index in indices], indices


class TorchOps(ArrayOps):
    """Tensors of torch. A GPU sorts faster than it counts, and nothing here waits for it."""

    xp = torch

    def column(self, values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
        """See `ArrayOps`."""
        return torch.tensor(values, dtype=torch.float64)[:, None].to(like.device, non_blocking=True)

    def best(self, rows: torch.Tensor, count: int) -> torch.Tensor:
        """See `ArrayOps`."""
        return rows.topk(count, dim=1).values

    def truncation_level(
        self, rows: torch.Tensor, *, top_k: torch.Tensor | None = None, top_p: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `ArrayOps`; top-k 0 and top-p 1 keep all."""
        num_rows, num_tokens = rows.shape
        ordered = rows.sort(dim=1, descending=True).values
        if top_k is None:
            rank = torch.full((num_rows, 1), num_tokens - 1, device=rows.device)
        else:
            rank = torch.where(top_k > 0, top_k, num_tokens).clamp(max=num_tokens).long() - 1
        if top_p is not None:
            cumulative = self.exponentials(ordered).cumsum(1, dtype=torch.float64)
            reached = torch.searchsorted(cumulative, top_p * cumulative.gather(1, rank))
            rank = torch.where(top_p < 1.0, torch.minimum(reached, rank), rank)
        return ordered.gather(1, rank)

    def deviation(self, rows: torch.Tensor) -> torch.Tensor:
        """See `ArrayOps`."""
        free = rows > MASKED
        count = self.sum(free)
        mean = self.sum(torch.where(free, rows, 0.0)) / count
        squares = torch.where(free, rows - mean.to(rows.dtype), 0.0) ** 2
        return torch.sqrt(self.sum(squares) / count)

    def nearest(
        self, rows: torch.Tensor, weights: torch.Tensor, *, center: torch.Tensor, mass: torch.Tensor
    ) -> torch.Tensor:
        """See `ArrayOps`."""
        distance = (rows.double() - center).abs()
        ordered, order = distance.sort(dim=1, stable=True)
        cumulative = weights.gather(1, order).cumsum(1, dtype=torch.float64)
        place = torch.searchsorted(cumulative, mass).clamp(max=rows.shape[1] - 1)
        return distance <= ordered.gather(1, place)

    def keep(
        self, rows: torch.Tensor, kept: torch.Tensor, ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `ArrayOps`; the number of columns stays, since to count those kept waits for the device."""
        return torch.where(kept, rows, -torch.inf), ids

    def spread(self, rows: torch.Tensor, ids: torch.Tensor | None, *, vocab_size: int) -> torch.Tensor:
        """See `ArrayOps`."""
        return rows


TORCH_OPS = TorchOps()
