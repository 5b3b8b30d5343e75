"""Beam: one of the answers that a search follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from genserve.generation.request import LogitsTaker, Request
from genserve.request import TokenLogprob

if TYPE_CHECKING:
    from genserve.generation.beam_search import BeamSearch

__all__ = ["Beam", "BeamText", "Copy"]


class BeamText(Protocol):
    """The text of a beam, as far as it tells where it has to end."""

    @property
    def stop(self) -> str | None:
        """The stop string that has ended the text; None as long as it goes on."""

    def push(self, token_id: int) -> str:
        """Take one more token."""

    def fork(self) -> BeamText:
        """Return one with the same tokens, which goes on by itself."""


class Beam(Request):
    """One of the answers that a search follows: tokens in the KV cache; a `Request`.

    Belongs to the engine's thread.

    Attributes:
        search: that follows it.
        likelihoods: of its answer's tokens, if the request asks for them.
        text: of its answer; None: no stop string ends it.
    """

    __slots__ = ("likelihoods", "logit_rules", "search", "text")

    def __init__(
        self, search: BeamSearch, prompt_token_ids: Sequence[int], *, text: BeamText | None
    ) -> None:
        super().__init__(prompt_token_ids)
        self.search = search
        self.text = text
        self.likelihoods: list[TokenLogprob] = []
        self.logit_rules = search.answers[0].fresh_rules()

    @property
    def answer(self) -> list[int]:
        """Its tokens behind the prompt."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def cache_salt(self) -> str | None:
        """That of the request."""
        return self.search.answers[0].cache_salt

    @property
    def priority(self) -> int:
        """That of the request."""
        return self.search.answers[0].priority

    @property
    def lead(self) -> Beam:
        """See `Request`."""
        return self.search.lead

    @property
    def group(self) -> Sequence[Beam]:
        """See `Request`: all that are followed, or the lead, as long as it computes the prompt."""
        return self.search.beams if self.search.begun else (self,)

    @property
    def num_seqs(self) -> int:
        """See `Request`."""
        return len(self.search.beams)

    @property
    def answers(self) -> Sequence[Request]:
        """See `Request`."""
        return self.search.answers

    def take_logits(self, taker: LogitsTaker, row: int) -> None:
        """See `Request`: its search goes on."""
        taker.search(self, row)

    def stops_with(self, token_id: int) -> bool:
        """Whether a stop string would be there, if this token came next."""
        if self.text is None:
            return False
        text = self.text.fork()
        text.push(token_id)
        return text.stop is not None

    def append(self, token_id: int, likelihoods: Sequence[TokenLogprob]) -> None:
        """Add a token to the answer, and how likely it was, if the request asks for that."""
        self.token_ids.append(token_id)
        self.likelihoods += likelihoods
        if self.text is not None:
            self.text.push(token_id)

    def follow(self, other: Beam) -> None:
        """Become a copy of another beam."""
        self.token_ids = other.token_ids.copy()
        self.text = other.text.fork() if other.text is not None else None
        self.likelihoods = other.likelihoods.copy()
        self.logit_rules = self.search.answers[0].fresh_rules()


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Beam `target` goes on from what beam `source` has computed."""

    source: Beam
    target: Beam
