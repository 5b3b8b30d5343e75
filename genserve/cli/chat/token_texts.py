"""Token texts: what each token adds to a text."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from genserve.cli.model_access import TextGenerator

_NUM_THREADS = 16   # a model on a server is asked for each text


class TokenTexts:
    """The texts of the tokens of one model."""

    def __init__(self, model: TextGenerator) -> None:
        self._decode = cache(model.detokenize)

    def after(self, previous: int | None, token_id: int) -> str:
        """Return what a token adds after another one; None: at the beginning of a text.

        A token that is a part of a character adds U+FFFD.
        """
        if previous is None:
            return self._decode((token_id,))
        before, both = self._decode((previous,)), self._decode((previous, token_id))
        return both[len(before) :] if both.startswith(before) else self._decode((token_id,))

    def all_after(self, pairs: Sequence[tuple[int | None, int]]) -> list[str]:
        """Return the results of `after`."""
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            return list(threads.map(lambda pair: self.after(*pair), pairs))

    def of(self, token_ids: Sequence[int]) -> list[str]:
        """Return the texts of the tokens of one text."""
        return self.all_after(list(zip([None, *token_ids], token_ids, strict=False)))
