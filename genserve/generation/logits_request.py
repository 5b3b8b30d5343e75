"""Logits request: token ids, and who wants the logits after the last of them, once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from genserve.errors import ContextLengthExceeded, GenserveError, InvalidRequest
from genserve.generation.logits_model import LogitsArray, TokenArray
from genserve.generation.request import LogitsTaker, Request

__all__ = ["LogitsRequest"]


class LogitsRequest(Request):
    """One row of a plain call of the logits model, which knows nothing of blocks and steps; a `Request`.

    A loop that asks again with one token more is not slower for it: what was computed stays cached, and the
    next request that begins with it goes on there. Belongs to the engine's thread.

    Attributes:
        submitted_s: when it was handed to the engine, by its clock.
        pause_s: how long its caller took to come back with one token more; infinite: it is the first.
    """

    __slots__ = ("_on_logits", "pause_s", "submitted_s")

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
            max_length: of a sequence.

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
        super().__init__(ids.tolist())
        self.submitted_s = math.inf
        self.pause_s = math.inf
        self._on_logits = on_logits

    @property
    def always_shares(self) -> bool:
        """See `Request`: a loop would compute all its tokens anew for each."""
        return True

    def take_logits(self, taker: LogitsTaker, row: int) -> None:
        """See `Request`: it is answered."""
        taker.answer(self, row)

    def answer(self, content: LogitsArray | GenserveError) -> None:
        """Hand over the logits or the error; for the engine's thread."""
        self._on_logits(content)
