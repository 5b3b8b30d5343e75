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

_NEWEST = 0.2           # weight of the last step in the moving averages of step times
# Tokens, besides the decodes, that double a step as long as nothing is measured.
_INITIAL_DOUBLING_TOKENS = 15
# Share of a drafted token's time that each step without drafts takes off again, since otherwise one slow step
# would end drafting.
_DRAFT_COST_DECAY = 0.002
_MEASURED_TOKENS = 8    # of prompts: fewer in a step cost little each, and say nothing about many

_PROMPT_SHARE = 0.9         # of the tokens that double a step, for each prompt
_MIN_PROMPT_TOKENS = 8      # for each prompt of a step that also decodes
_LONGEST_SHARE = 4          # the longest prompt gets at least one in 4 of the prompts' tokens
_MAX_UNFINISHED = 2         # prompts that a step leaves unfinished, before others may begin
_MAX_SCORED_ROWS = 64       # rows of logits of a step that prompts need for prompt_logprobs
_DRAFT_MARGIN = 1.25        # a draft must be worth this many times its cost


@dataclass(slots=True)
class SchedulerOutput:
    """The tokens of one step: three lists of the same length, the decodes first.

    Attributes:
        requests: whose tokens are computed.
        num_tokens: how many of each, after its computed tokens.
        drafts: drafted tokens of each, computed after these.
        num_decodes: how many of the requests have one token and no prompt.
        num_prompt_tokens: of all other requests.
        num_drafted: tokens of all drafts.
        started: requests that left the queue.
        num_preempted: how many requests went back to the queue.
        full: whether the first waiting request found no place in the forward, or too few blocks.
    """

    requests: list[Request] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    drafts: list[Sequence[int]] = field(default_factory=list)
    num_decodes: int = 0
    num_prompt_tokens: int = 0
    num_drafted: int = 0
    started: list[Request] = field(default_factory=list)
    num_preempted: int = 0
    full: bool = False

    def add(self, request: Request, num_tokens: int) -> None:
        """Compute the next `num_tokens` tokens of a request."""
        self.requests.append(request)
        self.num_tokens.append(num_tokens)
        self.drafts.append(())


class Scheduler:
    """The queues of waiting and running requests. Belongs to the engine's thread.

    Both hold leads (see `Request.lead`), by priority and then by arrival.
    """

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int = 256,
        speculation: Speculation | None = None,
    ) -> None:
        """Start with empty queues. Above `max_num_batched_tokens`, each sequence may still have one token."""
        self.max_num_batched_tokens = max(max_num_batched_tokens, max_num_seqs)
        self._kv = kv_cache_manager
        self._max_num_seqs = max_num_seqs
        self._speculation = speculation
        self._times = StepTimes()
        self._next_arrival = count()
        self._ranks: dict[Request, tuple[int, int]] = {}    # priority and arrival number
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
        """Put a request into the queue; without an inherited arrival number, it gets the next one."""
        self._ranks[lead] = (lead.priority, next(self._next_arrival) if arrival is None else arrival)
        insort(self._waiting, lead, key=self._ranks.__getitem__)

    def arrival(self, lead: Request) -> int:
        """Return the arrival number of a request."""
        return self._ranks[lead][1]

    def remove(self, lead: Request) -> None:
        """Drop a waiting or running request and free its blocks; does nothing if it is neither."""
        if self._ranks.pop(lead, None) is None:
            return
        if lead in self._running:
            self._running.remove(lead)
        else:
            self._waiting.remove(lead)
        for request in (*lead.group, lead):
            self._kv.free(request)

    def note_step(self, output: SchedulerOutput, seconds: float) -> None:
        """Learn how long a step took."""
        self._times.note(output, seconds)

    def schedule(self, *, num_held: int = 0) -> SchedulerOutput | None:
        """Choose the tokens of the next forward and allocate their blocks; None: nothing to compute.

        `num_held` places of the forward are kept free.
        """
        output = SchedulerOutput()
        prompts: list[Request] = []
        self._schedule_running(output, prompts)
        if prompts or self._waiting:
            self._add_prompts(output, prompts, num_held=num_held)
        if not prompts and self._speculation is not None and output.num_decodes:
            self._add_drafts(output, self._speculation)
        return output if output.requests else None

    def check_integrity(self) -> None:
        """Raise AssertionError if the queues and the blocks disagree; for tests."""
        assert sorted(self._waiting, key=self._ranks.__getitem__) == self._waiting
        assert sorted(self._running, key=self._ranks.__getitem__) == self._running
        assert {*self._waiting, *self._running} == self._ranks.keys(), "a request was lost"
        assert len(self._ranks) == len(self._waiting) + len(self._running), "a request waits and runs"
        assert sum(lead.num_seqs for lead in self._running) <= self._max_num_seqs, "too many run"
        for lead in self._running:
            assert all(r.num_pending >= 1 for r in lead.group), "a running request has nothing to compute"
        self._kv.check_integrity()

    def _schedule_running(self, output: SchedulerOutput, prompts: list[Request]) -> None:
        """Allocate blocks for all tokens of the running requests; preempt the last ones if blocks run out."""
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
        insort(self._waiting, lead, key=self._ranks.__getitem__)
        output.num_preempted += 1

    def _schedule_decode(self, output: SchedulerOutput, prompts: list[Request], lead: Request) -> None:
        """Schedule a group with one pending token each; append any other group to the prompts."""
        group = lead.group
        for request in group:
            if request.num_pending > 1:
                prompts.append(lead)
                return
        for request in group:
            output.add(request, 1)
        output.num_decodes = len(output.requests)

    def _add_prompts(self, output: SchedulerOutput, prompts: list[Request], *, num_held: int) -> None:
        """Admit waiting requests, append them to the prompts, and schedule these."""
        num_places = max(0, self._max_num_seqs - num_held - sum(lead.num_seqs for lead in self._running))
        num_sharing = 0
        if self._waiting and not output.num_preempted:
            num_prompts = len(prompts) + min(len(self._waiting), num_places)
            budget = self._prompt_budget(output, num_prompts=num_prompts)
            num_sharing = self._admit(output, prompts, budget=budget, num_places=num_places)
        if prompts:
            # Of the waiting requests, some have started (a few as decodes) and some wait for a shared prefix.
            num_others = min(len(self._waiting) - num_sharing, num_places - len(output.started))
            budget = self._prompt_budget(output, num_prompts=len(prompts) + max(0, num_others))
            self._schedule_prompts(output, prompts, budget=budget)

    def _add_drafts(self, output: SchedulerOutput, speculation: Speculation) -> None:
        """Draft tokens where the chance that they are accepted is worth the time that they take."""
        num_decodes = output.num_decodes
        min_chance = _DRAFT_MARGIN * num_decodes / self._times.doubling_drafted_tokens(num_decodes)
        budget = left = self.max_num_batched_tokens - num_decodes
        for index, request in enumerate(output.requests):
            max_tokens = min(left, request.max_draft_tokens)
            if max_tokens <= 0:
                continue
            draft = speculation.draft(request, max_tokens=max_tokens, min_chance=min_chance)
            if draft and self._kv.extend(request, 1 + len(draft)):
                output.drafts[index] = draft
                left -= len(draft)
        output.num_drafted = budget - left

    def _prompt_budget(self, output: SchedulerOutput, *, num_prompts: int) -> int:
        """Return how many tokens of prompts the step may compute."""
        left = self.max_num_batched_tokens - output.num_decodes
        if not output.num_decodes:
            return left
        doubling = self._times.doubling_prompt_tokens(output.num_decodes)
        return min(left, int(num_prompts * max(_MIN_PROMPT_TOKENS, _PROMPT_SHARE * doubling)))

    def _admit(self, output: SchedulerOutput, prompts: list[Request], *, budget: int, num_places: int) -> int:
        """Admit waiting requests while places, blocks and tokens of the budget remain.

        A request whose next block another one is about to compute waits for that block. A long prompt waits
        while the step has two prompts that it does not finish; shorter ones of the same priority overtake it.

        Returns:
            How many requests wait for a block that another one computes.
        """
        lengths = sorted(map(_num_pending, prompts))
        computing = {
            self._kv.key_at(request, request.num_computed_tokens)
            for lead in prompts
            for request in lead.group
        }
        lowest_priority = None
        num_sharing = 0
        for lead in list(islice(self._waiting, self._max_num_seqs)):
            if lowest_priority is not None and lead.priority > lowest_priority:
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
            if length > 1 and num_unfinished(sorted([*lengths, length]), budget) > _MAX_UNFINISHED:
                lowest_priority = lead.priority
                continue
            if not self._start(lead):
                output.full = True
                return num_sharing
            num_places -= lead.num_seqs
            self._waiting.remove(lead)
            insort(self._running, lead, key=self._ranks.__getitem__)
            output.started.append(lead)
            self._schedule_decode(output, prompts, lead)
            if length > 1:
                insort(lengths, length)
            computing.add(key)
        return num_sharing

    def _start(self, lead: Request) -> bool:
        """Allocate the blocks of a group, and spare one for each running request; False: too few are free."""
        group = lead.group
        for index, request in enumerate(group):
            if not self._kv.allocate(request, num_spare=self.num_running):
                for allocated in group[:index]:
                    self._kv.free(allocated)
                    allocated.num_computed_tokens = 0
                return False
            if not request.num_preemptions:
                request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        return True

    def _schedule_prompts(self, output: SchedulerOutput, prompts: list[Request], *, budget: int) -> None:
        """Divide the budget among the requests with several pending tokens."""
        prompts.sort(key=_num_pending)
        num_rows = _MAX_SCORED_ROWS
        shares = divide_budget(list(map(_num_pending, prompts)), budget)
        for lead, num_tokens in zip(prompts, shares, strict=True):
            group = lead.group
            finishes = num_tokens >= _num_pending(lead)
            for request in group:
                # The last tokens of a group are computed in one step, because its logits are used together.
                pending = request.num_pending if finishes or len(group) == 1 else request.num_pending - 1
                num_chunk = min(pending, num_tokens)
                if request.logits_start < len(request.token_ids) - 1:
                    num_unscored = max(0, request.logits_start - request.num_computed_tokens)
                    num_chunk = min(num_chunk, num_unscored + num_rows)
                    num_rows -= max(0, num_chunk - num_unscored)
                if num_chunk:
                    output.add(request, num_chunk)
                    output.num_prompt_tokens += num_chunk
                    num_tokens -= num_chunk


def _num_pending(lead: Request) -> int:
    return sum(request.num_pending for request in lead.group)


def divide_budget(lengths: Sequence[int], budget: int) -> list[int]:
    """Return how many tokens of each prompt a step computes: the shortest first, and a share for the longest.

    `lengths` are the pending tokens of at least one prompt, ascending.
    """
    reserved = min(lengths[-1], budget // _LONGEST_SHARE)
    left = budget - reserved
    shares: list[int] = []
    for length in lengths[:-1]:
        shares.append(min(length, left))
        left -= shares[-1]
    return [*shares, min(lengths[-1], left + reserved)]


def num_unfinished(lengths: Sequence[int], budget: int) -> int:
    """Return how many prompts a step with this budget would leave unfinished."""
    shares = divide_budget(lengths, budget)
    return sum(share < length for share, length in zip(shares, lengths, strict=True))


class StepTimes:
    """Learns how long a step takes, by the number of its decodes, and for each further token.

    A few drafted tokens are cheap, since the weights are read anyway, so they are measured separately.
    """

    def __init__(self) -> None:
        self._decode_s: dict[int, float] = {}   # by the number of sequences
        # For each further token; 0: not known.
        self._prompt_token_s = 0.0
        self._drafted_token_s = 0.0

    def note(self, step: SchedulerOutput, seconds: float) -> None:
        """Learn how long a step took, which has prompts or drafted tokens, but not both."""
        if not step.num_decodes or seconds <= 0:
            return
        decode_s = self.decode_s(step.num_decodes)
        if not step.num_prompt_tokens and not step.num_drafted:
            average = self._decode_s.get(step.num_decodes, 0.0)
            self._decode_s[step.num_decodes] = _moving_average(average, seconds)
            self._drafted_token_s *= 1 - _DRAFT_COST_DECAY
        elif decode_s is None:
            return
        elif step.num_drafted:
            token_s = max(seconds - decode_s, 0.0) / step.num_drafted
            self._drafted_token_s = _moving_average(self._drafted_token_s, token_s)
        elif step.num_prompt_tokens >= _MEASURED_TOKENS:
            token_s = max(seconds - decode_s, 0.0) / step.num_prompt_tokens
            self._prompt_token_s = _moving_average(self._prompt_token_s, token_s)

    def decode_s(self, num_decodes: int) -> float | None:
        """Return the seconds of a step that only decodes `num_decodes` sequences; None: not known."""
        if num_decodes not in self._decode_s and self._decode_s:
            num_decodes = min(self._decode_s, key=lambda known: abs(known - num_decodes))
        return self._decode_s.get(num_decodes)

    def doubling_prompt_tokens(self, num_decodes: int) -> float:
        """Return how many tokens of prompts double the time of a step with `num_decodes` decodes."""
        return self._doubling_tokens(num_decodes, self._prompt_token_s)

    def doubling_drafted_tokens(self, num_decodes: int) -> float:
        """Return how many drafted tokens double the time of a step with `num_decodes` decodes."""
        return self._doubling_tokens(num_decodes, self._drafted_token_s)

    def _doubling_tokens(self, num_decodes: int, token_s: float) -> float:
        decode_s = self.decode_s(num_decodes)
        return decode_s / token_s if decode_s and token_s else _INITIAL_DOUBLING_TOKENS + num_decodes


def _moving_average(average: float, seconds: float) -> float:
    # A step that took far longer had to wait for other processes.
    return average + _NEWEST * (min(seconds, 2 * average) - average) if average else seconds
