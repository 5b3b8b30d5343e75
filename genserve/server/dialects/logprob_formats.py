"""Logprob formats: tokens and their log-probabilities, as each dialect writes them.

The text of a token is the text that it adds to the preceding tokens: a token that ends within a character
leaves that character to the next token, and one that ends the text adds nothing. Its bytes are its own, so
that those of an answer's tokens make the text. Among the most likely tokens, a token without text, or with
the text of another, is named `token_id:` and its id, as in vLLM.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from genserve.completion import Completion, Delta, FinishReason, TokenLogprob, TopTokens
from genserve.server.dialects.generation_handler import SubmittedRequest
from genserve.text.detokenizer import Detokenizer
from genserve.text.message_parser import MessageParser, read_delta
from genserve.text.tokenizer import Tokenizer

ID_PREFIX = "token_id:"  # and the id
# What OpenAI writes for a very unlikely token, for clients that require a number; JSON has no infinity.
UNKNOWN_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedToken:
    """One token that is possible at a place, with its log-probability."""

    name: str  # its text, or `token_id:` and its id
    spelled: bytes  # its bytes, maybe those of a part of a character; empty: it adds none
    logprob: float | None  # natural log; None: the first token, or unknown

    def as_dict(self, *, unknown: float | None = None) -> dict[str, Any]:
        """Return the token as OpenAI's chats and Ollama write it; `unknown` stands for a logprob of None."""
        logprob = unknown if self.logprob is None else self.logprob
        return {"token": self.name, "logprob": logprob, "bytes": [*self.spelled] or None}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredToken:
    """One token of a text with its log-probability."""

    text: str
    own: NamedToken
    top: tuple[NamedToken, ...]  # the most likely tokens in its place, the best first

    def as_dict(self, *, unknown: float | None = None) -> dict[str, Any]:
        """Return the token as OpenAI's chats and Ollama write it, see `NamedToken.as_dict`."""
        top = [token.as_dict(unknown=unknown) for token in self.top]
        return self.own.as_dict(unknown=unknown) | {"top_logprobs": top}


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
            spelled = {other: self._detokenizer.spell(other, peeked=text) for other, text in texts.items()}
            spelled.setdefault(token_id, self._detokenizer.spell(token_id))
            text = self._detokenizer.push(token_id)
            if final and index == len(token_ids) - 1:
                text += self._detokenizer.flush()
            if self._by_id:
                names = {other: f"{ID_PREFIX}{other}" for other in (token_id, *texts)}
            else:
                names = _names(texts, own_id=token_id, own_text=text)
            # JSON has no NaN, which a decoding loop that chooses tokens itself leaves.
            known = logprob is not None and not math.isnan(logprob)
            scored = {**dict(top), token_id: logprob if known else None}
            named = {
                other: NamedToken(name=names[other], spelled=spelled[other], logprob=score)
                for other, score in scored.items()
            }
            yield ScoredToken(text=text, own=named[token_id], top=tuple(named[other] for other, _ in top))


def _names(texts: dict[int, str], *, own_id: int, own_text: str) -> dict[int, str]:
    """Return a unique name for each id."""
    names = {own_id: own_text}
    for token_id, text in texts.items():
        if token_id != own_id:
            names[token_id] = text if text and text not in names.values() else f"{ID_PREFIX}{token_id}"
    return names


class ContentScores:
    """The tokens of a message's content: not those of reasoning, calls and stops, nor the one that ends it.

    A token belongs to the content if a part of its text does, or if it begins a character of the content.
    """

    def __init__(self, scores: TokenScores, parser: MessageParser | None) -> None:
        """Read an answer.

        Args:
            scores: the scores of all its tokens.
            parser: a fresh one of the answer; None: all of its text is content.
        """
        self._scores = scores
        self._parser = parser
        self._ahead: deque[tuple[ScoredToken, int]] = deque()  # and the characters of theirs to come
        self._behind: list[tuple[ScoredToken, str]] = []  # text since the content, by its tokens
        self._returned: ScoredToken | None = None  # the last one; the rest of its text may be content, too

    def answer(self, part: Delta | Completion) -> list[ScoredToken]:
        """Return the tokens of the content in the next delta of an answer, or in a whole answer."""
        self._ahead += ((token, len(token.text)) for token in self._scores.answer(part))
        text, found = part.text, []
        while self._ahead and text:
            token, num_chars = self._ahead.popleft()
            piece, text = text[:num_chars], text[num_chars:]
            self._behind.append((token, piece))
            found += self._content(self._read(piece))
            if len(piece) < num_chars:  # the rest is held back, or it is a stop
                self._ahead.appendleft((token, num_chars - len(piece)))
        if part.finish_reason is not None:
            found += self._content(self._read("", finish_reason=part.finish_reason))
        return found

    def _read(self, piece: str, *, finish_reason: FinishReason | None = None) -> str:
        read = Delta(text=piece, token_ids=(), finish_reason=finish_reason)
        return read_delta(self._parser, read).content

    def _content(self, content: str) -> list[ScoredToken]:
        """Return the tokens of some content, the last of the text behind but for what the parser holds."""
        if not content:
            return []
        text = "".join(piece for _, piece in self._behind)
        num_held = 0 if self._parser is None else self._parser.num_held
        start = max(text.rfind(content, 0, len(text) - num_held), 0)
        end = start + len(content)
        found: list[ScoredToken] = []
        rest: list[tuple[ScoredToken, str]] = []
        at = 0
        for token, piece in self._behind:
            first, at = at, at + len(piece)
            within = first < end and (at > start or first == start)
            if within and token.own.spelled and token is not self._returned:
                found.append(token)
                self._returned = token
            if at > end or first >= end:
                rest.append((token, piece[max(0, end - first) :]))
        self._behind = rest
        return found


def content_scores(
    submitted: SubmittedRequest, parser: MessageParser | None, *, by_id: bool = False
) -> ContentScores | TokenScores:
    """Return a reader of the log-probabilities of a message; see `TokenScores` and `ContentScores`."""
    scores = TokenScores(submitted.detokenizer(), by_id=by_id)
    # An output parser rewrites the text of the tokens, so that no token can be told to be content.
    return scores if submitted.params.output_parser else ContentScores(scores, parser)


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
            "tokens": [token.own.name for token in tokens],
            "token_logprobs": [token.own.logprob for token in tokens],
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


def _top_logprobs(token: ScoredToken) -> dict[str, float | None] | None:
    """Return the log-probabilities of the most likely tokens and of the token itself, by name."""
    own = token.own
    if own.logprob is None:
        return None
    return {other.name: other.logprob for other in token.top if other is not own} | {own.name: own.logprob}


def prompt_logprobs(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], scores: Sequence[TokenLogprob]
) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: for each token but the first, which is None, an object by token id.

    Args:
        tokenizer: the model's tokenizer.
        prompt_ids: at least one.
        scores: the scores of all tokens but the first.
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

    def __init__(self, detokenizer: Detokenizer, *, special_ids: Collection[int]) -> None:
        self._special = special_ids
        self._text = detokenizer

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
