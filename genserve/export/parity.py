"""Parity: compares the logits of an exported graph with its source's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from genserve.engine.logits_model import ForwardBatch, LogitsModel
from genserve.errors import ExportError
from genserve.export.export_options import CacheType, ExportFormat, Precision
from genserve.export.reference import Positions, Reference
from genserve.machine import num_cores
from genserve.sampling.logits_array import FloatArray, on_host
from genserve.textmodel.logits_config import PARITY_FILE, pipeline_files

_ROWS = 16          # rows of logits that a thread compares together, to fit into a processor's cache
_TOGETHER = 128     # rows of decodes that are collected before they are compared
_DECODES = 32       # steps of one token; the rest is decoded in chunks, as drafts are verified
_CHUNK = 8          # tokens of a chunk


def forward_rows(
    model: LogitsModel,
    token_ids: NDArray[np.int64],
    *,
    past: Sequence[int],
    logits_indices: Sequence[int],
    first_row: int = 0,
    keeps_state: bool = False,
) -> FloatArray:
    """Run tokens [rows, length] after the `past` tokens of each row, from `first_row` on.

    Each row has its own part of the KV cache, and its own slots of recurrent states. With `keeps_state` the
    new states go to other slots, so that the next forward goes on from the states before these tokens.

    Returns:
        [len(logits_indices), vocab_size] float32: the logits at `logits_indices` of the rows * length tokens.
    """
    num_rows = len(token_ids)
    blocks_per_row = -(-model.max_length // model.block_size)
    batch = ForwardBatch.of(
        token_ids,
        num_computed_tokens=past,
        block_table=np.arange(num_rows * blocks_per_row).reshape(num_rows, -1) + first_row * blocks_per_row,
        logits_indices=logits_indices,
        **_slots(model, past, first_row=first_row, keeps_state=keeps_state),
    )
    return on_host(model.forward(batch)).copy()


def _slots(
    model: LogitsModel, past: Sequence[int], *, first_row: int, keeps_state: bool
) -> dict[str, NDArray[np.int64]]:
    """The slots of recurrent states: one for each row, and as many for states that are not kept."""
    if not model.num_state_slots:
        return {}
    own = first_row + np.arange(len(past))
    return {
        "state_source": np.where(np.array(past) == 0, -1, own),
        "state_target": own + model.max_num_seqs if keeps_state else own,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """The distance between the logits of an exported graph and of its source."""

    precision: Precision
    kv_cache: CacheType
    tokens: int                      # number of compared rows of logits
    largest_logit_difference: float
    top1_agreement: float            # share of the rows for which both rank the same token first
    perplexity_ratio: float          # perplexity of the compared text, the graph's over the source's
    divergence: float                # Kullback-Leibler divergence from the source, nats per token


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bound:
    """How far a graph may be from its source.

    Up to `small_divergence` the top-1 agreement is not bounded: tokens that are nearly as likely as the best
    one change places with any rounding, and in models with random weights there are many. It is about twice
    that of SmolLM2-135M with weights off the grid.
    """

    largest_logit_difference: float = float("inf")
    top1_agreement: float = 0.0
    small_divergence: float = 0.0
    perplexity_ratio: float = 1.05


_BOUNDS: Mapping[Precision, _Bound] = MappingProxyType(
    {
        # Both must rank the same token first wherever the source's first two logits are 0.002 apart.
        "fp32": _Bound(largest_logit_difference=1e-3),
        "fp16": _Bound(top1_agreement=0.97),
        "int8": _Bound(top1_agreement=0.90, small_divergence=0.02),
        "int4": _Bound(top1_agreement=0.50, small_divergence=0.2, perplexity_ratio=2.0),
        "source": _Bound(top1_agreement=0.90, small_divergence=0.02),
    }
)


def check_parity(
    reference: Reference,
    folder: Path,
    *,
    export_format: ExportFormat = ExportFormat.ONNX,
    precision: Precision,
    kv_cache: CacheType = "float",
    pipeline_stages: int = 1,
    source: str,
    advance: Callable[[int], None] = lambda _rows: None,
) -> Parity:
    """Compare the graph in `folder` with its source, and write parity.json there.

    Every token of the reference's texts is compared in a prefill. The second half is compared again in
    decodes through the KV cache, all rows together, each at another position. `precision` sets the bounds; an
    int8 KV cache relaxes the bounds of fp32 and fp16 to the bounds of int8. `advance` is called with the
    number of rows each time that some of the `num_compared` rows are done.

    Raises:
        ExportError: the graph differs more from its source than its precision explains.
    """
    num_rows, length = reference.ids.shape
    load = _runtime(export_format, pipeline_stages=pipeline_stages)
    model = load(folder / export_format.file_name, max_num_seqs=num_rows, max_length=length)
    parity = _compare(model, reference, precision=precision, kv_cache=kv_cache, advance=advance)
    is_rounded = kv_cache == "int8" and precision in ("fp32", "fp16")
    _require_within(_BOUNDS["int8" if is_rounded else precision], parity, source=source)
    (folder / PARITY_FILE).write_text(json.dumps(asdict(parity), indent=2) + "\n", encoding="utf-8")
    return parity


def _runtime(export_format: ExportFormat, *, pipeline_stages: int) -> Callable[..., LogitsModel]:
    match export_format:
        case ExportFormat.ONNX if pipeline_stages > 1:
            from genserve.textmodel.runtimes.pipeline_logits import PipelineLogits

            return lambda path, **sizes: PipelineLogits(
                pipeline_files(path, num_stages=pipeline_stages), **sizes
            )
        case ExportFormat.ONNX:
            from genserve.textmodel.runtimes.onnx_logits import OnnxLogits

            return OnnxLogits
        case ExportFormat.TORCHSCRIPT:
            from genserve.textmodel.runtimes.torchscript_logits import TorchLogits

            return TorchLogits
        case ExportFormat.TRACED:
            from genserve.textmodel.runtimes.growing_logits import GrowingLogits

            return GrowingLogits


def _compare(
    model: LogitsModel,
    reference: Reference,
    *,
    precision: Precision,
    kv_cache: CacheType = "float",
    advance: Callable[[int], None] = lambda _rows: None,
) -> Parity:
    length = reference.ids.shape[1]
    compared: list[_Distances] = []
    with ThreadPoolExecutor(num_cores()) as threads:
        # There may be less memory for recurrent states than for those of all rows.
        for rows, positions, logits in _exported_logits(model, reference.ids[: model.max_num_seqs]):
            expected = reference.logits[rows, positions]
            # The last token of a row has no next token.
            nexts = np.where(positions + 1 < length, np.roll(reference.ids, -1)[rows, positions], -1)
            parts = [slice(start, start + _ROWS) for start in range(0, len(rows), _ROWS)]
            arrays = ([array[part] for part in parts] for array in (logits, expected, nexts))
            compared += threads.map(_distances, *arrays)
            advance(len(rows))
    differences, agreements, divergences, losses = map(np.concatenate, zip(*compared, strict=True))
    return Parity(
        precision=precision,
        kv_cache=kv_cache,
        tokens=len(agreements),
        largest_logit_difference=float(differences.max()),
        top1_agreement=float(agreements.mean()),
        perplexity_ratio=float(np.exp(np.nanmean(losses))),
        divergence=max(float(divergences.mean(dtype=np.float64)), 0.0),     # rounding may make it negative
    )


class _Distances(NamedTuple):
    """The distances of some rows of logits."""

    difference: NDArray[np.float32]     # the largest difference of two logits
    agrees: NDArray[np.bool]            # whether both rank the same token first
    divergence: FloatArray
    loss: FloatArray                    # loss of log-probability of the next token; NaN: there is none


def _distances(logits: FloatArray, expected: FloatArray, nexts: NDArray[np.int64]) -> _Distances:
    """Compare logits [n, vocab]; `nexts` has the next token of the text for each row, or -1."""
    losses = expected - logits
    difference = np.maximum(losses.max(axis=-1), -losses.min(axis=-1))
    weights = np.empty_like(expected)   # used twice: the memory of temporaries would take most of the time
    normalizer = _log_sum_exp(logits, weights)
    normalizer -= _log_sum_exp(expected, weights)
    losses += normalizer.astype(np.float32)     # turns differences of logits into those of log-probabilities
    return _Distances(
        difference=difference,
        agrees=logits.argmax(axis=-1) == expected.argmax(axis=-1),
        divergence=np.vecdot(weights, losses) / weights.sum(axis=-1),
        loss=np.where(nexts < 0, np.nan, losses[np.arange(len(nexts)), nexts]),
    )


def _log_sum_exp(logits: FloatArray, weights: FloatArray) -> NDArray[np.float64]:
    """Return the log-sum-exp [n, 1]; write the exponentials to `weights` [n, vocab]."""
    largest = logits.max(axis=-1, keepdims=True)
    np.exp(np.subtract(logits, largest, out=weights), out=weights)
    result: NDArray[np.float64] = largest + np.log(weights.sum(axis=-1, keepdims=True, dtype=np.float64))
    return result


def _exported_logits(
    model: LogitsModel, ids: NDArray[np.int64]
) -> Iterator[tuple[Positions, Positions, FloatArray]]:
    """Yield logits [n, vocab] of the graph, with the rows and the positions [n] of their tokens."""
    num_rows, length = ids.shape
    # One row at a time: the logits of all rows would take 2 GB with a vocabulary of 250,000 tokens.
    # Each row of the decodes is one token ahead of the previous row.
    done = length // 2
    starts = np.maximum(np.arange(num_rows) + 1 - num_rows, -done)
    for row in range(num_rows):
        # Recurrent states are kept where the decodes will begin.
        kept = int(starts[row]) + done if model.num_state_slots else 0
        for first, end in ((0, kept), (kept, length)):
            if first < end:
                logits = forward_rows(
                    model,
                    ids[row : row + 1, first:end],
                    past=[first],
                    logits_indices=range(end - first),
                    first_row=row,
                    keeps_state=first == kept,
                )
                yield np.full(end - first, row), np.arange(first, end), logits
    # The cache still has later tokens from the prefill, which are overwritten before they are read.
    steps: list[tuple[Positions, Positions, FloatArray]] = []
    while done < length:
        width = 1 if done < length // 2 + _DECODES else min(_CHUNK, length - done)
        rows, positions = np.broadcast_arrays(
            np.arange(num_rows)[:, None], starts[:, None] + np.arange(done, done + width)
        )
        past = (starts + done).tolist()
        logits = forward_rows(model, ids[rows, positions], past=past, logits_indices=range(rows.size))
        steps.append((rows.ravel(), positions.ravel(), logits))
        done += width
        # Several at a time, since the source may compute its logits with one product.
        if sum(len(step[0]) for step in steps) >= _TOGETHER or done == length:
            all_rows, all_positions, logits = map(np.concatenate, zip(*steps, strict=True))
            yield all_rows, all_positions, logits
            steps.clear()


def num_compared(ids: NDArray[np.int64]) -> int:
    """Return the number of rows of logits that are compared for texts of tokens [rows, length]."""
    num_rows, length = ids.shape
    return int(num_rows * (length + length - length // 2))


def _require_within(bound: _Bound, parity: Parity, *, source: str) -> None:
    holds = (
        parity.largest_logit_difference <= bound.largest_logit_difference
        and (parity.top1_agreement >= bound.top1_agreement or parity.divergence <= bound.small_divergence)
        and parity.perplexity_ratio <= bound.perplexity_ratio
    )
    if not holds:
        raise ExportError(
            f"the {parity.precision} graph of {source} is too far from its source: largest logit difference "
            f"{parity.largest_logit_difference:.4g}, top-1 agreement {parity.top1_agreement:.1%}, "
            f"divergence {parity.divergence:.4f} nats, perplexity x{parity.perplexity_ratio:.3f}",
            remedy="nothing was installed; try --precision fp32 without --kv-cache, "
            "and report a failure of fp32",
        )
