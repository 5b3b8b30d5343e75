"""Scored tokens: the tokens of one text as they come, with their own texts and log-probabilities.

The text of a token is what it adds to the text before it: a token that ends in the middle of a character
leaves that to the next one, and one that ends the text adds nothing. Of the most likely tokens, one whose
text another has too, or none, is called `token_id:` and its id, as vLLM does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from genserve.request import Completion, Delta, TopTokens
from genserve.text.detokenizer import Detokenizer

__all__ = ["NAMELESS", "ScoredToken", "TokenScores"]

NAMELESS = "token_id:"      # and the id


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredToken:
    """One token."""

    text: str
    name: str                                   # its text, or `token_id:` and its id
    logprob: float | None                       # natural log; None: nothing came before it, or nobody knows
    top: tuple[tuple[str, float], ...]          # the others asked for by name, the best first


class TokenScores:
    """Reads the tokens of one text, in their order."""

    def __init__(self, detokenizer: Detokenizer, *, by_id: bool = False) -> None:
        """Begin a text; `by_id`: all tokens are called by their ids."""
        self._detokenizer = detokenizer
        self._by_id = by_id

    def answer(self, part: Delta | Completion) -> list[ScoredToken]:
        """Return the tokens of a part of an answer, or of the whole."""
        tops = part.top_logprobs or ((),) * len(part.token_ids)
        scores = list(zip(part.logprobs, tops, strict=True))
        return self.read(part.token_ids, scores, final=part.finish_reason is not None)

    def read(
        self, token_ids: Sequence[int], scores: Sequence[tuple[float | None, TopTokens]], *, final: bool
    ) -> list[ScoredToken]:
        """Return the next tokens, the very last among them if they are final."""
        return list(self._read(token_ids, scores, final=final))

    def _read(
        self, token_ids: Sequence[int], scores: Sequence[tuple[float | None, TopTokens]], *, final: bool
    ) -> Iterator[ScoredToken]:
        for index, (token_id, (logprob, top)) in enumerate(zip(token_ids, scores, strict=True)):
            texts = {other: self._detokenizer.peek(other) for other, _ in top}
            text = self._detokenizer.push(token_id)
            if final and index == len(token_ids) - 1:
                text += self._detokenizer.flush()
            if self._by_id:
                names = {other: f"{NAMELESS}{other}" for other in (token_id, *texts)}
            else:
                names = _names(texts, own_id=token_id, own_text=text)
            # JSON has no NaN: a decoding loop that picks for itself leaves no probability.
            known = logprob is not None and not math.isnan(logprob)
            yield ScoredToken(
                text=text,
                name=names[token_id],
                logprob=logprob if known else None,
                top=tuple((names[other], level) for other, level in top),
            )


def _names(texts: dict[int, str], *, own_id: int, own_text: str) -> dict[int, str]:
    """Return a name of its own for each id."""
    names = {own_id: own_text}
    for token_id, text in texts.items():
        if token_id != own_id:
            names[token_id] = text if text and text not in names.values() else f"{NAMELESS}{token_id}"
    return names
