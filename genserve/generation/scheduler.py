"""Scheduler: which tokens of which requests the next forward computes.

A step is one forward over a budget of tokens. It holds one token of each request that generates, then
prompts, whole or in chunks, or drafted tokens if there are no prompts and drafting pays. Each prompt
lengthens a step that also decodes by about the time that the decodes take, so prompts slow down running
requests but never stop them. Of several prompts the shortest goes first, and the longest always gets a share.

When blocks run out, the youngest request of the lowest priority is preempted. Its blocks stay in the prefix
cache until they are evicted; evicted tokens are computed again, in chunks like a prompt.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, islice

from genserve.generation.engine_request import Request
from genserve.generation.kv_cache_manager import KVCacheManager
from genserve.generation.speculation import Speculation

__all__ = ["Scheduler", "SchedulerOutput", "StepTimes"]


_NEWEST = 0.2       # the weight of what was seen last
_GUESS = 15         # more tokens than that double a step, before anything was measured
_FORGIVEN = 0.002   # of what drafted tokens take, with each step without them: or one slow step ends drafting
_FEW_TOKENS = 8     # of a chunk: fewer cost little each, and say nothing of what many do


class StepTimes:
    """Learns the seconds of steps of one token per sequence, and those of each token more.

    A few drafted tokens are cheap, since the weights are read anyway; so they are learned apart from prompts.
    """

    def __init__(self) -> None:
        self._decode_s: dict[int, float] = {}   # by the number of sequences
        # Of one token more; 0: not known.
        self._prompt_token_s = 0.0
        self._drafted_token_s = 0.0

    def note(self, *, num_decodes: int, num_prompt_tokens: int, num_drafted: int, seconds: float) -> None:
        """Learn from a step, which has prompts or drafted tokens, not both.

        Args:
            num_decodes: sequences with one token.
            num_prompt_tokens: of prompts.
            num_drafted: drafted tokens.
            seconds: that it took.
        """
        if not num_decodes or seconds <= 0:
            return
        decode_s = self.decode_s(num_decodes)
        if not num_prompt_tokens and not num_drafted:
            self._decode_s[num_decodes] = _moved(self._decode_s.get(num_decodes, 0.0), seconds)
            self._drafted_token_s *= 1 - _FORGIVEN
        elif decode_s is None:
            return
        elif num_drafted:
            self._drafted_token_s = _moved(self._drafted_token_s, max(seconds - decode_s, 0.0) / num_drafted)
        elif num_prompt_tokens >= _FEW_TOKENS:
            seconds_more = max(seconds - decode_s, 0.0)
            self._prompt_token_s = _moved(self._prompt_token_s, seconds_more / num_prompt_tokens)

    def decode_s(self, num_decodes: int) -> float | None:
        """Return the seconds of a step of one token for each of so many sequences; None: not known."""
        if num_decodes not in self._decode_s and self._decode_s:
            num_decodes = min(self._decode_s, key=lambda known: abs(known - num_decodes))
        return self._decode_s.get(num_decodes)

    def doubling_prompt_tokens(self, num_decodes: int) -> float:
        """Return how many tokens of prompts make a step of so many sequences take twice as long."""
        return self._doubling(num_decodes, self._prompt_token_s)

    def doubling_drafted_tokens(self, num_decodes: int) -> float:
        """Return how many drafted tokens would make it take twice as long."""
        return self._doubling(num_decodes, self._drafted_token_s)

    def _doubling(self, num_decodes: int, token_s: float) -> float:
        decode_s = self.decode_s(num_decodes)
        return decode_s / token_s if decode_s and token_s else _GUESS + num_decodes


def _moved(before: float, seconds: float) -> float:
    # One that took far longer had to wait for others.
    return before + _NEWEST * (min(seconds, 2 * before) - before) if before else seconds


_PROMPT_SHARE = 0.9         # of the tokens that double a step
_LEAST_PROMPT_TOKENS = 8    # of a step beside requests that generate, for each prompt
_LONGEST_SHARE = 4          # the longest prompt gets one token in so many
_NUM_UNFINISHED = 2         # prompts that a step leaves unfinished, if more of them can begin
_NUM_SCORED_ROWS = 64       # rows of logits of a step that prompts want for their own sake
_DRAFT_MARGIN = 1.25        # a draft must be worth more than it takes by so much


@dataclass(slots=True)
class SchedulerOutput:
    """What a step computes; three lists of the same length, one token of each first.

    Attributes:
        requests: whose tokens are computed.
        num_tokens: so many of each, behind those that are computed already.
        drafts: tokens to be computed behind these that are not known to come.
        num_decodes: how many of the requests have a single token.
        num_prompt_tokens: of all that have more.
        num_drafted: of all drafts.
        begun: requests that left the queue.
        num_preempted: so many had to go back there.
        full: the first that waits found no place in the forward, or too few blocks.
    """

    requests: list[Request] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    drafts: list[Sequence[int]] = field(default_factory=list)
    num_decodes: int = 0
    num_prompt_tokens: int = 0
    num_drafted: int = 0
    begun: list[Request] = field(default_factory=list)
    num_preempted: int = 0
    full: bool = False

    def add(self, request: Request, num_tokens: int) -> None:
        """Compute so many more tokens of a request."""
        self.requests.append(request)
        self.num_tokens.append(num_tokens)
        self.drafts.append(())


class Scheduler:
    """Keeps the requests that wait and those that run. Belongs to the engine's thread.

    Both are leads, in the order of priority, and of equals first come, first served.
    """

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int = 256,
        speculation: Speculation | None = None,
    ) -> None:
        """Begin with no request.

        Args:
            kv_cache_manager: has the blocks.
            max_num_seqs: sequences of a forward.
            max_num_batched_tokens: tokens of a forward; one for each sequence is always allowed.
            speculation: drafts tokens; None: none are.
        """
        self.max_num_batched_tokens = max(max_num_batched_tokens, max_num_seqs)
        self._kv = kv_cache_manager
        self._max_num_seqs = max_num_seqs
        self._speculation = speculation
        self._times = StepTimes()
        self._arrivals = count()
        self._places: dict[Request, tuple[int, int]] = {}   # priority and number of arrival
        self._waiting: list[Request] = []
        self._running: list[Request] = []

    @property
    def num_waiting(self) -> int:
        """Leads that wait for blocks and a place in the forward."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return sum(len(lead.group) for lead in self._running)

    def add(self, lead: Request, *, arrival: int | None = None) -> None:
        """Put a request into the queue; where one with such a number stood, or at the end of its priority."""
        self._places[lead] = (lead.priority, next(self._arrivals) if arrival is None else arrival)
        insort(self._waiting, lead, key=self._places.__getitem__)

    def arrival(self, lead: Request) -> int:
        """Return the number that a request has in the queue."""
        return self._places[lead][1]

    def remove(self, lead: Request) -> None:
        """Drop a request, wherever it is; fine if it is not there."""
        if self._places.pop(lead, None) is None:
            return
        if lead in self._running:
            self._running.remove(lead)
        else:
            self._waiting.remove(lead)
        for request in (*lead.group, lead):
            self._kv.free(request)

    def note_step(self, output: SchedulerOutput, seconds: float) -> None:
        """Learn how long a step took."""
        self._times.note(
            num_decodes=output.num_decodes,
            num_prompt_tokens=output.num_prompt_tokens,
            num_drafted=output.num_drafted,
            seconds=seconds,
        )

    def schedule(self, *, num_held: int = 0) -> SchedulerOutput | None:
        """Choose the tokens of the next forward, and give them blocks; None: nothing can be computed.

        Args:
            num_held: places of the forward that are kept free.
        """
        output = SchedulerOutput()
        prompts: list[Request] = []
        self._schedule_running(output, prompts)
        num_places = max(0, self._max_num_seqs - num_held - sum(lead.num_seqs for lead in self._running))
        budget = self._prompt_budget(output, num_prompts=len(prompts) + min(len(self._waiting), num_places))
        num_sharing = 0
        if self._waiting and not output.num_preempted:
            num_sharing = self._admit(output, prompts, budget=budget, num_places=num_places)
        if prompts:
            # Some have begun, of which some need one token alone, and some wait for what others compute.
            num_others = min(len(self._waiting) - num_sharing, num_places - len(output.begun))
            budget = self._prompt_budget(output, num_prompts=len(prompts) + max(0, num_others))
            self._schedule_prompts(output, prompts, budget=budget)
        elif self._speculation is not None and output.num_decodes:
            self._add_drafts(output, self._speculation)
        return output if output.requests else None

    def check_integrity(self) -> None:
        """Raise AssertionError where the queue and the blocks disagree; for tests."""
        assert sorted(self._waiting, key=self._places.__getitem__) == self._waiting
        assert sorted(self._running, key=self._places.__getitem__) == self._running
        assert {*self._waiting, *self._running} == self._places.keys(), "a request was lost"
        assert len(self._places) == len(self._waiting) + len(self._running), "a request waits and runs"
        assert sum(lead.num_seqs for lead in self._running) <= self._max_num_seqs, "too many run"
        for lead in self._running:
            assert all(request.num_pending >= 1 for request in lead.group), "one has nothing to compute"
        self._kv.check_integrity()

    def _schedule_running(self, output: SchedulerOutput, prompts: list[Request]) -> None:
        """Give those that run the blocks for all tokens that they have, at the expense of the last ones."""
        for lead in tuple(self._running):
            for request in lead.group:
                while not self._kv.extend(request, request.num_pending):
                    last = self._running[-1]
                    self._preempt(last, output)
                    if last is lead:
                        return
            self._schedule_decode(output, prompts, lead)
            if lead is self._running[-1]:
                return

    def _preempt(self, lead: Request, output: SchedulerOutput) -> None:
        self._running.remove(lead)
        for request in lead.group:
            self._kv.free(request)
            request.preempt()
        insort(self._waiting, lead, key=self._places.__getitem__)
        output.num_preempted += 1

    def _schedule_decode(self, output: SchedulerOutput, prompts: list[Request], lead: Request) -> None:
        """Schedule a group of which one token each is to be computed; put any other among the prompts."""
        group = lead.group
        for request in group:
            if request.num_pending > 1:
                prompts.append(lead)
                return
        for request in group:
            output.add(request, 1)
        output.num_decodes = len(output.requests)

    def _add_drafts(self, output: SchedulerOutput, speculation: Speculation) -> None:
        """Draft tokens where the chance that they are right is worth what they take of the step."""
        num_decodes = output.num_decodes
        least_chance = _DRAFT_MARGIN * num_decodes / self._times.doubling_drafted_tokens(num_decodes)
        most = left = self.max_num_batched_tokens - num_decodes
        for place, request in enumerate(output.requests):
            draft = request.draft(speculation, max_tokens=left, least_chance=least_chance)
            if draft and self._kv.extend(request, 1 + len(draft)):
                output.drafts[place] = draft
                left -= len(draft)
        output.num_drafted = most - left

    def _prompt_budget(self, output: SchedulerOutput, *, num_prompts: int) -> int:
        """Return how many tokens of prompts the step may have."""
        left = self.max_num_batched_tokens - output.num_decodes
        if not output.num_decodes:
            return left
        doubling = self._times.doubling_prompt_tokens(output.num_decodes)
        return min(left, int(num_prompts * max(_LEAST_PROMPT_TOKENS, _PROMPT_SHARE * doubling)))

    def _admit(
        self, output: SchedulerOutput, prompts: list[Request], *, budget: int, num_places: int
    ) -> int:
        """Have those that wait begin, as far as there are places, blocks, and tokens left in the budget.

        One that begins with a block that another is about to compute waits for that; a long prompt waits
        where the step has two that it does not finish, and shorter ones of its priority do not wait for it.

        Returns:
            How many wait for a block that another computes.
        """
        lengths = sorted(map(_num_pending, prompts))
        computing = {
            self._kv.key_at(request, request.num_computed_tokens)
            for lead in prompts
            for request in lead.group
        }
        lowest = None
        num_sharing = 0
        for lead in list(islice(self._waiting, self._max_num_seqs)):
            if lowest is not None and lead.priority > lowest:
                return num_sharing
            if lead.num_seqs > num_places or not self._kv.num_free_blocks:
                output.full = True
                return num_sharing
            group = lead.group
            num_cached = [self._kv.num_cached_tokens(request) for request in group]
            key = self._kv.key_at(group[0], num_cached[0])
            if key is not None and key in computing:
                num_sharing += 1
                continue
            length = sum(len(request.token_ids) for request in group) - sum(num_cached)
            if length > 1 and _num_unfinished(sorted([*lengths, length]), budget) > _NUM_UNFINISHED:
                lowest = lead.priority
                continue
            if not self._begin(lead):
                output.full = True
                return num_sharing
            num_places -= lead.num_seqs
            self._waiting.remove(lead)
            insort(self._running, lead, key=self._places.__getitem__)
            output.begun.append(lead)
            self._schedule_decode(output, prompts, lead)
            if length > 1:
                insort(lengths, length)
            computing.add(key)
        return num_sharing

    def _begin(self, lead: Request) -> bool:
        """Give a group its blocks, beside one more for each that runs; False if there are too few."""
        group = lead.group
        for place, request in enumerate(group):
            if not self._kv.allocate(request, num_spare=self.num_running):
                for begun in group[:place]:
                    self._kv.free(begun)
                    begun.num_computed_tokens = 0
                return False
            if not request.num_preemptions:
                request.num_cached_tokens = request.num_computed_tokens
        return True

    def _schedule_prompts(self, output: SchedulerOutput, prompts: list[Request], *, budget: int) -> None:
        """Divide the budget among those of which several tokens are to be computed."""
        prompts.sort(key=_num_pending)
        num_rows = _NUM_SCORED_ROWS
        for lead, num_tokens in zip(prompts, _divided(list(map(_num_pending, prompts)), budget), strict=True):
            group = lead.group
            at_once = num_tokens >= _num_pending(lead)
            for request in group:
                # The last tokens of a group are computed in one step, since their logits are for one.
                pending = request.num_pending if at_once or len(group) == 1 else request.num_pending - 1
                num_chunk = min(pending, num_tokens)
                if request.logits_start < len(request.token_ids) - 1:
                    num_silent = max(0, request.logits_start - request.num_computed_tokens)
                    num_chunk = min(num_chunk, num_silent + num_rows)
                    num_rows -= max(0, num_chunk - num_silent)
                if num_chunk:
                    output.add(request, num_chunk)
                    output.num_prompt_tokens += num_chunk
                    num_tokens -= num_chunk


def _num_pending(lead: Request) -> int:
    return sum(request.num_pending for request in lead.group)


def _divided(lengths: Sequence[int], budget: int) -> list[int]:
    """Return how many tokens each prompt gets, the shortest first; the longest is last and gets its share."""
    kept = min(lengths[-1], budget // _LONGEST_SHARE)
    left = budget - kept
    parts: list[int] = []
    for length in lengths[:-1]:
        parts.append(min(length, left))
        left -= parts[-1]
    return [*parts, min(lengths[-1], left + kept)]


def _num_unfinished(lengths: Sequence[int], budget: int) -> int:
    """Return how many prompts would not be finished by a step with such a budget."""
    parts = _divided(lengths, budget)
    return sum(part < length for part, length in zip(parts, lengths, strict=True))
