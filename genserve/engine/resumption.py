"""Resumption: an answer goes on after tokens that another engine generated and its caller has received.

The draws of a sequence depend on its seed and on positions only, so the rest of the answer is the one
that the other engine would have generated. There are two ways to come to the state after the received tokens:

- *replay*: they are appended without logits, which moves text, stop conditions and grammar, and are then
  computed as the tokens of a prompt are, after a preemption;
- *repetition*: they are generated again, from the prompt on. It takes as long as the first time, and serves
  answers whose state depends on more than their tokens: on logits, or on code of the repository.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from genserve.completion import FinishReason, StopReason
from genserve.engine.token_sequence import TokenSequence
from genserve.errors import NotResumable
from genserve.sampling.sampling_params import SamplingParams


class ResumedSequence(TokenSequence):
    """A token sequence whose caller has received the first tokens of the answer."""

    __slots__ = ()

    is_resumed = True

    def resume(self, token_ids: Sequence[int]) -> None:
        """Begin after the received tokens of the answer, at least one; called once, before the first step.

        No part of the answer up to there is delivered, the log-probabilities of the prompt included.

        Raises:
            NotResumable: the tokens are not the beginning of an answer that continues.
        """
        raise NotImplementedError


class ReplayedSequence(ResumedSequence):
    """A resumed sequence that appends the received tokens before it is submitted."""

    __slots__ = ()

    def resume(self, token_ids: Sequence[int]) -> None:
        """See `ResumedSequence`."""
        self._num_scored = self._num_to_score
        grammar = self.sampling.grammar
        mask = np.empty(-(-self._vocab_size // 32), dtype=np.int32)
        for token_id in token_ids:
            if self.finish_reason is not None:
                break
            if grammar is not None:
                grammar.fill(mask)  # each sampled token does that too: a closing grammar looks ahead there
            self.append(token_id)
        if self.finish_reason is not None:
            raise _diverged("the tokens received so far end it")
        self._delta.skip_to(len(self.token_ids))


class RepeatedSequence(ResumedSequence):
    """A resumed sequence that generates the received tokens again, and compares them."""

    __slots__ = ("_received",)

    def __init__(self, prompt_token_ids: Sequence[int], **options: Any) -> None:
        super().__init__(prompt_token_ids, **options)
        self._received: tuple[int, ...] = ()

    def resume(self, token_ids: Sequence[int]) -> None:
        """See `ResumedSequence`; `append` and `finish` raise NotResumable if the answer becomes another."""
        self._num_scored = self._num_to_score
        self._received = tuple(token_ids)

    def append(self, token_id: int) -> None:
        """See `TokenSequence`."""
        super().append(token_id)
        num_tokens = self.num_new_tokens
        if num_tokens > len(self._received):
            return
        if self.token_ids[-1] != self._received[num_tokens - 1]:
            raise _diverged(f"generated again, its token {num_tokens} is another")
        if self.finish_reason is not None:
            raise _diverged(f"generated again, it ends at its token {num_tokens}")
        self._delta.skip_to(len(self.token_ids))

    def finish(self, reason: FinishReason, *, stop_reason: StopReason | None = None) -> None:
        """See `TokenSequence`."""
        super().finish(reason, stop_reason=stop_reason)
        if self.num_new_tokens < len(self._received):
            raise _diverged(f"generated again, it ends at its token {self.num_new_tokens}")


def _diverged(reason: str) -> NotResumable:
    return NotResumable(
        f"the replica of the model was lost, and the answer cannot be continued: {reason}",
        remedy="send the request again",
    )


def resumed_kind(params: SamplingParams, *, is_default_loop: bool) -> type[ResumedSequence]:
    """Return how an answer is resumed: replayed if its state follows from its tokens alone, else repeated.

    The state depends on logits in a beam search, with mirostat, which adapts to the probability of each
    token, and wherever a logits processor or a decoding loop of the repository sees them.

    Args:
        params: decide whether logits are part of the state.
        is_default_loop: whether the decoder stage has no decoding loop of its own.
    """
    depends_on_logits = params.use_beam_search or params.mirostat_mode or params.logits_processors
    return ReplayedSequence if is_default_loop and not depends_on_logits else RepeatedSequence
