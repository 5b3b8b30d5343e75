"""Receipt: what one answer depended on, with a digest of the logits that it was sampled from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from genserve.completion import FinishReason, StopReason
from genserve.sampling.logits_array import LogitsArray, on_host

FORMAT = 1      # of receipts


class Receipt:
    """The receipt of one answer as it grows. Belongs to the engine's thread.

    Attributes:
        is_repeatable: False: the receipt says that the answer cannot be replayed, since a call has ended its
            reasoning while it ran.
    """

    __slots__ = ("_begun", "_facts", "_logits", "is_repeatable")

    def __init__(self, facts: Mapping[str, Any]) -> None:
        """Begin the receipt of an answer; `facts` are known before its first token.

        Takes time in proportion to the prompt, of which the engine's thread has none.
        """
        self.is_repeatable = True
        self._facts = {"receipt": FORMAT, **facts}
        self._begun = hashlib.sha256(_text(self._facts)[:-1])
        self._logits = hashlib.sha256()

    def add(self, logits: LogitsArray) -> None:
        """Add the row of logits by which the answer goes on: [V] float32, as the model returned it."""
        self._logits.update(np.ascontiguousarray(on_host(logits), dtype="<f4").data)

    def written(
        self,
        token_ids: Sequence[int],
        *,
        finish_reason: FinishReason,
        stop_reason: StopReason | None,
        is_whole: bool,
        adapter: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Return the receipt of the answer that has ended, as JSON values.

        Args:
            token_ids: the tokens of the answer.
            finish_reason: why it ended.
            stop_reason: the stop string, token id or limit that ended it; None: there is none.
            is_whole: whether all rows of logits were added; False: another engine began the answer.
            adapter: the name and the digest of the adapter that has answered; None: the model itself.
        """
        outcome = {
            **({} if adapter is None else {"adapter": adapter}),
            "token_ids": [*token_ids],
            "finish_reason": str(finish_reason),
            "stop_reason": stop_reason,
            "is_repeatable": self.is_repeatable,
            "logits_sha256": self._logits.hexdigest() if is_whole else None,
        }
        whole = self._begun.copy()
        whole.update(b"," + _text(outcome)[1:])
        return {**self._facts, **outcome, "sha256": whole.hexdigest()}


def receipt_sha256(receipt: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a receipt without its field `sha256`.

    It is that of compact JSON text in the order of the fields, with whole numbers in place of floats such as
    1.0, which some programs that pass JSON on write as 1.
    """
    fields = {name: value for name, value in receipt.items() if name != "sha256"}
    return hashlib.sha256(_text(fields)).hexdigest()


def _text(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(_plain(fields), separators=(",", ":")).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
