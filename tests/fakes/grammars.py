"""Grammars as tables of the ids that may come next."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Steps:
    """`StructuredOutputGrammar`: allows `steps[i]` at step i, then the end; fails at an empty step."""

    cut = False

    def __init__(self, *steps: Sequence[int]) -> None:
        self.failure = ""
        self._steps = list(steps)

    @property
    def complete(self) -> bool:
        return not self._steps

    def fill(self, mask: np.ndarray) -> None:
        bits = np.zeros(32 * mask.size, dtype=np.uint8)
        bits[list(self._steps[0])] = 1
        mask[:] = np.packbits(bits, bitorder="little").view(np.int32)
        self.failure = "" if self._steps[0] else "too many states"

    def accept(self, token_id: int) -> bool:
        self.failure = "" if token_id in self._steps[0] else "it is not allowed"
        return token_id in self._steps.pop(0)
