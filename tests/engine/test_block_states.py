"""Blocks and queues in any order of events: hypothesis searches for a sequence of calls that breaks them."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from genserve.engine.engine_request import Request
from genserve.engine.kv_cache_manager import KVCacheManager
from genserve.engine.scheduler import Scheduler

BLOCK_SIZE = 2
NUM_BLOCKS = 8
MAX_LENGTH = 12
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=8)
SALTS = st.sampled_from([None, None, "a"])


class Blocks(RuleBasedStateMachine):
    """Requests that allocate, compute, fork and leave; a block holds all tokens up to each of its places."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVCacheManager(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        self.contents = [[()] * BLOCK_SIZE for _ in range(NUM_BLOCKS)]
        self.waiting: list[Request] = []
        self.running: list[Request] = []

    @rule(prompt=PROMPTS, salt=SALTS)
    def arrive(self, prompt, salt):
        self.waiting.append(Request(prompt, cache_salt=salt))

    @precondition(lambda self: self.waiting)
    @rule(num_spare=st.integers(0, 2))
    def admit(self, num_spare):
        request, num_free = self.waiting[0], self.kv.num_free_blocks
        if self.kv.allocate(request, num_spare=num_spare):
            self.running.append(self.waiting.pop(0))
            assert self.kv.num_free_blocks >= num_spare
            assert request.num_pending >= 1
        else:
            assert self.kv.num_free_blocks == num_free
            assert self.kv.num_blocks_for(len(request.token_ids)) + num_spare > num_free

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def compute(self, data):
        request = data.draw(st.sampled_from(self.running))
        count = data.draw(st.integers(1, request.num_pending)) if request.num_pending else 0
        if not count:
            return
        extended = self.kv.extend(request, count)
        for source, target in self.kv.copies:   # an extension that fails may have copied a block
            self.contents[target] = list(self.contents[source])
        self.kv.copies.clear()
        if not extended:
            return
        for place in range(request.num_computed_tokens, request.num_computed_tokens + count):
            block = request.block_table.block_ids[place // BLOCK_SIZE]
            self.contents[block][place % BLOCK_SIZE] = self.state(request, place)
        request.num_computed_tokens += count
        self.kv.cache_blocks(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), token_id=st.integers(0, 1))
    def append(self, data, token_id):
        request = data.draw(st.sampled_from(self.running))
        if not request.num_pending and len(request.token_ids) < MAX_LENGTH:
            request.token_ids.append(token_id)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fork(self, data):
        source = data.draw(st.sampled_from(self.running))
        target = Request(source.token_ids, cache_salt=source.cache_salt)
        self.kv.fork(source, target)
        self.running.append(target)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), returns=st.booleans())
    def leave(self, data, returns):
        request = data.draw(st.sampled_from(self.running))
        self.running.remove(request)
        self.kv.free(request)
        if returns:
            request.preempt()
            self.waiting.append(request)

    @invariant()
    def no_block_is_lost_or_counted_wrongly(self):
        self.kv.check_integrity(self.running)

    @invariant()
    def every_block_holds_the_tokens_of_its_requests(self):
        for request in self.running:
            block_ids = request.block_table.block_ids
            for place in range(request.num_computed_tokens):
                held = self.contents[block_ids[place // BLOCK_SIZE]][place % BLOCK_SIZE]
                assert held == self.state(request, place)

    def state(self, request, place):
        return request.cache_salt, *request.token_ids[: place + 1]

    def teardown(self):
        for request in self.running:
            self.kv.free(request)
        assert self.kv.usage == 0
        self.kv.check_integrity([])


class Queues(RuleBasedStateMachine):
    """Requests that arrive, generate and leave, over too few slots and blocks."""

    MAX_TOKENS = 6

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVCacheManager(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        self.scheduler = Scheduler(self.kv, max_num_seqs=3, max_num_batched_tokens=self.MAX_TOKENS)
        self.requests: dict[Request, int] = {}  # how many tokens they will have

    @rule(prompt=PROMPTS, salt=SALTS, priority=st.integers(-1, 1), count=st.integers(1, 4))
    def arrive(self, prompt, salt, priority, count):
        request = Request(prompt, cache_salt=salt, priority=priority)
        self.requests[request] = len(prompt) + count
        self.scheduler.add(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def leave(self, data):
        request = data.draw(st.sampled_from(list(self.requests)))
        del self.requests[request]
        self.scheduler.remove(request)

    @rule(num_reserved=st.integers(0, 2), seconds=st.sampled_from([0.0, 0.01, 0.5]))
    def step(self, num_reserved, seconds):
        output = self.scheduler.schedule(num_reserved=num_reserved)
        if output is None:
            assert self.scheduler.num_running == 0
            return
        assert 0 < sum(output.num_tokens) <= self.MAX_TOKENS
        assert len(set(output.requests)) == len(output.requests)
        self.kv.copies.clear()
        self.scheduler.record_step(output, seconds)
        for request, num_tokens in zip(output.requests, output.num_tokens, strict=True):
            request.num_computed_tokens += num_tokens
            self.kv.cache_blocks(request)
            if request.num_pending == 0:
                request.token_ids.append(len(request.token_ids) % 2)
                if len(request.token_ids) >= self.requests[request]:
                    del self.requests[request]
                    self.scheduler.remove(request)

    @invariant()
    def requests_and_blocks_agree(self):
        self.scheduler.check_integrity()
        assert self.scheduler.num_waiting + self.scheduler.num_running == len(self.requests)

    def teardown(self):
        """Check that all requests end, whatever happened before."""
        for _ in range(40 * len(self.requests)):
            self.step(0, 0.01)
        assert not self.requests
        assert self.kv.usage == 0


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(stateful_step_count=30)
TestQueues = Queues.TestCase
TestQueues.settings = settings(stateful_step_count=30)
