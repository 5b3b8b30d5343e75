"""Step times: what a step takes, by what it computes, learned while the engine runs."""

from __future__ import annotations

__all__ = ["StepTimes"]

_NEWEST = 0.2       # the weight of what was seen last
_GUESS = 15         # more tokens than that double a step, before anything was measured
_FORGIVEN = 0.002   # of what drafted tokens take, with each step without them: or one slow step ends drafting
_FEW_TOKENS = 8     # of a chunk: fewer cost little each, and say nothing of what many do


class StepTimes:
    """Learns the seconds of steps of one token per sequence, and those of each token more.

    A few drafted tokens are cheap, since the weights are read anyway; so they are learned apart from prompts.
    """

    def __init__(self) -> None:
        self._decode_s: dict[int, float] = {}   # by the number of sequences
        # Of one token more; 0: not known.
        self._prompt_token_s = 0.0
        self._drafted_token_s = 0.0

    def note(self, *, num_decodes: int, num_prompt_tokens: int, num_drafted: int, seconds: float) -> None:
        """Learn from a step, which has prompts or drafted tokens, not both.

        Args:
            num_decodes: sequences with one token.
            num_prompt_tokens: of prompts.
            num_drafted: drafted tokens.
            seconds: that it took.
        """
        if not num_decodes or seconds <= 0:
            return
        decode_s = self.decode_s(num_decodes)
        if not num_prompt_tokens and not num_drafted:
            self._decode_s[num_decodes] = _moved(self._decode_s.get(num_decodes, 0.0), seconds)
            self._drafted_token_s *= 1 - _FORGIVEN
        elif decode_s is None:
            return
        elif num_drafted:
            self._drafted_token_s = _moved(self._drafted_token_s, max(seconds - decode_s, 0.0) / num_drafted)
        elif num_prompt_tokens >= _FEW_TOKENS:
            seconds_more = max(seconds - decode_s, 0.0)
            self._prompt_token_s = _moved(self._prompt_token_s, seconds_more / num_prompt_tokens)

    def decode_s(self, num_decodes: int) -> float | None:
        """Return the seconds of a step of one token for each of so many sequences; None: not known."""
        if num_decodes not in self._decode_s and self._decode_s:
            num_decodes = min(self._decode_s, key=lambda known: abs(known - num_decodes))
        return self._decode_s.get(num_decodes)

    def doubling_prompt_tokens(self, num_decodes: int) -> float:
        """Return how many tokens of prompts make a step of so many sequences take twice as long."""
        return self._doubling(num_decodes, self._prompt_token_s)

    def doubling_drafted_tokens(self, num_decodes: int) -> float:
        """Return how many drafted tokens would make it take twice as long."""
        return self._doubling(num_decodes, self._drafted_token_s)

    def _doubling(self, num_decodes: int, token_s: float) -> float:
        decode_s = self.decode_s(num_decodes)
        return decode_s / token_s if decode_s and token_s else _GUESS + num_decodes


def _moved(before: float, seconds: float) -> float:
    # One that took far longer had to wait for others.
    return before + _NEWEST * (min(seconds, 2 * before) - before) if before else seconds
