"""Logprob formats: tokens and their log-probabilities, as each dialect writes them.

The text of a token is the text that it adds to the preceding tokens: a token that ends within a character
leaves that character to the next token, and one that ends the text adds nothing. Among the most likely
tokens, a token without text, or with the text of another, is named `token_id:` and its id, as in vLLM.
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

ID_PREFIX = "token_id:"      # and the id


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredToken:
    """One token with its log-probability."""

    text: str
    name: str                                   # its text, or `token_id:` and its id
    logprob: float | None                       # natural log; None: the first token, or unknown
    top: tuple[tuple[str, float], ...]          # the most likely tokens by name, the best first

    def as_dict(self) -> dict[str, Any]:
        """Return the token as OpenAI's chats and Ollama write it."""
        return _entry(self.name, self.logprob) | {"top_logprobs": [_entry(*one) for one in self.top]}


def _entry(name: str, logprob: float | None) -> dict[str, Any]:
    spelled = None if name.startswith(ID_PREFIX) else list(name.encode())
    return {"token": name, "logprob": logprob, "bytes": spelled}


class TokenScores:
    """Names and texts of the tokens of one text, which are read in order."""

    def __init__(self, detokenizer: Detokenizer, *, by_id: bool = False) -> None:
        """Begin a text; with `by_id`, all tokens are named by their ids."""
        self._detokenizer = detokenizer
        self._by_id = by_id

    def answer(self, part: Delta | Completion) -> list[ScoredToken]:
        """Return the tokens of the next delta of an answer, or of a whole answer."""
        tops = part.top_logprobs or ((),) * len(part.token_ids)
        scores = list(zip(part.logprobs, tops, strict=True))
        return self.read(part.token_ids, scores, final=part.finish_reason is not None)

    def read(
        self, token_ids: Sequence[int], scores: Sequence[tuple[float | None, TopTokens]], *, final: bool
    ) -> list[ScoredToken]:
        """Return the next tokens; `final`: they end the text."""
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
                names = {other: f"{ID_PREFIX}{other}" for other in (token_id, *texts)}
            else:
                names = _names(texts, own_id=token_id, own_text=text)
            # JSON has no NaN, which a decoding loop that chooses tokens itself leaves.
            known = logprob is not None and not math.isnan(logprob)
            yield ScoredToken(
                text=text,
                name=names[token_id],
                logprob=logprob if known else None,
                top=tuple((names[other], logprob) for other, logprob in top),
            )


def _names(texts: dict[int, str], *, own_id: int, own_text: str) -> dict[int, str]:
    """Return a unique name for each id."""
    names = {own_id: own_text}
    for token_id, text in texts.items():
        if token_id != own_id:
            names[token_id] = text if text and text not in names.values() else f"{ID_PREFIX}{token_id}"
    return names


class CompletionLogprobs:
    """The `logprobs` of one choice of `/v1/completions`, after those of its prompt if that is echoed."""

    def __init__(
        self, prompt: Detokenizer, prompt_ids: Sequence[int], *, answer: Detokenizer, by_id: bool = False
    ) -> None:
        """Begin.

        Args:
            prompt: a fresh detokenizer for it.
            prompt_ids: the tokens of an echoed prompt, else none.
            answer: a fresh detokenizer for it.
            by_id: whether to name tokens by their ids.
        """
        self._prompt_ids = prompt_ids
        self._prompt_scores = TokenScores(prompt, by_id=by_id)
        self._answer_scores = TokenScores(answer, by_id=by_id)
        self._offset = 0

    def part(self, part: Delta | Completion) -> dict[str, Any]:
        """Return the log-probabilities of the next delta, or of a whole completion."""
        tokens = [*self._prompt(part), *self._answer_scores.answer(part)]
        *offsets, self._offset = accumulate((len(token.text) for token in tokens), initial=self._offset)
        return {
            "tokens": [token.name for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [_top_logprobs(token) for token in tokens],
            "text_offset": offsets,
        }

    def _prompt(self, part: Delta | Completion) -> list[ScoredToken]:
        """Return the tokens of the prompt, on the first call."""
        if not self._prompt_ids:
            return []
        scores = [(score.logprob, score.top) for score in part.prompt_logprobs]
        prompt_ids, self._prompt_ids = self._prompt_ids, ()
        return self._prompt_scores.read(prompt_ids, [(None, ()), *scores], final=True)


def _top_logprobs(token: ScoredToken) -> dict[str, float] | None:
    """Return the log-probabilities of the most likely tokens and of the token itself, by name."""
    if token.logprob is None:
        return None
    return {name: logprob for name, logprob in token.top if name != token.name} | {token.name: token.logprob}


def prompt_logprobs(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], scores: Sequence[TokenLogprob]
) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: for each token but the first, which is None, an object by token id.

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
        logprobs = {token_id: score.logprob, **dict(score.top)}
        entries.append(
            {
                # The rank of a token that is not among the most likely is unknown.
                str(i): {"logprob": logprob, "rank": ranks.get(i), "decoded_token": text.peek(i)}
                for i, logprob in logprobs.items()
            }
        )
    return entries


class TopTokenReader:
    """The most likely tokens of one answer, whose deltas are read in order, in TGI's format."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._special = tokenizer.eos_token_ids
        self._text = tokenizer.detokenizer()

    def read(self, delta: Delta) -> list[list[dict[str, Any]]]:
        """Return the most likely tokens at the position of each token of a delta, the best first."""
        top_tokens = []
        for token_id, top in zip(delta.token_ids, delta.top_logprobs, strict=True):
            top_tokens.append(
                [
                    {"id": i, "text": self._text.peek(i), "logprob": logprob, "special": i in self._special}
                    for i, logprob in top
                ]
            )
            self._text.push(token_id)
        return top_tokens


def tgi_prefill(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], scores: Sequence[TokenLogprob]
) -> list[dict[str, Any]]:
    """Return TGI's `prefill`, the tokens of a prompt; `scores` are those of all tokens but the first."""
    text = tokenizer.detokenizer()
    logprobs = [None, *(score.logprob for score in scores)]
    return [
        {"id": token_id, "text": text.push(token_id), "logprob": logprob}
        for token_id, logprob in zip(prompt_ids, logprobs, strict=True)
    ]
