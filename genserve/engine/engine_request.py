"""Engine requests: what an engine schedules and computes; token sequences are in `token_sequence.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from genserve.completion import CacheMatch
from genserve.engine.logits_model import LogitsAdapter
from genserve.engine.prefix_cache import root_key
from genserve.engine.state_slots import SequenceState
from genserve.errors import ContextLengthExceeded, GenserveError, InvalidRequest
from genserve.request_context import NO_KEY, KeyShare
from genserve.sampling.logits_array import LogitsArray, TokenArray


@dataclass(slots=True, kw_only=True)
class Submission:
    """Sequences that were submitted together."""

    arrived_s: float  # the time before their prompts were prepared
    num_open: int  # how many have not ended
    max_new_tokens: int = 0  # the length of the longest answer that has ended
    has_started: bool = False  # one of them has had its first step


class RequestStatus(Enum):
    """Where a request is, in the words of vLLM."""

    NEW = auto()  # the scheduler does not have it yet
    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()  # it waits again, without its blocks
    FINISHED = auto()  # it has left, and its blocks are free


class BlockTable:
    """The blocks of one request; `KVCacheManager` writes them.

    Attributes:
        block_ids: the blocks, in the order of the tokens.
        keys: keys of the first full blocks, computed or not; added when they are needed.
        num_cached: how many blocks were put into the prefix cache because they are full and computed.
        num_rewrites: counts the changes of `block_ids` other than appending.
        state: its recurrent state; None: it holds no blocks, or the model has no states.
    """

    __slots__ = ("block_ids", "keys", "num_cached", "num_rewrites", "state")

    def __init__(self) -> None:
        self.block_ids: list[int] = []
        self.keys: list[bytes] = []
        self.num_cached = 0
        self.num_rewrites = 0
        self.state: SequenceState | None = None


class SequenceGroup:
    """What the scheduler starts, preempts and removes as one: the beams of a search, or a request by itself.

    Attributes:
        status: whether the group waits, runs, was preempted or has finished.
        priority: the waiting groups with the lowest value are scheduled first.
        share: the share of its API key, which decides between groups of one priority if keys compete.
        arrival: its number in the order of arrival, which decides between the others.
    """

    __slots__ = ("arrival", "priority", "share", "status")

    def __init__(self, *, priority: int, share: KeyShare = NO_KEY) -> None:
        self.status = RequestStatus.NEW
        self.priority = priority
        self.share = share
        self.arrival = 0

    @property
    def requests(self) -> Sequence[Request]:
        """The requests that are computed in the same step."""
        raise NotImplementedError

    @property
    def num_seqs(self) -> int:
        """How many sequences it adds to a forward, now or later."""
        raise NotImplementedError

    @property
    def choices(self) -> Sequence[Request]:
        """The requests that the caller reads: the best answers of a search, or the request itself."""
        raise NotImplementedError

    def conclude(self) -> None:
        """Append the best tokens found so far to the choices, which are about to end."""
        raise NotImplementedError


class Request(SequenceGroup):
    """Tokens to be computed into the KV cache: a token sequence, a beam, or a logits request.

    All but the requests of a beam search are groups of one, whose attributes as a group count.
    The defaults here hold unless a kind of request overrides them. Belongs to the engine's thread.

    Attributes:
        token_ids: all known tokens, the prompt first; the engine only reads them.
        num_prompt_tokens: how many of them are the prompt.
        num_computed_tokens: how many of them are in the KV cache; written by the engine.
        num_cached_tokens: how many tokens of the prompt were cached when the request first ran; written by
            the engine.
        num_preemptions: how often the request was preempted.
        num_drafted_tokens, num_accepted_tokens: how many tokens were drafted for it, and how many of them
            were accepted; written by the engine.
        num_replayed_tokens: how many of its pending tokens are computed again together with the last one,
            since their state was lost with a rejected draft; written by `KVCacheManager`.
        block_table: its blocks of the KV cache.
        cache_salt: only requests with the same salt share blocks.
        adapter: the adapter of the model that computes it, which no block is shared across; None: none.
        cache_match: how far its prompt was cached when it first ran, if it asks; written by `KVCacheManager`.
    """

    __slots__ = (
        "adapter",
        "block_table",
        "cache_match",
        "cache_salt",
        "num_accepted_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_drafted_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_replayed_tokens",
        "token_ids",
    )

    def __init__(self, token_ids: Sequence[int], *, cache_salt: str | None = None, priority: int = 0) -> None:
        super().__init__(priority=priority)
        self.token_ids = list(token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.num_drafted_tokens = 0
        self.num_accepted_tokens = 0
        self.num_replayed_tokens = 0
        self.block_table = BlockTable()
        self.cache_salt = cache_salt
        self.adapter: LogitsAdapter | None = None
        self.cache_match: CacheMatch | None = None

    @property
    def cache_root(self) -> bytes:
        """What is before its first token in the prefix cache."""
        return root_key(self.cache_salt, adapter=None if self.adapter is None else self.adapter.sha256)

    @property
    def num_pending(self) -> int:
        """How many tokens are still to be computed."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def logits_start(self) -> int:
        """Index of the first token after which it needs logits; it needs them after all later ones too."""
        return len(self.token_ids) - 1

    @property
    def always_shares_blocks(self) -> bool:
        """Whether it shares blocks even if the prefix cache is off."""
        return False

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """Whether it must compute its whole prompt, because it needs the logits after prompt tokens too."""
        return False

    @property
    def wants_cache_match(self) -> bool:
        """Whether its `cache_match` is to be written when it starts."""
        return False

    @property
    def max_draft_tokens(self) -> int:
        """How many drafted tokens a step can use after the last one."""
        return 0

    @property
    def group(self) -> SequenceGroup:
        """The group that is scheduled for it: itself, or its beam search."""
        return self

    @property
    def requests(self) -> Sequence[Request]:
        """See `SequenceGroup`."""
        return (self,)

    @property
    def num_seqs(self) -> int:
        """See `SequenceGroup`."""
        return 1

    @property
    def choices(self) -> Sequence[Request]:
        """See `SequenceGroup`."""
        return (self,)

    def conclude(self) -> None:
        """See `SequenceGroup`; a request by itself has nothing to append."""

    def preempt(self) -> None:
        """Recompute all tokens, since the blocks were freed for other requests."""
        self.num_computed_tokens = 0
        self.num_preemptions += 1

    def score(self, logits: LogitsArray, row: int) -> None:
        """Read the logits after the token before `num_computed_tokens`, if prompt_logprobs needs them.

        Args:
            logits: [R, V] float32 of the step.
            row: index of the row.
        """


class SubmittedSequence(Request):
    """A sequence that waits for its first step as long as admission control allows, in an `InputQueue`.

    Attributes:
        submission: the sequences that were submitted with it; set by `InputQueue` like the next two.
        num_accepted_seqs: the number of sequences that admission control counts for it until it ends.
        num_waiting_tokens: the number of prompt tokens that admission control counts until its first step.
        started_s: when its first step began, by the engine's clock; None: not yet.
    """

    __slots__ = ("num_accepted_seqs", "num_waiting_tokens", "started_s", "submission")

    is_resumed = False  # True: its caller has received a part of the answer; see resumption.py
    submission: Submission
    num_accepted_seqs: int
    num_waiting_tokens: int

    def __init__(self, token_ids: Sequence[int], *, cache_salt: str | None = None, priority: int = 0) -> None:
        super().__init__(token_ids, cache_salt=cache_salt, priority=priority)
        self.started_s: float | None = None


class LogitsRequest(Request):
    """One row of logits after some tokens, for a caller that is independent of blocks and steps.

    A loop that calls again with one more token computes only the new token: its tokens stay cached, and the
    next request that starts with them continues there. Belongs to the engine's thread.

    Attributes:
        submitted_s: when the request was submitted, by the engine's clock.
        pause_s: how long its loop took to resume with one more token; infinite for its first request.
    """

    __slots__ = ("_on_logits", "pause_s", "submitted_s")

    def __init__(
        self,
        token_ids: Sequence[int] | TokenArray,
        *,
        on_logits: Callable[[LogitsArray | GenserveError], None],
        vocab_size: int,
        max_length: int,
        share: KeyShare = NO_KEY,
    ) -> None:
        """Validate the ids.

        Args:
            token_ids: [n] integers.
            on_logits: called once, on the engine's thread, with the logits after the last token or with the
                error; must not block. The logits are [vocab_size] float32 on the model's device, unchanged
                even if they are NaN, and belong to the receiver.
            vocab_size: the size of the vocabulary, above all ids.
            max_length: the model's context, in tokens.
            share: the share of the API key for which they are computed.

        Raises:
            InvalidRequest: there are no ids, they are not a list of integers, or an id is not in the
                vocabulary.
            ContextLengthExceeded: there are more ids than `max_length`.
        """
        ids = np.asarray(token_ids)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise InvalidRequest(f"token ids must be a list of integers, not {ids.dtype} {list(ids.shape)}")
        if ids.size == 0:
            raise InvalidRequest("there are no token ids", remedy="give at least one")
        if ids.size > max_length:
            raise ContextLengthExceeded(
                f"{ids.size} token ids are given; the model's context is {max_length}",
                remedy="give fewer, or raise max_sequence_length in the logits stage's config.pbtxt",
            )
        if ids.min() < 0 or ids.max() >= vocab_size:
            wrong = next(i for i in ids.tolist() if not 0 <= i < vocab_size)
            raise InvalidRequest(f"token id {wrong} is outside the vocabulary of {vocab_size}")
        super().__init__(ids.tolist())
        self.share = share
        self.submitted_s = math.inf
        self.pause_s = math.inf
        self._on_logits = on_logits

    @property
    def always_shares_blocks(self) -> bool:
        """True: otherwise a loop would compute all its tokens again for each new one."""
        return True

    def deliver(self, content: LogitsArray | GenserveError) -> None:
        """Pass the logits or the error to `on_logits`; for the engine's thread."""
        self._on_logits(content)
