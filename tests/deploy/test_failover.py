"""Calls survive the loss of their replica, and clients receive what they would have received without it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from genserve.completion import Completion, Delta, FinishReason, join_choices
from genserve.deploy.ingress.failover import MAX_FAILOVERS, Failover
from genserve.deploy.replica.model_replica import ModelReplica
from genserve.deploy.replica_messages import Call, InferenceItem
from genserve.engine.generation_request import GenerationRequest
from genserve.errors import Closed, GenserveError, ModelNotReady, NotResumable, Overloaded, ReplicaLost
from genserve.generation_metrics import Metrics
from genserve.inference import InferenceRequest, InferenceResponse
from genserve.sampling.sampling_params import SamplingParams
from tests.fakes.local_replicas import LocalReplicas
from tests.fakes.sequences import Clock
from tests.support.representatives import with_extended
from tests.support.step_gate import StepGate

SAMPLED = {"temperature": 1.0, "ignore_eos": True}
# Requests that another replica continues, and those that it repeats: the last three.
REQUESTS = [
    {},
    {"logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1, "ignore_eos": True},
    {**SAMPLED, "stop": ("zq", "e\0")},
    {**SAMPLED, "stream_interval": 4},
    {**SAMPLED, "repetition_penalty": 1.3, "dry_multiplier": 0.8},
    {**SAMPLED, "mirostat_mode": 2, "logprobs": True},
    {"use_beam_search": True, "beam_width": 3},
    {"use_beam_search": True, "beam_width": 4, "logprobs": True, "ignore_eos": True},
]


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def replicas(tiny_repository: Path) -> Iterator[list[ModelReplica]]:
    replicas = [ModelReplica([tiny_repository], "tiny") for _ in range(2)]
    yield replicas
    for replica in replicas:
        replica.close()


def call(replica: ModelReplica, number: int = 0, **fields: object) -> Call[GenerationRequest]:
    """A call of one of the requests, with 64 tokens at most."""
    params = SamplingParams(**{"max_tokens": 64, **REQUESTS[number % len(REQUESTS)]})
    prompt = f"Tell me about number {number}"
    made = GenerationRequest(
        id=f"request-{number}",
        model="tiny",
        prompt=prompt,
        prompt_token_ids=tuple(replica.repository.text_model().encode(prompt)),
        params=params,
        seeds=(number, number + 1) if params.use_beam_search else (number,),
    )
    return Call(identity=replica.identity, request=replace(made, **fields))


async def whole(deltas: AsyncIterator[Sequence[Delta]]) -> tuple[Completion, ...]:
    return join_choices([delta async for some in deltas for delta in some])


def outcomes(metrics: Metrics) -> dict[str, float]:
    [family] = metrics.interrupted_calls.collect()
    return {s.labels["outcome"]: s.value for s in family.samples if s.name.endswith("_total") and s.value}


def test_answers_go_on_where_a_replica_died(replicas: list[ModelReplica], runner: asyncio.Runner) -> None:
    metrics = Metrics()
    gate = StepGate(replicas[1].repository.text_model())

    async def survive() -> None:
        expected = [await whole(replicas[0].generate(call(replicas[0], n))) for n in range(24)]
        local = LocalReplicas(*replicas)
        failover = Failover(local, name="tiny", metrics=metrics)
        begun = asyncio.Event()

        async def read(number: int) -> tuple[Completion, ...]:
            deltas: list[Delta] = []
            async with aclosing(failover.generate(call(replicas[0], number))) as items:
                async for some in items:
                    deltas += some
                    if number % 2:  # the replica that dies has the odd numbers
                        begun.set()
            return join_choices(deltas)

        gate.shut()
        gate.allow(4)  # its first answers begin, and none ends
        reading = [asyncio.ensure_future(read(number)) for number in range(24)]
        await begun.wait()
        assert local.calls[:24] == [0, 1] * 12
        local.kill(1)
        gate.open()
        assert await asyncio.gather(*reading) == expected

    try:
        runner.run(survive())
    finally:
        gate.remove()
    assert sum(outcomes(metrics).values()) == 12
    assert outcomes(metrics)["resumed"] >= 1
    count = metrics.registry.get_sample_value("genserve_interruption_seconds_count", {"model": "tiny"})
    assert count == 12


@pytest.mark.parametrize("number", with_extended(range(len(REQUESTS)), always=range(0, len(REQUESTS), 2)))
def test_each_kind_of_request_is_resumed_in_its_middle(
    replicas: list[ModelReplica], runner: asyncio.Runner, number: int
) -> None:
    metrics = Metrics()

    async def survive() -> None:
        made = call(replicas[0], number)
        expected = await whole(replicas[0].generate(made))
        local = LocalReplicas(*replicas)
        deltas: list[Delta] = []
        async for some in Failover(local, name="tiny", metrics=metrics).generate(made):
            if not deltas:
                local.kill(0)
            deltas += some
        assert join_choices(deltas) == expected

    runner.run(survive())
    assert outcomes(metrics) == {"resumed": 1}


def test_a_replica_that_is_closed_is_a_lost_one(
    replicas: list[ModelReplica], runner: asyncio.Runner, tiny_repository: Path
) -> None:
    """A replica is closed like this when the time to shut down is over."""
    metrics = Metrics()

    async def survive() -> None:
        closing = ModelReplica([tiny_repository], "tiny")
        model = closing.repository.text_model()
        gate = StepGate(model)
        gate.shut()
        gate.allow(5)
        made = call(replicas[0], 3, params=SamplingParams(max_tokens=200, **SAMPLED))
        expected = await whole(replicas[0].generate(made))
        local = LocalReplicas(closing, replicas[1], choose=lambda call: bool(call.request.resumed_token_ids))
        deltas: list[Delta] = []
        async for some in Failover(local, name="tiny", metrics=metrics).generate(made):
            if not deltas:
                ended = asyncio.ensure_future(asyncio.to_thread(closing.close))
                while model.engine.alive:
                    await asyncio.sleep(0)
                gate.open()  # or the answer might end before its replica
                await ended
            deltas += some
        assert join_choices(deltas) == expected

    runner.run(survive())
    assert outcomes(metrics) == {"resumed": 1}


class SleepingClock(Clock):
    """A clock that moves while a task sleeps."""

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class ScriptedReplicas:
    """A `ReplicaSet` whose calls yield the items of a script, and raise its errors."""

    def __init__(self, *script: Sequence[object], on_call: Callable[[], None] = lambda: None) -> None:
        self._script = list(script)
        self._on_call = on_call
        self.calls: list[Call] = []
        self.num_closed = 0

    async def generate(self, call: Call[GenerationRequest]) -> AsyncIterator[Sequence[Delta]]:
        async with aclosing(self._items(call)) as items:
            async for item in items:
                yield item

    async def infer(self, call: Call[InferenceRequest]) -> AsyncIterator[InferenceItem]:
        async with aclosing(self._items(call)) as items:
            async for item in items:
                yield item

    async def _items(self, call: Call) -> AsyncIterator:
        self.calls.append(call)
        self._on_call()
        try:
            for item in self._script[min(len(self.calls), len(self._script)) - 1]:
                if isinstance(item, GenserveError):
                    raise item
                yield item
        finally:
            self.num_closed += 1


DIED = ReplicaLost("replica 7 died")
REQUEST = GenerationRequest(
    id="r", model="m", prompt=(5,), prompt_token_ids=(5,), params=SamplingParams(), seeds=(1,)
)
CALL = Call(identity="", request=REQUEST)


def limited(max_time_ms: int) -> Call[GenerationRequest]:
    """Return the call with a deadline."""
    return replace(CALL, request=replace(REQUEST, params=SamplingParams(max_time_ms=max_time_ms)))


FIRST = [Delta(text="a", token_ids=(1,))]
LAST = [Delta(text="b", token_ids=(2,), finish_reason=FinishReason.LENGTH)]


def run(failover: Failover, call: Call) -> list:
    async def read() -> list:
        is_inference = isinstance(call.request, InferenceRequest)
        items = failover.infer(call) if is_inference else failover.generate(call)
        return [item async for item in items]

    return asyncio.run(read())


def test_a_call_without_a_first_token_begins_again() -> None:
    scripted, metrics = ScriptedReplicas([DIED], [FIRST, LAST]), Metrics()
    assert run(Failover(scripted, name="m", metrics=metrics), CALL) == [FIRST, LAST]
    assert [call.request.resumed_token_ids for call in scripted.calls] == [(), ()]
    assert outcomes(metrics) == {"retried": 1}


def test_what_was_received_grows_from_loss_to_loss() -> None:
    scripted = ScriptedReplicas([FIRST, DIED], [FIRST, FIRST, DIED], [LAST])
    run(Failover(scripted, name="m", metrics=Metrics()), CALL)
    assert [call.request.resumed_token_ids for call in scripted.calls] == [(), ((1,),), ((1, 1, 1),)]
    assert scripted.num_closed == 3


@pytest.mark.parametrize("script", [[DIED], [FIRST, DIED], [Closed("it stops")]])
def test_a_call_that_every_replica_dies_of_reaches_three_of_them(script, caplog) -> None:
    scripted, metrics = ScriptedReplicas(script), Metrics()
    with pytest.raises(ReplicaLost, match=r"\b3\b.*'m'"):
        run(Failover(scripted, name="m", metrics=metrics), CALL)
    assert len(scripted.calls) == 1 + MAX_FAILOVERS
    assert outcomes(metrics)["failed"] == 1
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING", "ERROR"]
    assert {record.request_id for record in caplog.records} == {"r"}


def test_an_answer_that_was_complete_is_not_resumed() -> None:
    scripted, metrics = ScriptedReplicas([FIRST, LAST, DIED]), Metrics()
    assert run(Failover(scripted, name="m", metrics=metrics), CALL) == [FIRST, LAST]
    assert outcomes(metrics) == {}


def test_an_answer_that_no_replica_can_continue_ends_with_its_error() -> None:
    scripted, metrics = ScriptedReplicas([FIRST, DIED], [NotResumable("another token")]), Metrics()
    with pytest.raises(NotResumable, match="another token"):
        run(Failover(scripted, name="m", metrics=metrics), CALL)
    assert outcomes(metrics) == {"resumed": 1, "failed": 1}


FULL = Overloaded("all replicas are full", retry_after_s=1.0)


@pytest.mark.parametrize("error", [FULL, ModelNotReady("none has started")])
def test_an_answer_that_has_begun_waits_for_a_place(error) -> None:
    scripted = ScriptedReplicas([FIRST, DIED], [error], [error], [LAST])
    metrics, clock = Metrics(), SleepingClock()
    failover = Failover(scripted, name="m", metrics=metrics, clock=clock, sleep=clock.sleep)
    assert run(failover, limited(9000)) == [FIRST, LAST]
    first, second, third, fourth = (call.request.params.max_time_ms for call in scripted.calls)
    assert (first, second) == (9000, 9000)
    assert 250 <= second - third <= 751, "the pauses differ, so that answers do not come back together"
    assert 250 <= third - fourth <= 751
    assert outcomes(metrics) == {"resumed": 1}


def test_an_answer_that_has_begun_does_not_wait_for_ever() -> None:
    scripted, metrics, clock = ScriptedReplicas([FIRST, DIED], [FULL]), Metrics(), SleepingClock()
    failover = Failover(scripted, name="m", metrics=metrics, clock=clock, sleep=clock.sleep)
    with pytest.raises(Overloaded):
        run(failover, CALL)
    assert 180 <= clock.now_s < 181
    assert outcomes(metrics) == {"resumed": 1, "failed": 1}


@pytest.mark.parametrize("script", [([FULL],), ([DIED], [FULL])])
def test_a_call_without_a_first_token_is_rejected_where_all_are_full(script) -> None:
    scripted, metrics = ScriptedReplicas(*script), Metrics()
    with pytest.raises(Overloaded):
        run(Failover(scripted, name="m", metrics=metrics), CALL)
    assert len(scripted.calls) == len(script)
    assert outcomes(metrics) == ({"retried": 1} if len(script) > 1 else {})


def test_the_time_that_is_left_shrinks() -> None:
    clock = Clock()

    def pass_time() -> None:
        clock.now_s += 0.75

    scripted = ScriptedReplicas([FIRST, DIED], [DIED], [LAST], on_call=pass_time)
    run(Failover(scripted, name="m", metrics=Metrics(), clock=clock), limited(1000))
    assert [call.request.params.max_time_ms for call in scripted.calls] == [1000, 250, 1]


def test_other_errors_are_not_retried() -> None:
    scripted = ScriptedReplicas([GenserveError("no")])
    with pytest.raises(GenserveError, match="no"):
        run(Failover(scripted, name="m", metrics=Metrics()), CALL)
    assert len(scripted.calls) == 1


def test_a_closed_call_is_closed_at_the_replica() -> None:
    scripted = ScriptedReplicas([FIRST, LAST])

    async def close() -> None:
        async with aclosing(Failover(scripted, name="m", metrics=Metrics()).generate(CALL)) as items:
            await anext(items)
        assert scripted.num_closed == 1

    asyncio.run(close())


RESPONSE = (InferenceResponse(), False)
FINAL = (InferenceResponse(), True)


def test_an_inference_is_repeated_before_its_first_response() -> None:
    scripted, metrics = ScriptedReplicas([DIED], [RESPONSE, FINAL]), Metrics()
    call = Call(identity="", request=InferenceRequest(model_name="m", inputs={}))
    assert run(Failover(scripted, name="m", metrics=metrics), call) == [RESPONSE, FINAL]
    assert outcomes(metrics) == {"retried": 1}


@pytest.mark.parametrize(
    ("script", "correlation_id", "words"),
    [
        ([RESPONSE, DIED], 0, "1 of its responses have been sent"),
        ([DIED], 5, "it had the state of sequence 5"),
    ],
)
def test_other_inferences_fail(script, correlation_id, words) -> None:
    scripted, metrics = ScriptedReplicas(script), Metrics()
    request = InferenceRequest(model_name="m", inputs={}, correlation_id=correlation_id)
    with pytest.raises(ReplicaLost, match=words):
        run(Failover(scripted, name="m", metrics=metrics), Call(identity="", request=request))
    assert len(scripted.calls) == 1
    assert outcomes(metrics) == {"failed": 1}
