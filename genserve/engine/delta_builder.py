"""Delta builder: collects the new tokens and text of an answer until its next delta is due."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from genserve.completion import Delta, FinishReason, StopReason, TokenLogprob, TopTokens, Usage
from genserve.sampling.logits_array import LogitsArray
from genserve.sampling.sampler import token_logprob
from genserve.sampling.sampling_params import SamplingParams


class AnswerText(Protocol):
    """The text of an answer as it grows: whole characters, never past the stop that ends it."""

    @property
    def stop(self) -> str | None:
        """The stop string that has ended the text; None while it continues."""

    def push(self, token_id: int) -> str:
        """Add a token; return the text that can be shown now."""

    def flush(self) -> str:
        """Return the text that was held back; called once, after the last token."""


class DeltaBuilder:
    """Text and log-probabilities of one answer since its last delta. Belongs to the engine's thread.

    Attributes:
        text: the text since the last delta.
        sampled: the token that was sampled to be appended next, and its log-probability if the request asks
            for it.
    """

    __slots__ = (
        "_interval",
        "_logprobs",
        "_num_delivered",
        "_num_prompt_tokens",
        "_prompt_logprobs",
        "_top_logprobs",
        "_top_prompt_logprobs",
        "_wants_top",
        "sampled",
        "text",
    )

    def __init__(self, params: SamplingParams, *, num_prompt_tokens: int) -> None:
        """Start after the prompt."""
        self.text = ""
        self.sampled: tuple[int, TokenLogprob] | None = None
        self._prompt_logprobs: list[TokenLogprob] = []
        self._logprobs: list[float] = []
        self._top_logprobs: list[TopTokens] = []
        self._wants_top = bool(params.top_logprobs or params.logprob_token_ids)
        self._top_prompt_logprobs = params.prompt_logprobs or 0
        self._interval = params.stream_interval
        self._num_prompt_tokens = num_prompt_tokens
        self._num_delivered = num_prompt_tokens

    def add_logprob(self, token_id: int) -> None:
        """Add the log-probability of the token that was appended.

        A token that the loop appended instead of the sampled one has the log-probability that the likeliest
        tokens list for it, or NaN.
        """
        sampled, self.sampled = self.sampled, None
        logprob = math.nan
        top: TopTokens = ()
        if sampled is not None:
            sampled_id, scored = sampled
            top = scored.top
            logprob = scored.logprob if sampled_id == token_id else dict(top).get(token_id, math.nan)
        self._logprobs.append(logprob)
        if self._wants_top:
            self._top_logprobs.append(top)

    def add_prompt_logprob(self, logits: LogitsArray, token_id: int) -> None:
        """Add the log-probability of a token of the prompt by the logits before it: [V] float32."""
        self._prompt_logprobs.append(token_logprob(logits, token_id, num_top=self._top_prompt_logprobs))

    def skip_to(self, num_tokens: int) -> None:
        """Begin the next delta after this number of tokens of prompt and answer, which were delivered."""
        self.text = ""
        self._logprobs.clear()
        self._top_logprobs.clear()
        self._prompt_logprobs.clear()
        self._num_delivered = num_tokens

    def pop(
        self,
        token_ids: Sequence[int],
        *,
        num_cached_tokens: int,
        finish_reason: FinishReason | None,
        stop_reason: StopReason | None,
        usage: Usage | None,
    ) -> Delta | None:
        """Return the delta since the last call; None if it has fewer tokens than `stream_interval`.

        Args:
            token_ids: the tokens of prompt and answer.
            num_cached_tokens: tokens of the prompt that were in the prefix cache.
            finish_reason: None while the answer continues.
            stop_reason: the stop that ended the answer.
            usage: the usage of the answer, which has ended.
        """
        num_new = len(token_ids) - self._num_delivered
        is_first = self._num_delivered == self._num_prompt_tokens
        if finish_reason is None and num_new < (1 if is_first else self._interval):
            return None
        delta = Delta(
            text=self.text,
            token_ids=tuple(token_ids[self._num_delivered :]),
            logprobs=tuple(self._logprobs),
            top_logprobs=tuple(self._top_logprobs),
            prompt_logprobs=tuple(self._prompt_logprobs),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            usage=usage,
            cached_tokens=num_cached_tokens if is_first else 0,
        )
        self.skip_to(len(token_ids))
        return delta
