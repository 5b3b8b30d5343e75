"""Thinking budget: ends the reasoning of one token sequence, after a number of tokens or on request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from genserve.sampling.logits_array import LogitsArray

# The tokens of one character are at most its bytes in UTF-8.
_MOST_TOKENS_OF_CHARACTER = 4


class ThinkingBudget:
    """Writes a last message and the end of a thought once its budget is used up; a `LogitsProcessor`.

    The message comes in place of the model's tokens, one per step, so that the answer goes on as if the model
    had written it. It waits until the last character is complete; a thought without tokens needs none.
    If an answer reasons several times, each time has the whole budget. What it does follows from the tokens,
    unless `end` was called.
    """

    hook = "post_penalty"   # called after all rules of the request, so none of them can forbid the message

    def __init__(
        self,
        *,
        num_tokens: int | None,
        start_ids: Sequence[int],
        end_ids: Sequence[int],
        num_prompt_tokens: int,
        begun: bool,
        message_ids: Sequence[int] = (),
        decode: Callable[[Sequence[int]], str] = lambda _token_ids: "",
    ) -> None:
        """Start before the first token.

        Args:
            num_tokens: the budget, 0 or more; None: there is none.
            start_ids: the tokens that begin reasoning, at least one.
            end_ids: the tokens that end it, at least one.
            num_prompt_tokens: tokens of the prompt, which do not use up the budget.
            begun: whether the prompt ends within reasoning.
            message_ids: the tokens of the message.
            decode: returns the text of tokens, in which U+FFFD stands for an incomplete character.
        """
        self._num_tokens = num_tokens
        self._start_ids = [*start_ids]
        self._end_ids = [*end_ids]
        self._message_ids = [*message_ids]
        self._decode = decode
        self._num_read = num_prompt_tokens
        # Index of the first token of the current reasoning, after its mark.
        self._thought_start = num_prompt_tokens if begun else None
        self._used_up: int | None = None    # the tokens of the reasoning when that used up its budget
        self._forced: list[int] = []        # what is left to write
        self._is_ended = False              # by `end`, which the tokens read so far did not know

    def end(self) -> None:
        """End the current reasoning, and all that may follow, at the next token."""
        self._is_ended = True

    def __call__(self, token_ids: Sequence[int], logits: LogitsArray) -> None:
        """Leave only the next token of the message and the end if the budget is used up."""
        self._check(token_ids)
        while self._num_read < len(token_ids):
            self._read(token_ids)
            self._check(token_ids)
        if self._is_ended and self._num_tokens != 0:
            self._num_tokens = 0
            self._check(token_ids)
            self._skip_written(token_ids)
        if self._forced:
            logits[:] = float("-inf")
            logits[self._forced[0]] = 0.0

    def _read(self, token_ids: Sequence[int]) -> None:
        """Read the next token."""
        token_id = token_ids[self._num_read]
        self._num_read += 1
        if self._thought_start is None:
            if self._is_read(self._start_ids, token_ids):
                self._thought_start, self._used_up = self._num_read, None
            return
        # A decoding loop may append a token that was not sampled.
        self._forced = self._forced[1:] if self._forced[:1] == [token_id] else []
        if self._is_read(self._end_ids, token_ids):
            self._thought_start, self._forced = None, []

    def _is_read(self, mark: list[int], token_ids: Sequence[int]) -> bool:
        """Whether the tokens read so far end with a mark."""
        return token_ids[self._num_read - 1] == mark[-1] and (
            len(mark) == 1 or [*token_ids[self._num_read - len(mark) : self._num_read]] == mark
        )

    def _skip_written(self, token_ids: Sequence[int]) -> None:
        """Leave out what another engine has written of the message already."""
        if self._thought_start is None:
            return
        thought = token_ids[self._thought_start : self._num_read]
        for count in range(min(len(thought), len(self._forced) - 1), 0, -1):
            if [*thought[-count:]] == self._forced[:count]:
                self._forced = self._forced[count:]
                return

    def _check(self, token_ids: Sequence[int]) -> None:
        """Begin the message if the tokens read so far use up the budget."""
        if self._forced or self._thought_start is None or self._num_tokens is None:
            return
        num_thought = self._num_read - self._thought_start
        if num_thought < self._num_tokens:
            return
        self._used_up = num_thought if self._used_up is None else self._used_up
        if num_thought - self._used_up < _MOST_TOKENS_OF_CHARACTER - 1:
            first = max(self._thought_start, self._num_read - _MOST_TOKENS_OF_CHARACTER)
            if self._decode(token_ids[first : self._num_read]).endswith("\ufffd"):
                return
        self._forced = [*(self._message_ids if num_thought else ()), *self._end_ids]
