"""Step times: what a step takes, by what it computes, learned while the engine runs."""

from __future__ import annotations

__all__ = ["StepTimes"]

_NEWEST = 0.2       # the weight of what was seen last
_GUESS = 15         # more tokens than that double a step, before anything was measured


class StepTimes:
    """Learns the seconds of steps of one token per sequence, and those of each token more."""

    def __init__(self) -> None:
        self._decode_s: dict[int, float] = {}   # by the number of sequences
        self._token_s = 0.0                     # of one token more; 0: not known

    def note(self, *, num_decodes: int, num_more: int, seconds: float) -> None:
        """Learn from a step.

        Args:
            num_decodes: sequences with one token.
            num_more: tokens of prompts, and drafted ones.
            seconds: that it took.
        """
        if not num_decodes or seconds <= 0:
            return
        if not num_more:
            self._decode_s[num_decodes] = _moved(self._decode_s.get(num_decodes, 0.0), seconds)
        elif (decode_s := self.decode_s(num_decodes)) is not None:
            self._token_s = _moved(self._token_s, max(seconds - decode_s, 0.0) / num_more)

    def decode_s(self, num_decodes: int) -> float | None:
        """Return the seconds of a step of one token for each of so many sequences; None: not known."""
        if num_decodes not in self._decode_s and self._decode_s:
            num_decodes = min(self._decode_s, key=lambda known: abs(known - num_decodes))
        return self._decode_s.get(num_decodes)

    def doubling_tokens(self, num_decodes: int) -> float:
        """Return how many tokens more make a step of so many sequences take twice as long."""
        decode_s = self.decode_s(num_decodes)
        return decode_s / self._token_s if decode_s and self._token_s else _GUESS + num_decodes


def _moved(before: float, seconds: float) -> float:
    """Return the mean with a new value, of which one that is far too long had to wait for others."""
    return before + _NEWEST * (min(seconds, 2 * before) - before) if before else seconds
