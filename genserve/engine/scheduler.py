"""Scheduler: which tokens of which requests the next forward computes.

A step is one forward over a budget of tokens. It holds one token of each request that generates, then
prompts, whole or in chunks, or drafted tokens if there are no prompts and drafting pays. Each prompt
lengthens a step that also decodes by about the time that the decodes take, but long prompts together by about
twice that time, however many they are: so prompts slow down running requests but never stop them. Among
several prompts the shortest goes first, and the longest always gets a share. If requests of several API keys
compete, the prompts of the key that was served least go first (`fair_share.py`), and only the decodes of that
key limit them.

When blocks run out, the youngest request of the lowest priority is preempted; so is a request whose slot is
due to another key. Its blocks stay in the prefix cache until they are evicted; evicted tokens are computed
again, in chunks like a prompt.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from operator import attrgetter

from genserve.engine.engine_request import Request, RequestStatus, SequenceGroup
from genserve.engine.fair_share import FairShare
from genserve.engine.kv_cache_manager import KVCacheManager
from genserve.engine.speculation import Speculation
from genserve.engine.step_times import StepTimes

_PROMPT_SHARE = 0.9  # each prompt's share of the tokens that double a step
# The same share for all prompts together that are longer than a step: benchmarks/long_prompt.py --prompts 8.
_LONG_PROMPTS_SHARE = 2.2
_MIN_DOUBLING_TOKENS = 9  # assumed of a step, so that prompts beside many or quick decodes get on
_LONGEST_SHARE = 4  # the longest prompt gets at least one in 4 of the prompts' tokens
_MAX_UNFINISHED = 2  # prompts that a step may leave unfinished before more prompts begin
_MAX_SCORED_ROWS = 64  # rows of logits of a step that prompts need for prompt_logprobs
_DRAFT_MARGIN = 1.25  # a draft must be worth this many times its cost
# A sequence with more tokens to replay is not drafted for: they grow with each wrong draft, until a step
# without one takes over their state.
_MAX_REPLAYED_TOKENS = 8

_rank = attrgetter("priority", "arrival")


@dataclass(slots=True)
class SchedulerOutput:
    """The tokens of one step: three lists of the same length, the decodes first.

    Attributes:
        requests: the requests whose tokens are computed.
        num_tokens: how many tokens of each request are computed, after its computed ones.
        drafts: the drafted tokens of each request, computed after its `num_tokens`.
        num_decodes: how many of the requests have one token and no prompt, besides replayed tokens.
        num_prompt_tokens: how many tokens all other requests have.
        num_replayed: how many tokens the decodes have besides one each, since their states were lost with
            rejected drafts.
        num_drafted: how many tokens all drafts have.
        started: the groups that left the waiting queue.
        num_preempted: how many groups went back to the waiting queue.
        full: whether the first waiting group found no slot in the forward, or too few blocks.
    """

    requests: list[Request] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    drafts: list[Sequence[int]] = field(default_factory=list)
    num_decodes: int = 0
    num_prompt_tokens: int = 0
    num_replayed: int = 0
    num_drafted: int = 0
    started: list[SequenceGroup] = field(default_factory=list)
    num_preempted: int = 0
    full: bool = False

    def add(self, request: Request, num_tokens: int) -> None:
        """Compute the next `num_tokens` tokens of a request."""
        self.requests.append(request)
        self.num_tokens.append(num_tokens)
        self.drafts.append(())


class Scheduler:
    """The queues of waiting and running groups. Belongs to the engine's thread.

    Attributes:
        max_num_batched_tokens: the budget of a step, in tokens.
        waiting: the groups without blocks, by priority and then by arrival.
        running: the groups with blocks, in the same order.
        without_adapters: the groups that join the waiting ones once their adapters are in memory.
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
        self._max_replayed = self.max_num_batched_tokens - max_num_seqs
        self._speculation = speculation
        self._times = StepTimes()
        self._shares = FairShare()
        self._next_arrival = count()
        self.waiting: list[SequenceGroup] = []
        self.running: list[SequenceGroup] = []
        self.without_adapters: list[SequenceGroup] = []

    @property
    def num_waiting(self) -> int:
        """How many groups wait for blocks and a slot in the forward."""
        return len(self.waiting)

    @property
    def num_without_adapters(self) -> Counter[int]:
        """How many sequences and beams wait for their adapters, by priority."""
        counts: Counter[int] = Counter()
        for group in self.without_adapters:
            counts[group.priority] += group.num_seqs
        return counts

    @property
    def num_running(self) -> int:
        """How many requests hold blocks."""
        return sum(len(group.requests) for group in self.running)

    def add(self, group: SequenceGroup, *, arrival: int | None = None) -> None:
        """Put a group into the waiting queue; without an inherited arrival number, it gets the next one.

        It takes no part in the queue, and in the shares of the keys, until its adapters are in memory.
        """
        group.status = RequestStatus.WAITING
        group.arrival = next(self._next_arrival) if arrival is None else arrival
        self._add_waiting([group])

    def _add_waiting(self, groups: Iterable[SequenceGroup]) -> None:
        """Have each group wait for blocks and a slot, or for its adapters if they are not in memory."""
        for group in groups:
            if all(request.adapter is None or request.adapter.is_ready for request in group.requests):
                self._shares.add(group, self.waiting)
                insort(self.waiting, group, key=_rank)
            else:
                self.without_adapters.append(group)

    def remove(self, group: SequenceGroup) -> None:
        """Remove a waiting or running group and free its blocks; does nothing if it is neither."""
        match group.status:
            case RequestStatus.RUNNING:
                self.running.remove(group)
            case RequestStatus.WAITING if group in self.without_adapters:
                self.without_adapters.remove(group)
                group.status = RequestStatus.FINISHED
                return
            case RequestStatus.WAITING | RequestStatus.PREEMPTED:
                self.waiting.remove(group)
            case _:
                return
        group.status = RequestStatus.FINISHED
        self._shares.remove(group)
        for request in group.requests:
            self._kv.free(request)

    def record_step(self, output: SchedulerOutput, seconds: float) -> None:
        """Record how long a step took."""
        self._times.record(
            seconds,
            num_decodes=output.num_decodes,
            num_prompt_tokens=output.num_prompt_tokens,
            # The tokens that are replayed after wrong drafts are a part of what drafts cost.
            num_drafted=output.num_drafted + output.num_replayed,
        )

    def schedule(self, *, num_reserved: int = 0) -> SchedulerOutput | None:
        """Choose the tokens of the next forward and allocate their blocks; None: nothing to compute.

        `num_reserved` slots of the forward are kept free.
        """
        if self.without_adapters:
            groups, self.without_adapters = self.without_adapters, []
            self._add_waiting(groups)
        output = SchedulerOutput()
        prompts: list[SequenceGroup] = []
        compete = self._shares.have_competition
        if compete and self.waiting:
            self._preempt_for_share(output, num_slots=self._max_num_seqs - num_reserved)
        num_preempted = output.num_preempted
        self._schedule_running(output, prompts)
        if prompts or self.waiting:
            has_blocks = output.num_preempted == num_preempted
            self._add_prompts(output, prompts, num_reserved=num_reserved, may_admit=has_blocks)
        if not prompts and self._speculation is not None and output.num_decodes:
            self._add_drafts(output, self._speculation)
        if compete:
            self._shares.record(zip(output.requests, output.num_tokens, strict=True))
        if self._kv.has_states:
            self._kv.schedule_states(output.requests, output.drafts)
        return output if output.requests else None

    def check_integrity(self) -> None:
        """Raise AssertionError if the queues, the requests and the blocks disagree; for tests."""
        assert sorted(self.waiting, key=_rank) == self.waiting
        assert sorted(self.running, key=_rank) == self.running
        waiting = {RequestStatus.WAITING, RequestStatus.PREEMPTED}
        assert all(group.status in waiting for group in self.waiting), "a queued request does not wait"
        assert all(group.status is RequestStatus.RUNNING for group in self.running), "a request does not run"
        assert all(group.status is RequestStatus.WAITING for group in self.without_adapters)
        queues = [*self.waiting, *self.running, *self.without_adapters]
        assert len({*queues}) == len(queues)
        assert sum(group.num_seqs for group in self.running) <= self._max_num_seqs, "too many run"
        self._shares.check_integrity((*self.waiting, *self.running))
        running = [request for group in self.running for request in group.requests]
        assert all(r.num_pending >= 1 for r in running), "a running request has nothing to compute"
        self._kv.check_integrity([*running, *(r for group in self.waiting for r in group.requests)])

    def _preempt_for_share(self, output: SchedulerOutput, *, num_slots: int) -> None:
        """Preempt groups for the next waiting one, if its key is due their slots and blocks.

        None is preempted unless the slots that its key is due are enough for it.
        """
        group = next(self._shares.in_turn(self.waiting))
        next_victim = partial(self._shares.next_victim, group, num_slots=num_slots)
        left, victims = [*self.running], []
        while num_slots - sum(each.num_seqs for each in left) < group.num_seqs:
            victim = next_victim(left)
            if victim is None:
                return
            left.remove(victim)
            victims.append(victim)
        for victim in victims:
            self._preempt(victim, output)
        while not all(self._kv.has_room(request, num_spare=self.num_running) for request in group.requests):
            victim = next_victim(self.running)
            if victim is None:
                return
            self._preempt(victim, output)

    def _schedule_running(self, output: SchedulerOutput, prompts: list[SequenceGroup]) -> None:
        """Allocate blocks for all tokens of the running requests; preempt the last ones if blocks run out."""
        for group in tuple(self.running):
            for request in group.requests:
                while not self._kv.extend(request, request.num_pending):
                    last = self.running[-1]
                    self._preempt(last, output)
                    if last is group:
                        return
            self._schedule_decode(output, prompts, group)
            if group is self.running[-1]:
                return

    def _preempt(self, group: SequenceGroup, output: SchedulerOutput) -> None:
        self.running.remove(group)
        for request in group.requests:
            self._kv.free(request)
            request.preempt()
        group.status = RequestStatus.PREEMPTED
        insort(self.waiting, group, key=_rank)
        output.num_preempted += 1

    def _schedule_decode(
        self, output: SchedulerOutput, prompts: list[SequenceGroup], group: SequenceGroup
    ) -> None:
        """Schedule a group with one pending token each, and replayed ones; append others to the prompts."""
        requests = group.requests
        for request in requests:
            if request.num_pending > 1:
                num_replayed = request.num_replayed_tokens
                if (
                    request.num_pending > 1 + num_replayed
                    or output.num_replayed + num_replayed > self._max_replayed
                ):
                    prompts.append(group)
                    return
                output.num_replayed += num_replayed
        for request in requests:
            output.add(request, 1 + request.num_replayed_tokens)
        output.num_decodes = len(output.requests)

    def _add_prompts(
        self,
        output: SchedulerOutput,
        prompts: list[SequenceGroup],
        *,
        num_reserved: int,
        may_admit: bool,
    ) -> None:
        """Admit waiting groups if they may, append them to the prompts, and schedule the prompts."""
        num_slots = max(0, self._max_num_seqs - num_reserved - sum(group.num_seqs for group in self.running))
        num_sharing = 0
        if self.waiting and may_admit:
            budget = self._prompt_budget(output, [*prompts, *self.waiting[:num_slots]])
            num_sharing = self._admit(output, prompts, budget=budget, num_slots=num_slots)
        if prompts and self._shares.have_competition:
            self._schedule_by_share(output, prompts)
        elif prompts:
            # Some of the waiting groups have started (a few as decodes), and some wait for a shared prefix.
            num_others = min(len(self.waiting) - num_sharing, num_slots - len(output.started))
            budget = self._prompt_budget(output, [*prompts, *self.waiting[: max(0, num_others)]])
            self._schedule_prompts(output, prompts, budget=budget)

    def _schedule_by_share(self, output: SchedulerOutput, prompts: list[SequenceGroup]) -> None:
        """Schedule the prompts of each key, those of the key that was served least first.

        If none of its requests decodes, it has the rest of the step to itself: the decodes of other keys,
        which were served more, wait for its prompts, and so do their prompts.
        """
        decoding = {request.group.share.name for request in output.requests}
        by_key: defaultdict[str, list[SequenceGroup]] = defaultdict(list)
        for group in sorted(prompts, key=self._shares.served):
            by_key[group.share.name].append(group)
        least_served = next(iter(by_key))
        if least_served not in decoding:
            budget = self.max_num_batched_tokens - output.num_decodes - output.num_replayed
            self._schedule_prompts(output, by_key[least_served], budget=budget)
            return
        left = self._prompt_budget(output, prompts)
        for own in by_key.values():
            if left > 0:
                num_before = output.num_prompt_tokens
                self._schedule_prompts(output, own, budget=left)
                left -= output.num_prompt_tokens - num_before

    def _add_drafts(self, output: SchedulerOutput, speculation: Speculation) -> None:
        """Draft tokens where the chance that they are accepted is worth the time that they take."""
        num_decodes = output.num_decodes
        min_chance = _DRAFT_MARGIN * num_decodes / self._times.doubling_drafted_tokens(num_decodes)
        budget = left = self.max_num_batched_tokens - num_decodes - output.num_replayed
        for index, request in enumerate(output.requests):
            max_tokens = min(left, request.max_draft_tokens)
            if max_tokens <= 0 or request.num_replayed_tokens > _MAX_REPLAYED_TOKENS:
                continue
            draft = speculation.draft(request, max_tokens=max_tokens, min_chance=min_chance)
            if draft and self._kv.extend(request, output.num_tokens[index] + len(draft)):
                output.drafts[index] = draft
                left -= len(draft)
        output.num_drafted = budget - left

    def _prompt_budget(self, output: SchedulerOutput, prompts: Sequence[SequenceGroup]) -> int:
        """Return how many tokens of the prompts, which run or may begin, the step may compute."""
        left = self.max_num_batched_tokens - output.num_decodes - output.num_replayed
        if not output.num_decodes:
            return left
        num_long = sum(_num_uncached(group) > self.max_num_batched_tokens for group in prompts)
        share = _PROMPT_SHARE * (len(prompts) - num_long) + min(_PROMPT_SHARE * num_long, _LONG_PROMPTS_SHARE)
        doubling = self._times.doubling_prompt_tokens(output.num_decodes)
        return min(left, int(share * max(_MIN_DOUBLING_TOKENS, doubling)))

    def _admit(
        self, output: SchedulerOutput, prompts: list[SequenceGroup], *, budget: int, num_slots: int
    ) -> int:
        """Admit waiting groups while slots, blocks and tokens of the budget remain.

        A group whose next block another one is about to compute waits for that block. A long prompt waits
        while the step has two prompts of its key that it does not finish; shorter ones of the same priority
        overtake it.

        Returns:
            How many groups wait for a block that another one computes.
        """
        lengths: defaultdict[str, list[int]] = defaultdict(list)  # by key
        for group in prompts:
            insort(lengths[group.share.name], _num_pending(group))
        computing = {
            self._kv.next_key(request, request.num_computed_tokens)
            for group in prompts
            for request in group.requests
        }
        lowest_priority = None
        num_sharing = 0
        waiting: Iterable[SequenceGroup] = self.waiting
        if num_slots and self._shares.have_competition:
            waiting = self._shares.in_turn(waiting)
        for group in list(islice(waiting, self._max_num_seqs)):
            if lowest_priority is not None and group.priority > lowest_priority:
                return num_sharing
            if group.num_seqs > num_slots or not self._kv.num_free_blocks:
                output.full = True
                return num_sharing
            requests = group.requests
            num_cached = [self._kv.num_cached_tokens(request) for request in requests]
            key = self._kv.next_key(requests[0], num_cached[0])
            if key is not None and key in computing:
                num_sharing += 1
                continue
            length = sum(len(request.token_ids) for request in requests) - sum(num_cached)
            others = lengths[group.share.name]
            if length > 1 and num_unfinished(sorted([*others, length]), budget) > _MAX_UNFINISHED:
                lowest_priority = group.priority
                continue
            if not self._allocate(group):
                output.full = True
                return num_sharing
            num_slots -= group.num_seqs
            self.waiting.remove(group)
            group.status = RequestStatus.RUNNING
            insort(self.running, group, key=_rank)
            output.started.append(group)
            self._schedule_decode(output, prompts, group)
            if length > 1:
                insort(others, length)
            computing.add(key)
        return num_sharing

    def _allocate(self, group: SequenceGroup) -> bool:
        """Allocate the blocks of a group, and spare one for each running request; False: too few are free."""
        requests = group.requests
        for index, request in enumerate(requests):
            if not self._kv.allocate(request, num_spare=self.num_running):
                for allocated in requests[:index]:
                    self._kv.free(allocated)
                    allocated.num_computed_tokens = 0
                return False
            if not request.num_preemptions:
                request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        return True

    def _schedule_prompts(
        self, output: SchedulerOutput, prompts: list[SequenceGroup], *, budget: int
    ) -> None:
        """Divide the budget among the requests with several pending tokens."""
        prompts.sort(key=_num_pending)
        num_rows = _MAX_SCORED_ROWS
        shares = divide_budget(list(map(_num_pending, prompts)), budget)
        for group, num_tokens in zip(prompts, shares, strict=True):
            requests = group.requests
            finishes = num_tokens >= _num_pending(group)
            for request in requests:
                # The last tokens of a group are computed in one step, because its logits are used together.
                pending = request.num_pending if finishes or len(requests) == 1 else request.num_pending - 1
                num_chunk = min(pending, num_tokens)
                if request.logits_start < len(request.token_ids) - 1:
                    num_unscored = max(0, request.logits_start - request.num_computed_tokens)
                    num_chunk = min(num_chunk, num_unscored + num_rows)
                    num_rows -= max(0, num_chunk - num_unscored)
                if self._kv.has_states and len(requests) == 1:
                    num_chunk = min(num_chunk, self._kv.tokens_to_snapshot(request))
                if num_chunk:
                    output.add(request, num_chunk)
                    output.num_prompt_tokens += num_chunk
                    num_tokens -= num_chunk


def _num_pending(group: SequenceGroup) -> int:
    return sum(request.num_pending for request in group.requests)


def _num_uncached(group: SequenceGroup) -> int:
    """Return how many tokens of a group's prompt were not cached; all beams have the same prompt."""
    first = group.requests[0]
    return len(first.token_ids) - first.num_cached_tokens


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
