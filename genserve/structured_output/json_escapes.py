r"""JSON escapes: allows the escapes in JSON strings that llguidance's grammars lack.

By RFC 8259 any character may be written as `\u00e9` or as a pair of surrogates, and a slash as `\/`. Models
write what they have read, so a mask that forbids an escape after its backslash changes the text. llguidance
knows all escapes but `\/` in strings without a `pattern`, and only the escapes of control characters in
strings with one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from genserve.sampling.grammar_bitmask import allow, is_allowed

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# A whole escape. A pair of surrogates is one escape, and a lone surrogate is none.
ESCAPE = re.compile(
    rb'\\(?:["\\/bfnrt]|u(?:(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    rb"|[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}))"
)
_BEGUN = re.compile(
    rb"\\(?:u(?:[0-9a-fA-F]{0,3}|[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?))?"
)
# The text that a token may add within a `\u` escape.
_PART = re.compile(rb"[0-9a-fA-F]*\\?u?[0-9a-fA-F]*")
_HIGH, _LOW, _BEHIND, _ASTRAL = 0xD800, 0xDC00, 0xE000, 0x10000   # surrogates, and what follows them


def unescaped(text: bytes) -> bytes:
    """Return the text of a JSON string, in UTF-8, with its escapes decoded; an invalid escape stays."""
    return ESCAPE.sub(lambda escape: _decoded(escape[0]).encode(), text) if b"\\" in text else text


def ends_within_escape(text: bytes) -> bool:
    """Whether a part of a JSON string ends within an escape."""
    return b"\\" in text and _start_of_begun(text) < len(text)


def _decoded(escape: bytes) -> str:
    return str(json.loads(b'"' + escape + b'"'))


def _plain(escape: re.Match[bytes]) -> bytes:
    r"""Return the spelling that all grammars of llguidance know: raw, or the shortest escape."""
    return _spelled(_decoded(escape[0]))


def _spelled(character: str) -> bytes:
    return json.dumps(character, ensure_ascii=False)[1:-1].encode()


def _start_of_begun(text: bytes) -> int:
    """Return where the incomplete escape at the end of a text begins; the text's length if there is none."""
    at = text.find(b"\\")
    while at >= 0:
        whole = ESCAPE.match(text, at)
        if whole is None and _BEGUN.fullmatch(text, at):
            return at
        at = text.find(b"\\", at + 1 if whole is None else whole.end())
    return len(text)


def _characters(begun: bytes) -> Iterator[tuple[int, int]]:
    r"""Yield ranges, ends excluded, of the characters whose escape begins with `begun`, at least `\u`."""
    first, last = begun[2:6].decode(), begun[8:].decode()
    low = int(first.ljust(4, "0"), 16)
    high = low + 16 ** (4 - len(first))
    if high - low == 1 and _HIGH <= low < _LOW:
        start = int(last.ljust(4, "0"), 16) - _LOW if len(last) > 1 else 0
        size = 16 ** (4 - len(last)) if len(last) > 1 else 1024
        base = _ASTRAL + (low - _HIGH) * 1024
        yield base + start, base + start + size
        return
    yield low, min(high, _HIGH)
    yield max(low, _BEHIND), high
    yield _ASTRAL + (max(low, _HIGH) - _HIGH) * 1024, _ASTRAL + (min(high, _LOW) - _HIGH) * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class EscapeTokens:
    """The tokens of a vocabulary that spell escapes."""

    tokenizer: LLTokenizer
    by_id: Sequence[bytes]              # the texts of all tokens
    watched: frozenset[int]             # the tokens that end within an escape, or contain an escaped slash
    backslash: int
    slash: int
    digit: int                          # 2
    code_parts: Sequence[int]           # the tokens that may follow the backslash of a `\u` escape
    parts: Sequence[int]                # the tokens that may continue a `\u` escape
    beginning_with_slash: NDArray[np.int32]     # [W], a mask of the tokens that begin with a slash
    slashes: NDArray[np.uint32]         # [2, S], ids of tokens with an escaped slash, and with a plain one

    @classmethod
    def of(cls, tokenizer: LLTokenizer, texts: Sequence[bytes]) -> Self | None:
        """Return the tokens of a vocabulary that spell escapes; None: it lacks one for a single character."""
        ids = {text: token_id for token_id, text in reversed([*enumerate(texts)])}
        if not ids.keys() >= {b"\\", b"/", b"2"}:
            return None
        begins = np.zeros(-(-len(texts) // 32), np.int32)
        slashes, watched = [], set()
        parts = [token_id for token_id, text in enumerate(texts) if text and _PART.fullmatch(text)]
        for token_id, text in enumerate(texts):
            if text.startswith(b"/"):
                allow(begins, token_id)
            if b"\\" in text:
                if rb"\/" in text and (plain := ids.get(ESCAPE.sub(_plain, text))) is not None:
                    slashes.append((token_id, plain))
                if rb"\/" in text or _start_of_begun(text) < len(text):
                    watched.add(token_id)
        return cls(
            tokenizer=tokenizer,
            by_id=texts,
            watched=frozenset(watched),
            backslash=ids[b"\\"],
            slash=ids[b"/"],
            digit=ids[b"2"],
            code_parts=[token_id for token_id in parts if texts[token_id].startswith(b"u")],
            parts=parts,
            beginning_with_slash=begins,
            slashes=np.array(slashes, np.uint32).reshape(-1, 2).T,
        )

    def consume(self, matcher: LLMatcher, text: bytes) -> bool:
        """Advance a matcher by a text, however it is tokenized; False: the text may not follow."""
        return not text or matcher.consume_tokens(self.tokenizer.tokenize_bytes(text))

    def may_follow(self, matcher: LLMatcher, text: bytes) -> bool:
        """Whether a text, which may end within a character, may follow in the string that a matcher is in."""
        token_ids = self.tokenizer.tokenize_bytes(text)
        return matcher.validate_tokens(token_ids) == len(token_ids)

    def some_may_follow(self, matcher: LLMatcher, start: int, stop: int) -> bool:
        """Whether one of the characters from `start` to before `stop` may follow.

        Characters whose first bytes may not follow are skipped together: an alphabet has few first bytes.
        """
        code = start
        while code < stop:
            text = _spelled(chr(code))
            num_skipped = 1
            for rest in range(len(text) - 1, -1, -1) if code > 127 else (0,):
                if not self.may_follow(matcher, text[: len(text) - rest]):
                    num_skipped = 64**rest      # each byte after the first has 6 bits
                    break
            else:
                return True
            code = (code // num_skipped + 1) * num_skipped
        return False


class Escapes:
    """The escape that an answer is writing, if the grammar may not know it.

    While an escape is being written there are two matchers: the answer's own, which has read the text as it
    is, and one before the escape, which reads the character itself if the first does not know the escape.
    """

    def __init__(self, tokens: EscapeTokens) -> None:
        self._tokens = tokens
        self._before: LLMatcher | None = None
        self._text = b""        # the escape so far
        self._known: dict[bytes, bool] = {}     # the results of `_may_go_on` for the next token

    def copy(self) -> Escapes:
        """Return an independent copy."""
        copied = Escapes(self._tokens)
        copied._before = None if self._before is None else self._before.deep_copy()
        copied._text = self._text
        return copied

    @property
    def begun(self) -> bool:
        """Whether the answer is within an escape."""
        return self._before is not None

    def concern(self, token_id: int) -> bool:
        """Whether `accept` must read this token."""
        return self._before is not None or token_id in self._tokens.watched

    def allow(self, mask: NDArray[np.int32], matcher: LLMatcher) -> None:
        """Add the tokens that spell an allowed character by an escape that the matcher does not know.

        Args:
            mask: [W], the mask that the matcher has filled in.
            matcher: the matcher of the answer.
        """
        tokens = self._tokens
        if tokens.slashes.size and is_allowed(mask, tokens.backslash):  # within a string, or in free text
            escaped, plain = tokens.slashes
            words = mask.view(np.uint32)
            allowed = escaped[words[plain // 32] >> (plain % 32) & 1 != 0]
            np.bitwise_or.at(words, allowed // 32, np.uint32(1) << (allowed % 32))
        if self._before is None:
            return
        if self._text == b"\\" and not is_allowed(mask, tokens.slash):
            before = np.empty_like(mask)
            self._before.unsafe_compute_mask_ptr(before.ctypes.data, before.nbytes)
            mask |= before & tokens.beginning_with_slash
        if self._text == b"\\":
            self._allow_parts(mask, tokens.code_parts)
        # The digit 2 begins no code of a control character, whose digits every grammar knows.
        elif matcher.is_error() or not (len(self._text) > 5 or is_allowed(mask, tokens.digit)):
            self._allow_parts(mask, tokens.parts)

    def _allow_parts(self, mask: NDArray[np.int32], token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if not is_allowed(mask, token_id) and self._may_go_on(self._text + self._tokens.by_id[token_id]):
                allow(mask, token_id)

    def accept(
        self, token_id: int, *, before: LLMatcher, matcher: LLMatcher, accepted: bool
    ) -> LLMatcher | None:
        """Advance by one token; return the matcher after the token, or None if the token may not follow.

        Args:
            token_id: the token that was sampled.
            before: the matcher before the token, which this object keeps.
            matcher: the matcher after the token.
            accepted: whether the matcher accepted the token.
        """
        tokens = self._tokens
        self._known.clear()
        text = self._text + tokens.by_id[token_id]
        before = self._before or before
        start = _start_of_begun(text)
        if start == 0 and text:
            is_longer = text != self._text      # false for a token without a text
            self._before, self._text = before, text
            return matcher if accepted or (is_longer and self._may_go_on(text)) else None
        self._before, self._text = None, text[start:]
        read = text[:start] if accepted else ESCAPE.sub(_plain, text[:start])
        if not accepted:
            matcher = before.deep_copy()
            if not tokens.consume(matcher, read + text[start:]):
                return None
        if start < len(text) and tokens.consume(before, read):
            self._before = before
        return matcher

    def _may_go_on(self, begun: bytes) -> bool:
        """Whether a text is an escape, or the beginning of one, whose character may follow here."""
        if begun not in self._known:
            # A vocabulary may have thousands of tokens with several digits: only tokens whose first digits
            # fit are tried.
            is_next = len(begun) <= len(self._text) + 1
            self._known[begun] = (is_next or self._may_go_on(begun[:-1])) and self._fits(begun)
        return self._known[begun]

    def _fits(self, begun: bytes) -> bool:
        tokens, before = self._tokens, self._before
        if before is None:
            return False
        if ESCAPE.fullmatch(begun):
            return tokens.may_follow(before, _spelled(_decoded(begun)))
        if begun == b"\\" or not _BEGUN.fullmatch(begun):
            return False
        return any(tokens.some_may_follow(before, *among) for among in _characters(begun))
