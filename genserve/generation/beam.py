"""Beam: one of the answers that a search follows, in a slot of the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

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


class Beam:
    """One of the answers that a search follows: tokens in a slot of the cache, an `Occupant`.

    Belongs to the engine's thread. The attributes that it shares with a token sequence mean the same.

    Attributes:
        search: that follows it.
        num_slots: those that it needs: of the first beam, before the others have theirs, all of them.
        likelihoods: of its answer's tokens, if the request asks for them.
        text: of its answer; None: no stop string ends it.
    """

    __slots__ = (
        "likelihoods",
        "logit_rules",
        "num_cached_tokens",
        "num_computed",
        "num_prefilled",
        "num_prompt_tokens",
        "num_slots",
        "preempted",
        "search",
        "text",
        "token_ids",
    )

    def __init__(
        self, search: BeamSearch, prompt_token_ids: Sequence[int], *, text: BeamText | None
    ) -> None:
        self.search = search
        self.text = text
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_slots = 1
        self.num_computed = 0
        self.num_prefilled = 0
        self.num_cached_tokens = 0
        self.preempted = False
        self.likelihoods: list[TokenLogprob] = []
        self.logit_rules = search.answers[0].fresh_rules()

    @property
    def answer(self) -> list[int]:
        """Its tokens behind the prompt."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_pending(self) -> int:
        """How many tokens are not in the KV cache yet."""
        return len(self.token_ids) - self.num_computed

    @property
    def cache_salt(self) -> str | None:
        """That of the request."""
        return self.search.answers[0].cache_salt

    @property
    def priority(self) -> int:
        """That of the request."""
        return self.search.answers[0].priority

    @property
    def in_prompt(self) -> bool:
        """Whether part of the prompt is still to be computed by a prefill."""
        return self.num_computed < self.num_prompt_tokens

    @property
    def num_to_prefill(self) -> int:
        """How many tokens of the prompt are to be computed by a prefill."""
        return self.num_prompt_tokens - self.num_computed

    def preempt(self) -> None:
        """Begin anew, since its slot is somebody else's; the search stays where it is."""
        self.num_computed = self.num_prefilled = 0
        self.preempted = True

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
    """The slot of `target` is to hold what that of `source` holds."""

    source: Beam
    target: Beam
