"""Step times: how long the steps of an engine take, by the tokens that they compute."""

from __future__ import annotations

_NEWEST = 0.2  # weight of the last step in the moving averages of step times
# Tokens, besides the decodes, that double a step as long as nothing is measured.
_INITIAL_DOUBLING_TOKENS = 15
# Share of a drafted token's time by which each step without drafts lowers it again, since otherwise one slow
# step would end drafting.
_DRAFT_COST_DECAY = 0.002
_MEASURED_TOKENS = 8  # fewer prompt tokens in a step cost little each, and say nothing about many


class StepTimes:
    """Measures how long a step takes, by the number of its decodes, and for each further token.

    A few drafted tokens are cheap, since the weights are read anyway, so they are measured separately.
    """

    def __init__(self) -> None:
        self._decode_s: dict[int, float] = {}  # number of sequences -> average of the step times
        # How much each further token lengthens a step; 0: not known.
        self._prompt_token_s = 0.0
        self._drafted_token_s = 0.0

    def record(
        self, seconds: float, *, num_decodes: int, num_prompt_tokens: int = 0, num_drafted: int = 0
    ) -> None:
        """Record how long a step took, which has tokens of prompts or drafted ones, but not both."""
        if not num_decodes or seconds <= 0:
            return
        decode_s = self.decode_s(num_decodes)
        if not num_prompt_tokens and not num_drafted:
            average = self._decode_s.get(num_decodes, 0.0)
            self._decode_s[num_decodes] = _moving_average(average, seconds)
            self._drafted_token_s *= 1 - _DRAFT_COST_DECAY
        elif decode_s is None:
            return
        elif num_drafted and not num_prompt_tokens:
            token_s = max(seconds - decode_s, 0.0) / num_drafted
            self._drafted_token_s = _moving_average(self._drafted_token_s, token_s)
        elif num_prompt_tokens >= _MEASURED_TOKENS:
            token_s = max(seconds - decode_s, 0.0) / num_prompt_tokens
            self._prompt_token_s = _moving_average(self._prompt_token_s, token_s)

    def decode_s(self, num_decodes: int) -> float | None:
        """Return the seconds of a step that only decodes `num_decodes` sequences; None: not known."""
        if num_decodes not in self._decode_s and self._decode_s:
            num_decodes = min(self._decode_s, key=lambda known: abs(known - num_decodes))
        return self._decode_s.get(num_decodes)

    def doubling_prompt_tokens(self, num_decodes: int) -> float:
        """Return how many tokens of prompts double the time of a step with `num_decodes` decodes."""
        return self._doubling_tokens(num_decodes, self._prompt_token_s)

    def doubling_drafted_tokens(self, num_decodes: int) -> float:
        """Return how many drafted tokens double the time of a step with `num_decodes` decodes."""
        return self._doubling_tokens(num_decodes, self._drafted_token_s)

    def _doubling_tokens(self, num_decodes: int, token_s: float) -> float:
        decode_s = self.decode_s(num_decodes)
        return decode_s / token_s if decode_s and token_s else _INITIAL_DOUBLING_TOKENS + num_decodes


def _moving_average(average: float, seconds: float) -> float:
    # A step that took far longer had to wait for other processes.
    return average + _NEWEST * (min(seconds, 2 * average) - average) if average else seconds
