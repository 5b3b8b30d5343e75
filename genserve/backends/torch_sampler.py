"""Torch sampler: rows of logits to token ids where the logits lie, in one pass on their device; pure.

The twin of `generation.sampler` for logits that are a torch tensor: the same rules in the same order, so that
a request's text does not depend on which of the two picked it, but for draws that fall on a border between
two tokens to the last digits of a float32. Where numpy avoids to sort, a GPU just sorts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import compress
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from genserve.backends.torch_stages import left_by
from genserve.backends.torch_truncation import exponentials, truncated
from genserve.generation.draw import SamplingRows, uniforms
from genserve.generation.likelihood import LOWEST, Asked
from genserve.generation.logit_edits import LogitEdits, apply_edits
from genserve.generation.sampler import PickedRows
from genserve.generation.truncation import Truncation
from genserve.request import TokenLogprob

__all__ = ["pick_rows"]

_NAMES = [rule.name for rule in fields(Truncation)]
_RULES = attrgetter(*_NAMES)
# Of a row that does not draw: whether it does, its temperature, the number that it draws by, what it keeps.
_NEUTRAL = np.array([0.0, 1.0, 0.0, *_RULES(Truncation())])


def pick_rows(
    logits: torch.Tensor,
    *,
    drawing: Sequence[int],
    rules: SamplingRows,
    asking: Sequence[Asked],
    edits: LogitEdits | None = None,
) -> PickedRows:
    """Pick one token per row: the best one, or a draw. See `generation.sampler.pick_rows`.

    Only ids, flags and log-probabilities come back from the device, in one copy; nothing else waits for it.

    Args:
        logits: [R, V] float32, on any device; `edits` are written into it, nothing else is.
        drawing: the rows that draw, ascending.
        rules: their parameters.
        asking: which log-probabilities are wanted.
        edits: what is to be changed of the logits first.
    """
    rows = [asked.row for asked in asking]
    raw = logits[rows] if rows else logits  # a copy
    if edits is not None:
        _apply(logits, edits)
    token_ids = logits.argmax(dim=1)  # ties go to the lowest id, and NaN is above all numbers
    best = logits.gather(1, token_ids[:, None])
    scaled = logits - best
    if drawing:
        token_ids, scaled = _draw(scaled, token_ids, drawing=drawing, rules=rules)
    # A float64 holds any token id.
    picked = [token_ids.double(), best[:, 0].isfinite().double()]
    if asking:
        after = torch.tensor([[asked.processed] for asked in asking], device=logits.device)
        picked += _levels(torch.where(after, scaled[rows], raw), token_ids[rows], asking)
    sizes = [part.numel() for part in picked]
    token_row, finite_row, *levels = np.split(torch.cat(picked).cpu().numpy(), np.cumsum(sizes)[:-1])
    return PickedRows(
        token_ids=token_row.astype(np.int64),
        finite=finite_row.astype(np.bool_),
        logprobs=_logprobs(asking, *levels) if asking else (),
    )


def _apply(logits: torch.Tensor, edits: LogitEdits) -> None:
    def place(array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(logits.device, non_blocking=True)

    with torch.inference_mode():  # what a model made in this mode can be overwritten in it alone
        apply_edits(logits, edits, place=place)


def _draw(
    shifted: torch.Tensor, token_ids: torch.Tensor, *, drawing: Sequence[int], rules: SamplingRows
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw for those rows; the others keep their token. Returns also what was drawn from: [R, V]."""
    num_rows, num_tokens = shifted.shape
    columns = _columns(num_rows, drawing=drawing, rules=rules)
    uploaded = torch.from_numpy(columns).to(shifted.device, non_blocking=True)
    draws, temperature, uniform, *kept = uploaded[:, :, None].unbind()
    used = (columns != _NEUTRAL[:, None]).any(axis=1)[-len(kept) :]
    rules_used = dict(compress(zip(_NAMES, kept, strict=True), used))
    scaled = truncated(shifted / temperature.float(), rules_used)
    for index, stages in enumerate(rules.stages):
        if stages is not None:
            row = slice(drawing[index], drawing[index] + 1)
            scaled[row] = left_by(shifted[row], stages, chance=rules.chance(index))
    weights = torch.where(scaled == -torch.inf, 0.0, exponentials(scaled))
    cumulative = weights.cumsum(1, dtype=torch.float64)
    drawn = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    return torch.where(draws[:, 0] > 0, drawn[:, 0].clamp(max=num_tokens - 1), token_ids), scaled


def _columns(num_rows: int, *, drawing: Sequence[int], rules: SamplingRows) -> NDArray[np.float64]:
    """Return, for all rows, what `_draw` and `truncated` unpack; one that does not draw keeps all."""
    columns = np.repeat(_NEUTRAL[:, None], num_rows, axis=1)
    uniform = uniforms(rules.seed, rules.step)
    kept = np.array([_RULES(truncation) for truncation in rules.truncations])
    columns[:, list(drawing)] = np.stack([np.ones_like(uniform), rules.temperature, uniform, *kept.T])
    return columns


def _levels(
    rows: torch.Tensor, token_ids: torch.Tensor, asking: Sequence[Asked]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return, flat, the level of each row's token, and ids and levels of the others that are asked for.

    There are as many others for each row as `_num_others`, whatever it asks for.
    """
    shifted = rows - rows.amax(dim=1, keepdim=True)
    total = exponentials(shifted).sum(dim=1, keepdim=True, dtype=torch.float64).log()
    others = torch.zeros((len(asking), _num_others(asking)), dtype=torch.int64)
    for index, asked in enumerate(asking):
        others[index, : len(asked.named)] = torch.tensor(asked.named, dtype=torch.int64)
    ids = others.to(rows.device)
    num_top = min(max(asked.num_top for asked in asking), rows.shape[1])
    if num_top:
        tops = torch.tensor([[asked.num_top > 0] for asked in asking], device=rows.device)
        ids[:, :num_top] = torch.where(tops, shifted.topk(num_top, dim=1).indices, ids[:, :num_top])
    own = shifted.gather(1, token_ids[:, None]) - total
    return own.flatten(), ids.flatten().double(), (shifted.gather(1, ids) - total).flatten()


def _num_others(asking: Sequence[Asked]) -> int:
    return max(max(asked.num_top, len(asked.named)) for asked in asking)


def _logprobs(
    asking: Sequence[Asked], own: NDArray[np.float64], ids: NDArray[np.float64], levels: NDArray[np.float64]
) -> tuple[TokenLogprob, ...]:
    """Return what `_levels` found, for each row what it asked for."""
    others = np.stack([ids, levels], axis=1).reshape(len(asking), -1, 2)
    found = []
    for index, asked in enumerate(asking):
        pairs = others[index, : asked.num_top or len(asked.named)].tolist()
        top = [(int(i), max(level, LOWEST)) for i, level in pairs if asked.named or level > -np.inf]
        top.sort(key=lambda pair: (-pair[1], pair[0]))
        found.append(TokenLogprob(logprob=max(float(own[index]), LOWEST), top=tuple(top)))
    return tuple(found)
