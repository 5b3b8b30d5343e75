"""Thinking: how many tokens of an answer may stand between the tags of a model that thinks aloud."""

from __future__ import annotations

from collections.abc import Sequence

from genserve.generation.logits_model import LogitsArray

__all__ = ["ThinkingBudget"]


class ThinkingBudget:
    """Picks the end tag where the budget is used up; a `LogitsProcessor` of one token sequence.

    A text may think several times; each time has the whole budget.
    """

    hook = "post_penalty"   # no rule of the request forbids the end

    def __init__(
        self, *, num_tokens: int, start_id: int, end_id: int, num_prompt_tokens: int, begun: bool
    ) -> None:
        """Begin before the first token.

        Args:
            num_tokens: the budget, 0 or more.
            start_id: of the tag that begins a thought.
            end_id: of the tag that ends it.
            num_prompt_tokens: what follows them is the answer.
            begun: the prompt ends within a thought, of which its own tokens do not count.
        """
        self._num_tokens = num_tokens
        self._start_id = start_id
        self._end_id = end_id
        self._num_read = num_prompt_tokens
        # How many tokens there were before the thought, its tag included.
        self._began = num_prompt_tokens if begun else None

    def __call__(self, token_ids: Sequence[int], logits: LogitsArray) -> None:
        """Forbid all but the end tag, or nothing."""
        for position in range(self._num_read, len(token_ids)):
            if token_ids[position] == self._start_id:
                self._began = position + 1
            elif token_ids[position] == self._end_id:
                self._began = None
        self._num_read = len(token_ids)
        if self._began is not None and len(token_ids) - self._began >= self._num_tokens:
            logits[:] = float("-inf")
            logits[self._end_id] = 0.0
