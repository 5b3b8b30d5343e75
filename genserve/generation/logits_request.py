"""Logits request: token ids, and who wants the logits after the last of them, once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from genserve.errors import ContextLengthExceeded, GenserveError, InvalidRequest
from genserve.generation.logits_model import LogitsArray, TokenArray

__all__ = ["LogitsRequest"]


class LogitsRequest:
    """One row of a plain call of the logits model, which knows nothing of slots and steps.

    A loop that asks again with one token more is not slower for it: what was computed stays in the
    slot, and the next request that begins with it goes on there. Belongs to the engine's thread.

    Attributes:
        token_ids: all of them, every time; read only.
        num_computed: how many of them are in the KV cache; written by the engine and its slots.
        num_prefilled: how many of these, from the first, were computed as a prompt; written likewise.
        submitted_s: when it was handed to the engine, by its clock.
        priority: that of token sequences which say none.
        pause_s: how long its caller took to come back with one token more; infinite: it is the first.
    """

    num_slots: ClassVar[int] = 1
    priority: ClassVar[int] = 0

    __slots__ = ("_on_logits", "num_computed", "num_prefilled", "pause_s", "submitted_s", "token_ids")

    def __init__(
        self,
        token_ids: Sequence[int] | TokenArray,
        *,
        on_logits: Callable[[LogitsArray | GenserveError], None],
        vocab_size: int,
        max_length: int,
    ) -> None:
        """Check the ids.

        Args:
            token_ids: [n] integers.
            on_logits: called once, on the engine's thread, with the logits after the last token or with
                what went wrong; must not block. The logits are [vocab_size] float32, where the model
                runs, whatever it gave, NaN included, and the receiver's own.
            vocab_size: of the model.
            max_length: of the model's slots.

        Raises:
            InvalidRequest: there are none, they are no list of integers, or one is outside the vocabulary.
            ContextLengthExceeded: there are more than `max_length`.
        """
        ids = np.asarray(token_ids)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise InvalidRequest(f"token ids must be a list of integers, not {ids.dtype} {list(ids.shape)}")
        if ids.size == 0:
            raise InvalidRequest("there are no token ids", remedy="give at least one")
        if ids.size > max_length:
            raise ContextLengthExceeded(
                f"{ids.size} token ids are given; the model's context is {max_length}",
                remedy="give fewer, or raise max_sequence_length in the logits stage's config.pbtxt",
            )
        if ids.min() < 0 or ids.max() >= vocab_size:
            wrong = next(i for i in ids.tolist() if not 0 <= i < vocab_size)
            raise InvalidRequest(f"token id {wrong} is outside the vocabulary of {vocab_size}")
        self.token_ids: list[int] = ids.tolist()
        self.num_computed = 0
        self.num_prefilled = 0
        self.submitted_s = math.inf
        self.pause_s = math.inf
        self._on_logits = on_logits

    @property
    def cache_salt(self) -> str | None:
        """None: it may share what it computes with all that have no salt."""
        return None

    @property
    def num_pending(self) -> int:
        """How many tokens are not in the KV cache yet."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_prompt_tokens(self) -> int:
        """How many tokens there are."""
        return len(self.token_ids)

    @property
    def num_to_prefill(self) -> int:
        """How many tokens are not in the KV cache yet."""
        return self.num_pending

    @property
    def in_prompt(self) -> bool:
        """Whether more is to be computed than a decode step does."""
        return self.num_pending > 1

    def preempt(self) -> None:
        """Begin anew: its slot is somebody else's."""
        self.num_computed = self.num_prefilled = 0

    def answer(self, content: LogitsArray | GenserveError) -> None:
        """Hand over the logits or the error; for the engine's thread."""
        self._on_logits(content)
