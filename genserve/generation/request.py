"""Request: tokens that are to be computed, whoever wants the logits behind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from genserve.generation.beam import Beam
    from genserve.generation.logits_request import LogitsRequest
    from genserve.generation.speculation import Speculation
    from genserve.generation.token_sequence import TokenSequence

__all__ = ["LogitsTaker", "Request"]


class LogitsTaker(Protocol):
    """What becomes of the logits behind the last token of a request, by what the request is."""

    def generate(self, sequence: TokenSequence, row: int) -> None:
        """Give the row, or a token picked from it, to the sequence's decoding loop."""

    def answer(self, request: LogitsRequest, row: int) -> None:
        """Answer the request with the row."""

    def search(self, beam: Beam, row: int) -> None:
        """Go on with the beam's search, once it has the rows of all beams."""


class Request:
    """A list of tokens that is computed into the KV cache: a token sequence, a beam, or a logits request.

    What it says here holds where a request does not say otherwise. Belongs to the engine's thread.

    Attributes:
        token_ids: all tokens that are known, the prompt first; read only for the engine.
        num_prompt_tokens: how many of them are the prompt.
        num_computed_tokens: how many of them are in the KV cache; written by the engine.
        num_cached_tokens: how many of the prompt's were there when it was first scheduled; written likewise.
        num_preemptions: how often it had to give its blocks back, and wait again.
    """

    __slots__ = (
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "token_ids",
    )

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = list(token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0

    @property
    def num_pending(self) -> int:
        """How many tokens are still to be computed."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def first_logits(self) -> int:
        """The index of the first token behind which it wants logits; it wants them behind all that follow."""
        return len(self.token_ids) - 1

    @property
    def cache_salt(self) -> str | None:
        """Only requests with the same salt share blocks; None: those without one."""
        return None

    @property
    def always_shares(self) -> bool:
        """Whether it shares blocks though the prefix cache is off."""
        return False

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether it may begin with what is cached; not, if it wants logits behind those tokens too."""
        return True

    @property
    def priority(self) -> int:
        """Of those that wait, the lowest goes first."""
        return 0

    @property
    def lead(self) -> Request:
        """The request that is scheduled for it: itself, or the first beam of its search."""
        return self

    @property
    def group(self) -> Sequence[Request]:
        """Of a lead, those that get their logits in the same step: itself, or all beams of the search."""
        return (self,)

    @property
    def num_seqs(self) -> int:
        """Of a lead, how many sequences its group adds to a forward, sooner or later."""
        return 1

    @property
    def answers(self) -> Sequence[Request]:
        """What the caller knows of it: itself, or the answers of its search."""
        return (self,)

    def preempt(self) -> None:
        """Begin anew, since its blocks are somebody else's."""
        self.num_computed_tokens = 0
        self.num_preemptions += 1

    def draft(self, speculation: Speculation, *, max_tokens: int, least_chance: float) -> Sequence[int]:
        """Return tokens that may follow the last one; see `Speculation.draft`."""
        return ()

    def take_logits(self, taker: LogitsTaker, row: int) -> None:
        """Say what becomes of the logits behind its last token, row `row` of the step's."""
        raise NotImplementedError

    def score(self, logits: Any, row: int) -> None:
        """Take the logits behind the token before `num_computed_tokens`, if it wants them for their own sake.

        Args:
            logits: [R, V] float32 of the step.
            row: of them.
        """
