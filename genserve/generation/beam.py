"""Beam: one of the answers that a search follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from genserve.generation.request import LogitsTaker, Request
from genserve.request import TokenLogprob

if TYPE_CHECKING:
    from genserve.generation.beam_search import BeamSearch
    from genserve.generation.speculation import Speculation

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
    """One of the answers that a search follows: tokens in the KV cache; a `Request`.

    Belongs to the engine's thread. The attributes that it shares with a token sequence mean the same.

    Attributes:
        search: that follows it.
        likelihoods: of its answer's tokens, if the request asks for them.
        text: of its answer; None: no stop string ends it.
    """

    always_shares: ClassVar[bool] = False
    reads_prefix_cache: ClassVar[bool] = True

    __slots__ = (
        "likelihoods",
        "logit_rules",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
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
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.likelihoods: list[TokenLogprob] = []
        self.logit_rules = search.answers[0].fresh_rules()

    @property
    def answer(self) -> list[int]:
        """Its tokens behind the prompt."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_pending(self) -> int:
        """How many tokens are not in the KV cache yet."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def first_logits(self) -> int:
        """See `Request`: the last token."""
        return len(self.token_ids) - 1

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

    def preempt(self) -> None:
        """Begin anew, since its blocks are somebody else's; the search stays where it is."""
        self.num_computed_tokens = 0
        self.num_preemptions += 1

    def draft(self, speculation: Speculation, *, max_tokens: int, least_chance: float) -> Sequence[int]:
        """See `Request`: beams do not speculate."""
        return ()

    def take_logits(self, taker: LogitsTaker, row: int) -> None:
        """See `Request`: its search goes on."""
        taker.search(self, row)

    def score(self, logits: Any, row: int) -> None:
        """See `Request`: it wants no others."""

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
