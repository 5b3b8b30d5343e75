"""Measurement: how long the steps of a setting take, from samples that were taken in turns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from genserve.tuning.setting import Setting

__all__ = ["Measurement", "Sample", "Samples"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Some steps of one setting, one after the other."""

    setting: Setting
    context: int                    # tokens that each sequence had behind it
    steps_s: tuple[float, ...]
    cpu_s: float                    # that the thread which runs them had, of all steps together
    token_bytes: int                # of the KV cache, for each token of a sequence; 0: there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What is known of one setting."""

    setting: Setting
    step_s: Mapping[int, float]     # by context: the median of its steps
    token_bytes: int                # see `Sample`

    @property
    def tokens_per_s(self) -> float:
        """Of all sequences together, where as many tokens are made at each of the contexts."""
        return self.setting.batch_size * len(self.step_s) / sum(self.step_s.values())

    @property
    def inter_token_s(self) -> float:
        """The time between two tokens of a sequence, at the context where it is longest."""
        return max(self.step_s.values())

    @property
    def cache_bytes(self) -> int:
        """KV cache of the whole batch at the longest context."""
        return self.setting.batch_size * max(self.step_s) * self.token_bytes


class Samples:
    """The samples so far."""

    def __init__(self) -> None:
        self._steps_s: dict[Setting, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._token_bytes: dict[Setting, int] = {}
        self._elapsed_s = self._cpu_s = 0.0

    def add(self, sample: Sample) -> None:
        """Take a sample in."""
        self._elapsed_s += sum(sample.steps_s)
        self._cpu_s += sample.cpu_s
        self._steps_s[sample.setting][sample.context] += sample.steps_s
        self._token_bytes[sample.setting] = sample.token_bytes

    @property
    def lost_share(self) -> float:
        """Which part of the time others had the core of the thread that computes, from 0 to 1."""
        return max(0.0, 1 - self._cpu_s / self._elapsed_s) if self._elapsed_s else 0.0

    def measurements(self) -> list[Measurement]:
        """Return the settings that have samples at every context that any has, in the order of the first."""
        contexts = {context for by_context in self._steps_s.values() for context in by_context}
        return [
            Measurement(
                setting=setting,
                step_s={context: median(by_context[context]) for context in sorted(contexts)},
                token_bytes=self._token_bytes[setting],
            )
            for setting, by_context in self._steps_s.items()
            if by_context.keys() == contexts
        ]
