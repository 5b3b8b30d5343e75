"""Logprob formats: tokens and their log-probabilities, as each dialect writes them.

The text of a token is what it adds to the text before it: a token that ends in the middle of a character
leaves that to the next one, and one that ends the text adds nothing. Of the most likely tokens, one whose
text another has too, or none, is called `token_id:` and its id, as vLLM does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from genserve.completion import Completion, Delta, TokenLogprob, TopTokens
from genserve.text.detokenizer import Detokenizer
from genserve.text.tokenizer import Tokenizer

__all__ = [
    "NAMELESS",
    "CompletionLogprobs",
    "LikelyTokens",
    "ScoredToken",
    "TokenScores",
    "prefill",
    "prompt_logprobs",
]


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


class CompletionLogprobs:
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


def prompt_logprobs(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], scores: Sequence[TokenLogprob]
) -> list[dict[str, Any] | None]:
    """Return an object for each token of a prompt, by token id; None for the first, as nothing is before it.

    Args:
        tokenizer: of the model.
        prompt_ids: at least one.
        scores: of all of them but the first.
    """
    text = tokenizer.detokenizer()
    entries: list[dict[str, Any] | None] = [None]
    for before, token_id, score in zip(prompt_ids, prompt_ids[1:], scores, strict=False):
        text.push(before)
        ranks = {other: rank for rank, (other, _) in enumerate(score.top, start=1)}
        levels = {token_id: score.logprob, **dict(score.top)}
        entries.append(
            {
                # The rank of a token that is not among the most likely is not known.
                str(i): {"logprob": level, "rank": ranks.get(i), "decoded_token": text.peek(i)}
                for i, level in levels.items()
            }
        )
    return entries


class LikelyTokens:
    """Reads the deltas of one answer, in their order."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._special = tokenizer.eos_token_ids
        self._text = tokenizer.detokenizer()

    def read(self, delta: Delta) -> list[list[dict[str, Any]]]:
        """Return the likeliest tokens in the place of each token of a delta, the best first."""
        likely = []
        for token_id, top in zip(delta.token_ids, delta.top_logprobs, strict=True):
            likely.append(
                [
                    {"id": i, "text": self._text.peek(i), "logprob": level, "special": i in self._special}
                    for i, level in top
                ]
            )
            self._text.push(token_id)
        return likely


def prefill(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], scores: Sequence[TokenLogprob]
) -> list[dict[str, Any]]:
    """Return the tokens of a prompt; `scores` are of all but the first, since nothing is before that."""
    text = tokenizer.detokenizer()
    levels = [None, *(score.logprob for score in scores)]
    return [
        {"id": token_id, "text": text.push(token_id), "logprob": level}
        for token_id, level in zip(prompt_ids, levels, strict=True)
    ]
