"""Legacy logprobs: the log-probabilities of a completion in the shape of `/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from genserve.request import Completion, Delta
from genserve.server.routes.scored_tokens import ScoredToken, TokenScores
from genserve.text.detokenizer import Detokenizer

__all__ = ["LegacyLogprobs"]


class LegacyLogprobs:
    """The `logprobs` of one choice, as its tokens come, behind those of the prompt if that is echoed."""

    def __init__(
        self, prompt: Detokenizer, prompt_ids: Sequence[int], *, answer: Detokenizer, by_id: bool = False
    ) -> None:
        """Begin.

        Args:
            prompt: a fresh detokenizer for it.
            prompt_ids: what is echoed.
            answer: a fresh detokenizer for it.
            by_id: whether tokens are called by their ids.
        """
        self._prompt_ids = prompt_ids
        self._prompt_scores = TokenScores(prompt, by_id=by_id)
        self._answer_scores = TokenScores(answer, by_id=by_id)
        self._offset = 0

    def part(self, part: Delta | Completion) -> dict[str, Any]:
        """Return the log-probabilities of a part, or of the whole."""
        tokens = [*self._prompt(part), *self._answer_scores.answer(part)]
        *offsets, self._offset = accumulate((len(token.text) for token in tokens), initial=self._offset)
        return {
            "tokens": [token.name for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [_likely(token) for token in tokens],
            "text_offset": offsets,
        }

    def _prompt(self, part: Delta | Completion) -> list[ScoredToken]:
        """Return the tokens of the prompt, the first time."""
        if not self._prompt_ids:
            return []
        scores = [(score.logprob, score.top) for score in part.prompt_logprobs]
        prompt_ids, self._prompt_ids = self._prompt_ids, ()
        return self._prompt_scores.read(prompt_ids, [(None, ()), *scores], final=True)


def _likely(token: ScoredToken) -> dict[str, float] | None:
    """Return the token and the others that were asked for, by name."""
    if token.logprob is None:
        return None
    return {name: level for name, level in token.top if name != token.name} | {token.name: token.logprob}
