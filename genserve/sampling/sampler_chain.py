"""Sampler chain: draws with a custom order of samplers, or with a rarely used sampler; pure.

Each sampler is written once, for rows of numpy and of torch alike: the functions used here have the same name
and meaning in both. `ArrayOps` has the few that differ.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from genserve.kernels.sampling_kernels import SAMPLING_RULE, sample_logits, scan_logits
from genserve.sampling.sampling_params import SAMPLERS, SamplingParams, active

# At this temperature and below a draw is greedy: no two float32 logits are nearer than this divides.
COLDEST = 1e-6
NUM_BEST = 100  # tokens that top-h chooses from, and from which mirostat 1 estimates the slope of a row
# exp of less underflows to a denormal float32, whose arithmetic is a hundred times slower.
LOWEST_EXPONENT = -80.0
# Logits below are masked: by the rules of the request with -inf, by some graphs with the lowest float32.
MASKED = -1e30
NEAR = 8.0              # what typical_p keeps is rarely further from the mean
FEW = 1024              # keys that are sorted rather than counted into bins
BINS_PER_UNIT = 32
NUM_BINS = 2560

Array: TypeAlias = Any          # numpy's or torch's: [G, V], or [G, 1] with one number per row


class ArrayOps(ABC):
    """The functions on rows [G, V] that the samplers need; numpy and torch differ in some."""

    xp: Any         # the module

    def exponentials(self, rows: Array) -> Array:
        """Return e to the power of each value; next to nothing for -inf: [G, V] -> [G, V] float32."""
        return self.xp.exp(self.raised(rows))

    def raised(self, rows: Array) -> Array:
        """Return rows of at least `LOWEST_EXPONENT`: [G, V] -> [G, V], the rows themselves or a copy."""
        return rows.clip(min=LOWEST_EXPONENT)

    def from_best(self, rows: Array) -> Array:
        """Return rows whose maximum is 0: [G, V] -> [G, V]."""
        return rows - self.xp.amax(rows, axis=1, keepdims=True)

    def reaches(self, rows: Array, level: Array) -> Array:
        """Return where rows reach their level: [G, V] and [G, 1] -> [G, V] bool."""
        # One type for both: numpy would convert the rows to the level's type, at several times the cost.
        return rows >= self.xp.asarray(level, dtype=rows.dtype)

    def sum(self, rows: Array) -> Array:
        """Return the sum of each row: [G, V] -> [G, 1] float64."""
        return rows.sum(axis=1, keepdims=True, dtype=self.xp.float64)

    def entropy(self, rows: Array) -> tuple[Array, Array]:
        """Return entropy (nats) and log(sum(exp)) of rows whose maximum is 0: [G, V] -> [G, 1], [G, 1]."""
        weights, total = self.weigh(rows)
        log_total = self.xp.log(total)
        return log_total - self.mean(rows, weights, total), log_total

    def weigh(self, rows: Array) -> tuple[Array, Array]:
        """Return the exponentials of rows, and the sum of each: [G, V] -> [G, V], [G, 1]."""
        weights = self.exponentials(rows)
        return weights, self.sum(weights)

    def mean(self, rows: Array, weights: Array, total: Array) -> Array:
        """Return the mean of each row by these weights, whose sum is the total: [G, V] -> [G, 1]."""
        return self.sum(weights * self.raised(rows)) / total

    @abstractmethod
    def column(self, values: Sequence[float], like: Array) -> Array:
        """Return numbers as [G, 1] float64, on the device of `like`."""

    @abstractmethod
    def best(self, rows: Array, count: int) -> Array:
        """Return the `count` highest values of each row, the highest first: [G, V] -> [G, count]."""

    @abstractmethod
    def truncation_level(
        self, rows: Array, *, top_k: Array | None = None, top_p: Array | None = None
    ) -> Array:
        """Return the smallest value that each row keeps: [G, V] and [G, 1] -> [G, 1]."""

    @abstractmethod
    def deviation(self, rows: Array) -> Array:
        """Return the standard deviation of each row's values that are not masked: [G, V] -> [G, 1]."""

    @abstractmethod
    def nearest(self, rows: Array, weights: Array, *, center: Array, mass: Array) -> Array:
        """Return where rows are nearest to their center, as many as have the mass: [G, V] -> [G, V] bool.

        Args:
            rows: [G, V].
            weights: [G, V], of each value.
            center: [G, 1] float64.
            mass: [G, 1], at most the sum of the weights, but for rounding.
        """

    @abstractmethod
    def keep(self, rows: Array, kept: Array, ids: Array | None) -> tuple[Array, Array | None]:
        """Return rows without the tokens that are not kept, and the ids of their columns.

        Args:
            rows: [G, N].
            kept: [G, N] bool, some in each row.
            ids: [N], the token ids of the columns; None: the whole vocabulary.

        Returns:
            [G, K] with -inf where it is not kept, and [K] or None; K is N unless less work pays off.
        """

    @abstractmethod
    def spread(self, rows: Array, ids: Array | None, *, vocab_size: int) -> Array:
        """Return rows with a column for each token, -inf where `keep` dropped it: [G, K] -> [G, V]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerChain:
    """The samplers of one sequence's next draw, in their order."""

    order: tuple[str, ...]              # the active ones: names of SAMPLERS, "mirostat"
    params: SamplingParams
    spared_ids: tuple[int, ...] = ()    # XTC removes nothing where it would remove one of them
    max_surprise_bits: float = 0.0      # mirostat's mu: tokens of a higher surprise are cut off

    @property
    def adaptive(self) -> bool:
        """Whether the next draw depends on the surprise of this one."""
        return bool(self.params.mirostat_mode)

    def after(self, surprise_bits: float) -> SamplerChain:
        """Return the chain of the next draw, after one of a token with this surprise."""
        error = surprise_bits - self.params.mirostat_tau
        return replace(self, max_surprise_bits=self.max_surprise_bits - self.params.mirostat_eta * error)


def chain_of(params: SamplingParams, *, spared_ids: tuple[int, ...]) -> SamplerChain | None:
    """Return the chain before the first draw; without `spared_ids` an answer or a line does not end.

    Returns:
        None if `sample_logits` draws alike: from temperature, top-k, top-p and min-p in their default order.
    """
    if params.mirostat_mode:
        order = (*_active(params, ("temperature",)), "mirostat")
        return SamplerChain(order=order, params=params, max_surprise_bits=2 * params.mirostat_tau)
    order = _active(params, params.samplers or tuple(SAMPLERS))
    kernel_order = tuple(name for name in SAMPLERS if name in order and name in _OF_KERNEL)
    if order == kernel_order and not params.dynatemp_range:
        return None
    return SamplerChain(order=order, params=params, spared_ids=spared_ids)


def _active(params: SamplingParams, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if any(active(params, [name])))


def apply_chains(
    rows: Array, chains: Sequence[SamplerChain], *, chances: Sequence[float], ops: ArrayOps
) -> Array:
    """Return the logits that the samplers leave: [G, V] float32 whose maximum is 0; -inf is cut off.

    The arguments are as in `apply_cutting`.
    """
    left, ids = apply_cutting(rows, chains, chances=chances, ops=ops)
    return ops.spread(left, ids, vocab_size=rows.shape[1])


def apply_cutting(
    rows: Array, chains: Sequence[SamplerChain], *, chances: Sequence[float], ops: ArrayOps
) -> tuple[Array, Array | None]:
    """Return the logits that the samplers leave, and the ids of their columns, as `ArrayOps.keep` does.

    Args:
        rows: [G, V] float32 with finite maxima; not modified.
        chains: the chain of each row; all have one order and the same spared ids.
        chances: G numbers in [0, 1) that decide whether XTC acts.
        ops: the functions of numpy or torch, whichever has the rows.

    Source: each sampler's is at its function.
    """
    batch = _ChainRows(chains=chains, chances=chances, ops=ops)
    with np.errstate(all="ignore"):     # divisions by 0 and logarithms of 0 have the results wanted here
        left = ops.from_best(rows)
        for name in chains[0].order:
            if name == "temperature":
                left = _tempered(left, batch)
            else:
                left, batch.ids = ops.keep(left, _CUTS[name](left, batch), batch.ids)
                left = ops.from_best(left) if name in _CUT_THE_BEST else left
    return left, batch.ids


@dataclass(slots=True, kw_only=True)
class _ChainRows:
    """The parameters of G rows with the same samplers."""

    chains: Sequence[SamplerChain]
    chances: Sequence[float]
    ops: ArrayOps
    ids: Array | None = None    # the ids of the columns that are left; None: all

    def column(self, name: str, like: Array) -> Array:
        """Return a parameter of each row: [G, 1] float64, on the device of `like`."""
        return self.ops.column([getattr(s.params, name) for s in self.chains], like)

    def columns_of(self, token_ids: Sequence[int]) -> list[int]:
        """Return the columns of the tokens that are left among `token_ids`."""
        if self.ids is None:
            return list(token_ids)
        return np.flatnonzero(np.isin(self.ids, token_ids)).tolist()


# The samplers take rows [G, N] whose maximum is 0. Temperature scales them; the others return what they keep:
# [G, N] bool.


def _tempered(rows: Array, batch: _ChainRows) -> Array:
    """Divide by the temperature, or by the dynamic one.

    Source: dynamic temperature is kalomaze's, as llama.cpp has it.
    """
    xp = batch.ops.xp
    temperature = batch.column("temperature", rows)
    if any(s.params.dynatemp_range for s in batch.chains):
        reach = batch.column("dynatemp_range", rows)
        low, high = (temperature - reach).clip(min=0.0), temperature + reach
        entropy, _ = batch.ops.entropy(rows)
        num_tokens = batch.ops.sum(rows > -math.inf).clip(min=2)  # a single token has the entropy 0
        share = (entropy / xp.log(num_tokens)).clip(min=0.0)
        temperature = low + (high - low) * share ** batch.column("dynatemp_exponent", rows)
    return rows / xp.asarray(temperature.clip(min=COLDEST), dtype=rows.dtype)


def _top_n_sigma(rows: Array, batch: _ChainRows) -> Array:
    """Keep logits within a number of standard deviations of the best one.

    Source: Tang et al., "Top-nσ: Not All Logits Are You Need" (2024), over the logits that are not masked.
    """
    return batch.ops.reaches(rows, -batch.column("top_n_sigma", rows) * batch.ops.deviation(rows))


def _top_h(rows: Array, batch: _ChainRows) -> Array:
    """Keep the best tokens, of NUM_BEST, up to a share of their entropy.

    Source: Potraghloo et al. (NeurIPS 2025), as transformers has it.
    """
    xp = batch.ops.xp
    best = batch.ops.best(rows, min(NUM_BEST, rows.shape[1]))
    wide = xp.asarray(best, dtype=xp.float64)
    log_shares = wide - xp.log(batch.ops.sum(xp.exp(wide)))
    terms = xp.where(log_shares > -math.inf, -xp.exp(log_shares) * log_shares, 0.0)
    entropy = xp.cumsum(terms, axis=1)
    kept = entropy <= batch.column("top_h", rows) * entropy[:, -1:]
    level = xp.amin(xp.where(kept, best, 0.0), axis=1, keepdims=True)   # at least the best, which is 0
    return batch.ops.reaches(rows, level)


def _top_k(rows: Array, batch: _ChainRows) -> Array:
    level = batch.ops.truncation_level(rows, top_k=batch.column("top_k", rows))
    return batch.ops.reaches(rows, level)


def _top_p(rows: Array, batch: _ChainRows) -> Array:
    """Source: Holtzman et al. (2020)."""
    level = batch.ops.truncation_level(rows, top_p=batch.column("top_p", rows))
    return batch.ops.reaches(rows, level)


def _min_p(rows: Array, batch: _ChainRows) -> Array:
    """Source: Nguyen et al. (2024)."""
    return batch.ops.reaches(rows, batch.ops.xp.log(batch.column("min_p", rows)))


def _typical(rows: Array, batch: _ChainRows) -> Array:
    """Keep the tokens whose surprise is nearest to the entropy, up to a share of the probability.

    Source: Meister et al. (2022), as transformers has it.
    """
    weights, total = batch.ops.weigh(rows)
    # The distance of a logit from the mean of the logits is that of its log-probability from the entropy.
    mean = batch.ops.mean(rows, weights, total)
    share = batch.column("typical_p", rows)
    return batch.ops.nearest(rows, weights, center=mean, mass=share * total) | (share >= 1.0)


def _epsilon_cutoff(rows: Array, batch: _ChainRows) -> Array:
    """Keep tokens of a probability, and the best. Source: Hewitt et al. (2022), as transformers has it."""
    _, total = batch.ops.weigh(rows)
    level = batch.ops.xp.log(batch.column("epsilon_cutoff", rows) * total)
    return batch.ops.reaches(rows, level.clip(max=0.0))


def _eta_cutoff(rows: Array, batch: _ChainRows) -> Array:
    """As epsilon, with a lower cutoff where the entropy is high. Source: as of epsilon."""
    xp = batch.ops.xp
    entropy, log_total = batch.ops.entropy(rows)
    log_cutoff = xp.log(batch.column("eta_cutoff", rows))
    level = xp.minimum(log_cutoff, log_cutoff / 2 - entropy) + log_total
    return batch.ops.reaches(rows, level.clip(max=0.0))


def _xtc(rows: Array, batch: _ChainRows) -> Array:
    """By chance, remove all likely tokens but the least likely of them ("exclude top choices").

    Source: p-e-w, https://github.com/oobabooga/text-generation-webui/pull/6335.
    """
    xp = batch.ops.xp
    acts = [chance < s.params.xtc_probability for s, chance in zip(batch.chains, batch.chances, strict=True)]
    if not any(acts):
        return rows > -math.inf
    _, total = batch.ops.weigh(rows)
    level = xp.log(batch.column("xtc_threshold", rows) * total)
    likely = batch.ops.reaches(rows, level) & (rows > -math.inf)
    kept = rows <= xp.amin(xp.where(likely, rows, math.inf), axis=1, keepdims=True)
    if spared := batch.columns_of(batch.chains[0].spared_ids):
        kept = kept | ~xp.all(kept[:, spared], axis=1, keepdims=True)
    return kept | (batch.ops.column(acts, rows) == 0)


def _mirostat(rows: Array, batch: _ChainRows) -> Array:
    """Cut off tokens of a higher surprise than the draws before allow.

    Source: Basu et al. (ICLR 2021), and its second version as llama.cpp has it.
    """
    bits = batch.ops.column([s.max_surprise_bits for s in batch.chains], rows)
    if batch.chains[0].params.mirostat_mode == 2:
        _, total = batch.ops.weigh(rows)
        level = (batch.ops.xp.log(total) - bits * math.log(2)).clip(max=0.0)
    else:
        level = batch.ops.truncation_level(rows, top_k=_zipf_count(rows, bits, batch.ops))
    return batch.ops.reaches(rows, level)


def _zipf_count(rows: Array, bits: Array, ops: ArrayOps) -> Array:
    """Return how many tokens of a Zipf distribution fitted to a row have at most this surprise: [G, 1]."""
    xp = ops.xp
    vocab_size = rows.shape[1]
    best = xp.asarray(ops.best(rows, min(NUM_BEST, vocab_size)), dtype=xp.float64)
    ranks = xp.arange(1, best.shape[1], dtype=xp.float64, device=rows.device)
    steps = xp.where(best[:, 1:] > -math.inf, xp.log((ranks + 1) / ranks)[None], 0.0)
    falls = xp.where(steps > 0, best[:, :-1] - best[:, 1:], 0.0)
    exponent = ops.sum(steps * falls) / ops.sum(steps**2)
    excess = exponent - 1
    count = (excess * 2.0 ** bits.clip(max=1000.0) / (1 - vocab_size**-excess)) ** (1 / exponent)
    return xp.where(xp.isnan(count), 1.0, count).clip(min=1, max=vocab_size)


_OF_KERNEL = ("temperature", "top_k", "top_p", "min_p")
_CUTS: Mapping[str, Callable[[Array, _ChainRows], Array]] = {
    "top_n_sigma": _top_n_sigma,
    "top_h": _top_h,
    "top_k": _top_k,
    "top_p": _top_p,
    "min_p": _min_p,
    "typical_p": _typical,
    "epsilon_cutoff": _epsilon_cutoff,
    "eta_cutoff": _eta_cutoff,
    "xtc": _xtc,
    "mirostat": _mirostat,
}
_CUT_THE_BEST = ("typical_p", "xtc")    # the samplers that may do so


class NumpyOps(ArrayOps):
    """Rows of numpy. No row is sorted."""

    xp = np

    def raised(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """See `ArrayOps`. A minimum takes a sixth of the time of a copy."""
        return rows if rows.min() >= LOWEST_EXPONENT else rows.clip(min=LOWEST_EXPONENT)

    def column(self, values: Sequence[float], like: NDArray[np.float32]) -> NDArray[np.float64]:
        """See `ArrayOps`."""
        return np.array(values, dtype=np.float64)[:, None]

    def best(self, rows: NDArray[np.float32], count: int) -> NDArray[np.float32]:
        """See `ArrayOps`."""
        ids = scan_logits(rows, top_k=count).top_ids
        return np.where(ids >= 0, np.take_along_axis(rows, ids, axis=1), np.float32(-np.inf))

    def truncation_level(
        self, rows: NDArray[np.float32], *, top_k: Array | None = None, top_p: Array | None = None
    ) -> NDArray[np.float32]:
        """See `ArrayOps`."""
        rules = np.zeros(len(rows), SAMPLING_RULE)
        rules["temperature"], rules["log_min_p"] = 1.0, -np.inf
        rules["top_k"] = 0 if top_k is None else top_k[:, 0]
        rules["top_p"] = 1.0 if top_p is None else top_p[:, 0]
        level: NDArray[np.float32] = sample_logits(rows, rules)["level"]
        return level[:, None]

    def deviation(self, rows: NDArray[np.float32]) -> NDArray[np.float64]:
        """See `ArrayOps`."""
        free = [row if row.min() > MASKED else row[row > MASKED] for row in rows]
        return np.array([[row.std(dtype=np.float64)] for row in free])

    def nearest(
        self,
        rows: NDArray[np.float32],
        weights: NDArray[np.float32],
        *,
        center: NDArray[np.float64],
        mass: NDArray[np.float64],
    ) -> NDArray[np.bool_]:
        """See `ArrayOps`."""
        kept = np.zeros(rows.shape, np.bool_)
        for index, (mean, wanted) in enumerate(zip(center[:, 0].tolist(), mass[:, 0].tolist(), strict=True)):
            row, own = rows[index], weights[index]
            columns = _near(row, own, mean=mean, mass=wanted)
            distance = np.abs(row[columns].astype(np.float64) - mean)
            kept[index, columns] = distance <= _reaching(distance, own[columns], wanted)
        return kept

    def keep(
        self, rows: NDArray[np.float32], kept: NDArray[np.bool_], ids: NDArray[np.int64] | None
    ) -> tuple[NDArray[np.float32], NDArray[np.int64] | None]:
        """See `ArrayOps`."""
        if kept.all():
            return rows, ids
        if np.count_nonzero(kept) > kept.size * 3 // 4:     # to find and copy them takes longer than to mask
            return np.where(kept, rows, np.float32(-np.inf)), ids
        columns: NDArray[np.int64] = np.flatnonzero(kept if len(rows) == 1 else kept.any(axis=0))
        left = rows.take(columns, axis=1)
        if len(rows) > 1:
            left[~kept.take(columns, axis=1)] = -np.inf
        return left, columns if ids is None else ids[columns]

    def spread(
        self, rows: NDArray[np.float32], ids: NDArray[np.int64] | None, *, vocab_size: int
    ) -> NDArray[np.float32]:
        """See `ArrayOps`."""
        if ids is None:
            return rows
        spread = np.full((len(rows), vocab_size), -np.inf, np.float32)
        spread[:, ids] = rows
        return spread


def _near(
    row: NDArray[np.float32], weights: NDArray[np.float32], *, mean: float, mass: float
) -> NDArray[np.int64] | slice:
    """Return where a row is near its mean if these are few and have the mass, else all."""
    if row.size <= FEW:
        return slice(None)
    near: NDArray[np.int64] = np.flatnonzero((row >= mean - NEAR) & (row <= mean + NEAR))
    few = near.size <= row.size // 4
    return near if few and weights[near].sum(dtype=np.float64) >= mass else slice(None)


def _reaching(keys: NDArray[np.float64], weights: NDArray[np.float32], mass: float) -> float:
    """Return the smallest key that, with all smaller ones, has the mass. One bin of a histogram is sorted."""
    before = 0.0
    if keys.size > FEW:
        bins = (np.minimum(keys, (NUM_BINS - 1) / BINS_PER_UNIT) * BINS_PER_UNIT).astype(np.int16)
        sums = np.cumsum(np.bincount(bins, weights=weights, minlength=NUM_BINS))
        reaching = min(int(sums.searchsorted(mass)), int(bins.max()))
        before = float(sums[reaching - 1]) if reaching else 0.0
        keys, weights = keys[bins == reaching], weights[bins == reaching]
    order = np.argsort(keys)
    cumulative = before + weights[order].cumsum(dtype=np.float64)
    return float(keys[order[min(int(cumulative.searchsorted(mass)), order.size - 1)]])


NUMPY_OPS = NumpyOps()
