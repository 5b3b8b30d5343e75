"""The calls of an ingress over real connections, to replicas that answer by a script."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trustme

from genserve.deploy.calls import call_protocol, call_server, engine_progress, routed_replicas
from genserve.deploy.calls.call_channel import CallChannel
from genserve.deploy.calls.call_protocol import CallPort, Frame, HandshakeFailed
from genserve.deploy.calls.call_server import CallServer
from genserve.deploy.calls.message_codec import encoded
from genserve.deploy.calls.routed_replicas import RoutedReplicas
from genserve.deploy.replica.description import ReplicaStatus
from genserve.deploy.replica.replica_load import ReplicaLoad
from genserve.deploy.replica_messages import Call
from genserve.engine.generation_request import GenerationRequest
from genserve.errors import (
    Closed,
    ContextLengthExceeded,
    GenserveError,
    ModelFailed,
    ModelNotReady,
    Overloaded,
    ReplicaLost,
    VersionReplaced,
)
from genserve.inference import InferenceRequest
from genserve.sampling.sampling_params import SamplingParams

CALL = Call(
    identity="",
    request=GenerationRequest(
        model="m", prompt="", prompt_token_ids=(5,), params=SamplingParams(), seeds=(1,)
    ),
)


def asking(**fields: Any) -> Call[GenerationRequest]:
    """Return the call with other fields of its request."""
    return replace(CALL, request=replace(CALL.request, **fields))


PAUSE = object()
FULL = Overloaded("full", retry_after_s=1.0, reason="max_queue")
LATE = Overloaded("too late", retry_after_s=1.0, reason="queue_timeout")


class Script:
    """A replica each call of which yields these items; PAUSE goes on with `resumed`, errors are raised.

    Attributes:
        calls: the arguments of the calls so far.
        num_yielded: how many items each of them has yielded.
        closed: set when a call has ended, however it did.
    """

    def __init__(self, name: str, *items: object) -> None:
        self.id = name
        self.items = items
        self.calls: list[Any] = []
        self.num_yielded: list[int] = []
        self.resumed, self.closed = asyncio.Event(), asyncio.Event()

    async def generate(self, call: object) -> AsyncIterator[Any]:
        number = len(self.calls)
        self.calls.append(call)
        self.num_yielded.append(0)
        try:
            for item in self.items:
                if isinstance(item, BaseException):
                    raise item
                if item is PAUSE:
                    await self.resumed.wait()
                else:
                    self.num_yielded[number] += 1
                    yield item
        finally:
            self.closed.set()

    infer = generate


class Fleet:
    """Scripted replicas that listen, and an ingress's view of them.

    Attributes:
        statuses: the statuses of the replicas that answer in time.
        is_silent: no replica can be asked.
    """

    def __init__(self, *scripts: Script, **weights: float) -> None:
        self.servers = {script.id: CallServer(script) for script in scripts}    # type: ignore[arg-type]
        self.statuses: dict[str, ReplicaStatus] = {}
        self.is_silent = False
        self.replicas = RoutedReplicas(self._broadcast, weights)

    async def __aenter__(self) -> Fleet:
        for name, server in self.servers.items():
            port = await server.start("127.0.0.1")
            load = ReplicaLoad(block_size=4, num_blocks=100)
            self.statuses[name] = ReplicaStatus(identity="", load=load, port=port)
        await self.look()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.replicas.close()
        for server in self.servers.values():
            await server.stop()
            server.close()
        await asyncio.sleep(0)      # the connections close

    async def _broadcast(self, _method: str) -> list[Any]:
        if self.is_silent:
            raise ModelNotReady("no replica can be asked")
        return list(self.statuses.values())

    async def look(self) -> list[Any]:
        """Ask all for their status, and connect to those that are new."""
        return await self.replicas.broadcast("status")

    def set(self, name: str, **changes: Any) -> None:
        """Change the status of a replica."""
        self.statuses[name] = replace(self.statuses[name], **changes)

    async def received(self, call: Call[GenerationRequest] = CALL) -> list[Any]:
        return [item async for item in self.replicas.generate(call)]


async def received(*items: object) -> list[Any]:
    async with Fleet(Script("a", *items)) as fleet:
        return await fleet.received()


async def test_items_cross_in_order_whatever_their_size() -> None:
    large = [b"x" * 3_000_000, "y"]
    assert await received(["a"], large, ["b"]) == [["a"], large, ["b"]]


async def test_calls_of_one_connection_run_at_the_same_time() -> None:
    a = Script("a", ["first"], PAUSE, ["second"])
    async with Fleet(a) as fleet:
        waiting = fleet.replicas.generate(CALL)
        assert await anext(waiting) == ["first"]
        other = fleet.replicas.generate(CALL)
        assert await anext(other) == ["first"]
        a.resumed.set()
        assert [item async for item in waiting] == [item async for item in other] == [["second"]]


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ContextLengthExceeded("too long", field="prompt"), ContextLengthExceeded, "too long"),
        (Closed("stops"), Closed, "stops"),
        (ModelFailed("x" * 3_000_000), ModelFailed, "x{3000000}"),
        (ZeroDivisionError(), ModelFailed, "the call of a replica failed"),
        (asyncio.CancelledError(), Closed, "stopped before the answer was complete"),
    ],
)
async def test_errors_cross(error: BaseException, kind: type[GenserveError], message: str) -> None:
    with pytest.raises(kind, match=message) as raised:
        await received(["a"], error)
    if isinstance(error, GenserveError):
        assert raised.value.field == error.field


class Unavailable(Overloaded):
    """An error class of a model.py, which the ingress does not have."""

    def __init__(self) -> None:
        super().__init__("no tool", retry_after_s=3.0)
        self.cause = threading.Lock()       # cannot be pickled


async def test_an_error_class_of_a_model_crosses_as_that_of_genserve_which_it_extends() -> None:
    a = Script("a", ["a"], Unavailable())
    async with Fleet(a) as fleet:
        with pytest.raises(Overloaded, match="no tool") as raised:
            await fleet.received()
        assert type(raised.value) is Overloaded
        assert raised.value.retry_after_s == 3.0
        a.items = (["b"],)
        assert await fleet.received() == [["b"]], "the connection is as it was"


async def test_a_call_that_is_closed_ends_at_the_replica() -> None:
    a = Script("a", ["a"], PAUSE)
    async with Fleet(a) as fleet:
        async with aclosing(fleet.replicas.generate(CALL)) as items:    # type: ignore[type-var]
            await anext(items)
        await a.closed.wait()


async def test_an_ingress_that_ends_ends_its_calls() -> None:
    a = Script("a", ["a"], PAUSE)
    async with Fleet(a) as fleet:
        items = fleet.replicas.generate(CALL)
        await anext(items)
        fleet.replicas.close()
        await a.closed.wait()
        with pytest.raises(ReplicaLost):
            await anext(items)


async def test_a_call_whose_client_reads_slowly_holds_up_no_other() -> None:
    large = b"x" * 1_000_000
    a = Script("a", *[large] * 64)
    async with Fleet(a) as fleet:
        slow = fleet.replicas.generate(CALL)
        await anext(slow)
        assert len(await fleet.received()) == 64
        assert a.num_yielded == [3, 64], "the window holds two, and one waits for room"
        assert len([item async for item in slow]) == 63


async def test_tokens_pass_between_the_chunks_of_a_large_item() -> None:
    a = Script("a", b"x" * 50_000_000)
    async with Fleet(a) as fleet:
        [channel], [connection] = fleet.replicas._channels.values(), fleet.servers["a"].connections
        channel._transport.pause_reading()
        large = asyncio.create_task(fleet.received())
        while connection._writable.is_set():
            await asyncio.sleep(0)
        a.items = (["token"],)
        small = asyncio.create_task(fleet.received())
        while len(a.calls) < 2:
            await asyncio.sleep(0)
        channel._transport.resume_reading()
        assert await small == [["token"]]
        assert not large.done()
        [item] = await large
        assert len(item) == 50_000_000


async def test_a_call_that_is_closed_within_a_large_item_leaves_nothing() -> None:
    a = Script("a", b"x" * 50_000_000)
    async with Fleet(a) as fleet:
        [channel] = fleet.replicas._channels.values()
        reading = asyncio.create_task(fleet.received())
        while not channel._parts:
            await asyncio.sleep(0)
        reading.cancel()
        await a.closed.wait()
        while channel._parts:
            await asyncio.sleep(0)
        a.items = (["b"],)
        assert await fleet.received() == [["b"]]


class Touch:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self._path,)


async def test_a_message_that_cannot_be_read_fails_its_call_alone(tmp_path: Path) -> None:
    a = Script("a", ["first"], PAUSE, ["second"])
    async with Fleet(a) as fleet:
        waiting = fleet.replicas.generate(CALL)
        assert await anext(waiting) == ["first"]
        for item in (Touch(tmp_path / "made"), threading.Lock()):
            a.items = (item,)
            with pytest.raises(ModelFailed):
                await fleet.received()
        with pytest.raises(ModelFailed, match="cannot read the call"):
            await fleet.received(asking(model=Touch(tmp_path / "made")))     # type: ignore[arg-type]
        assert not (tmp_path / "made").exists()
        a.resumed.set()
        assert [item async for item in waiting] == [["second"]]


def frame(kind: Frame, content: bytes) -> bytes:
    return call_protocol._HEADER.pack(len(content), kind, 0) + content


@pytest.mark.parametrize("greets", [True, False])
async def test_nothing_is_read_of_who_does_not_know_the_secret(*, greets: bool) -> None:
    a = Script("a", ["a"])
    async with Fleet(a) as fleet:
        port = fleet.statuses["a"].port
        assert port is not None
        reader, writer = await asyncio.open_connection(port.host, port.port)
        if greets:
            writer.write(frame(Frame.HELLO, call_protocol.new_hello()))
            writer.write(frame(Frame.PROOF, bytes(32)))
        writer.write(frame(Frame.CALL, b"".join(map(bytes, encoded(("generate", CALL))))))
        assert port.secret not in await reader.read(), "and it is closed"
        assert not a.calls
        writer.close()
        await writer.wait_closed()


class Impostor:
    """What listens on the port of a replica that has ended, and answers what it gets by a script."""

    def __init__(self, answer: Callable[[bytes], bytes]) -> None:
        self.received = bytearray()
        self._answer = answer
        self._serving: set[asyncio.Task[Any] | None] = set()

    async def __aenter__(self) -> CallPort:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return CallPort(replica="a", host="127.0.0.1", port=port, secret=bytes(range(32)))

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await asyncio.gather(*filter(None, self._serving))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._serving.add(asyncio.current_task())
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                self.received += data
                writer.write(self._answer(data))
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


def of_version(version: str) -> bytes:
    hello = call_protocol.new_hello()
    return hello.replace(call_protocol.__version__.encode(), version.encode())


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (frame(Frame.HELLO, call_protocol.new_hello()) + frame(Frame.PROOF, bytes(32)), "not know the"),
        (frame(Frame.HELLO, of_version("9.8.7")), "runs genserve 9.8.7"),
        (frame(Frame.HELLO, b"{}"), "its hello"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not speak the protocol"),
    ],
)
async def test_an_ingress_tells_nothing_to_what_is_not_the_replica(answer: bytes, reason: str) -> None:
    impostor = Impostor(lambda _: answer)
    async with impostor as port:
        with pytest.raises(HandshakeFailed, match=reason):
            await CallChannel.open(port, on_end=lambda: None)
        size, kind, _ = call_protocol._HEADER.unpack_from(impostor.received)
        assert (kind, size) == (Frame.HELLO, len(impostor.received) - call_protocol._HEADER.size)
        assert port.secret not in impostor.received


async def test_an_ingress_cannot_be_told_its_own_proof() -> None:
    """The role of a side is part of its proof, so a proof that is sent back proves nothing."""
    secret = bytes(32)
    hellos = call_protocol.new_hello(), call_protocol.new_hello()
    sent = call_protocol.proof(secret, "ingress", hellos=hellos)
    with pytest.raises(HandshakeFailed):
        call_protocol.check_proof(sent, secret, "replica", hellos=hellos)


async def test_a_replica_of_another_version_gets_no_calls(caplog: pytest.LogCaptureFixture) -> None:
    other = Impostor(lambda _: frame(Frame.HELLO, of_version("9.8.7")))
    async with Fleet(Script("b", ["b"])) as fleet, other as port:
        fleet.statuses["a"] = replace(fleet.statuses["b"], port=port)
        for _ in range(3):
            await fleet.look()
            assert await fleet.received() == [["b"]]
        assert sum("runs genserve 9.8.7" in line for line in caplog.messages) == 1


async def test_a_replica_tells_an_ingress_of_another_version_its_own() -> None:
    async with Fleet(Script("a")) as fleet:
        port = fleet.statuses["a"].port
        assert port is not None
        reader, writer = await asyncio.open_connection(port.host, port.port)
        writer.write(frame(Frame.HELLO, of_version("9.8.7")))
        assert call_protocol.__version__.encode() in await reader.read()
        writer.close()
        await writer.wait_closed()


async def test_connections_that_are_being_opened_end_with_the_ingress() -> None:
    silent = Impostor(lambda _: b"")
    async with Fleet() as fleet, silent as port:
        fleet.statuses = {"a": ReplicaStatus(identity="", load=ReplicaLoad(), port=port)}
        looking = asyncio.create_task(fleet.look())
        while not silent.received:
            await asyncio.sleep(0)
        [opening] = fleet.replicas._connecting.values()
        fleet.replicas.close()
        await asyncio.wait({opening})
        assert await looking == []
        assert opening.cancelled()


async def test_a_replica_that_does_not_greet_holds_up_no_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routed_replicas, "_CONNECTING_S", 0.001)
    silent = Impostor(lambda _: b"")
    async with Fleet(Script("a", ["a"])) as fleet, silent as port:
        while "a" not in fleet.replicas._channels:
            await fleet.look()
        fleet.statuses["b"] = ReplicaStatus(identity="", load=ReplicaLoad(), port=replace(port, replica="b"))
        for _ in range(3):
            assert [status.port.replica for status in await fleet.look()] == ["a"]
            assert "b" in fleet.replicas._connecting, "and it may answer yet"
        fleet.replicas.close()


def test_a_secret_is_not_shown() -> None:
    assert "secret" not in repr(CallPort(replica="a", host="127.0.0.1", port=1, secret=b"secret"))


async def test_a_lost_replica_ends_its_calls_and_gets_no_more() -> None:
    a = Script("a", ["a"], PAUSE)
    async with Fleet(a) as fleet, Fleet(Script("b", ["b"])) as others:
        items = fleet.replicas.generate(CALL)
        await anext(items)
        fleet.servers["a"].close()
        with pytest.raises(ReplicaLost) as raised:
            await anext(items)
        assert raised.value.code == "replica_lost"
        waiting = asyncio.create_task(fleet.received())     # nobody takes it yet
        await asyncio.sleep(0)
        fleet.statuses = others.statuses
        await fleet.look()
        assert await waiting == [["b"]]


async def test_a_call_at_the_moment_of_a_loss_goes_to_another_replica() -> None:
    """The connection closes before its channel gets the event."""
    a, b = Script("a", ["a"]), Script("b", ["b"])
    async with Fleet(a, b) as fleet:
        fleet.set("b", load=BUSY)
        await fleet.look()
        assert await fleet.received() == [["a"]]
        fleet.replicas._channels["a"]._transport.abort()
        assert await fleet.received() == [["b"]]


BUSY = ReplicaLoad(running=50, block_size=4, num_blocks=100)


async def test_a_replica_that_stops_ends_its_answers_and_gets_no_more_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call_server, "_QUIET_S", 0.0)
    a, b = Script("a", ["a"], PAUSE, ["end"]), Script("b", ["b"])
    async with Fleet(a, b) as fleet:
        fleet.set("b", load=BUSY)
        await fleet.look()
        items = fleet.replicas.generate(CALL)
        assert await anext(items) == ["a"]
        stopping = asyncio.create_task(fleet.servers["a"].stop())
        await stops(fleet, "a")
        assert await fleet.received() == [["b"]]
        assert not stopping.done()
        a.resumed.set()
        assert [item async for item in items] == [["end"]]
        await stopping


async def stops(fleet: Fleet, name: str) -> None:
    """Wait until the ingress knows that a replica stops."""
    while not fleet.replicas._channels[name].is_stopping:
        await asyncio.sleep(0)


async def test_a_replica_that_stops_takes_calls_while_no_other_one_has_its_identity() -> None:
    """The ingress may not have loaded the next version yet."""
    a, b = Script("a", ["a"]), Script("b", ["b"])
    async with Fleet(a, b) as fleet:
        fleet.set("b", identity="next")
        await fleet.look()
        stopping = asyncio.create_task(fleet.servers["a"].stop())
        await stops(fleet, "a")
        assert await fleet.received() == [["a"]]
        fleet.set("b", identity="")
        await fleet.look()
        assert await fleet.received() == [["b"]]
        fleet.replicas.close()  # afterwards no ingress could call it
        await stopping


async def test_an_ingress_that_connects_to_a_replica_that_stops_learns_it() -> None:
    async with Fleet(Script("a")) as fleet:
        fleet.servers["a"].stopping = True
        port = fleet.statuses["a"].port
        assert port is not None
        ended = asyncio.Event()
        channel = await CallChannel.open(port, on_end=ended.set)
        await ended.wait()
        assert channel.is_stopping
        assert not channel.is_closing
        channel.close()


async def test_a_replica_that_stops_rejects_what_reaches_it_nevertheless() -> None:
    async with Fleet(Script("a", ["a"])) as fleet:
        fleet.servers["a"].rejecting = True
        with pytest.raises(Closed, match="is stopping"):
            await fleet.received()


async def test_a_call_reaches_replicas_of_its_identity_alone() -> None:
    scripts = [Script(name, [name]) for name in "abc"]
    async with Fleet(*scripts) as fleet:
        fleet.set("a", identity="old", load=BUSY)
        fleet.set("b", identity="new")
        fleet.set("c", identity="new")
        await fleet.look()
        for _ in range(8):
            assert await fleet.received(replace(CALL, identity="old")) == [["a"]]
            assert await fleet.received(replace(CALL, identity="new")) in ([["b"]], [["c"]])
        with pytest.raises(VersionReplaced):
            await fleet.received(replace(CALL, identity="older"))


async def test_a_call_waits_for_its_identity_until_only_others_are_left() -> None:
    a, b = Script("a", ["a"]), Script("b", ["b"])
    async with Fleet(a, b) as fleet:
        fleet.set("b", identity="next")
        await fleet.look()
        fleet.servers["a"].close()
        del fleet.statuses["a"]
        while "a" in fleet.replicas._channels:
            await asyncio.sleep(0)
        waiting = asyncio.create_task(fleet.received())
        await asyncio.sleep(0)
        assert not waiting.done(), "the replica may come back"
        for _ in range(routed_replicas._MAX_MISSED):
            await fleet.look()
        with pytest.raises(VersionReplaced):
            await waiting


OF_SEQUENCE = Call(
    identity="", request=InferenceRequest(model_name="m", inputs={}, correlation_id=7)
)


async def test_answers_that_are_late_change_nothing() -> None:
    """While the connections live, so do the replicas, with their prefixes, sequences and calls."""
    scripts = [Script(name, [name], PAUSE) for name in "abc"]
    async with Fleet(*scripts) as fleet:
        first, second = fleet.replicas.generate(CALL), fleet.replicas.infer(OF_SEQUENCE)
        [home], [of_sequence] = await anext(first), await anext(second)
        statuses, sent = fleet.statuses, dict(fleet.replicas._ranking._sent_to)
        assert len(sent) == 2
        for answering in ({"a"}, {"b"}, {"c"}, set(), {"a"}, {"a"}, {"a"}, {"a"}):
            fleet.is_silent = not answering
            fleet.statuses = {name: statuses[name] for name in answering}
            assert len(await fleet.look()) == 3
            assert fleet.replicas._ranking._sent_to == sent
            again = fleet.replicas.infer(OF_SEQUENCE)
            assert await anext(again) == [of_sequence]
            await again.aclose()
        assert home in "abc"


async def test_the_calls_of_a_replica_that_hangs_go_on_at_others() -> None:
    a, b = Script("a", ["a"], PAUSE, ["end"]), Script("b", ["b"])
    async with Fleet(a, b) as fleet:
        fleet.set("b", load=BUSY, is_ready=False)
        await fleet.look()
        items = fleet.replicas.generate(CALL)
        assert await anext(items) == ["a"]
        fleet.set("a", is_ready=False)
        await fleet.look()
        a.resumed.set()
        assert await anext(items) == ["end"], "there is no other one"
        a.resumed.clear()
        items = fleet.replicas.generate(CALL)
        assert await anext(items) == ["a"]
        fleet.set("b", is_ready=True)
        await fleet.look()  # connects to it
        await fleet.look()
        with pytest.raises(ReplicaLost):
            await anext(items)
        assert await fleet.received() == [["b"]]
        assert len(await fleet.look()) == 1
        fleet.set("a", is_ready=True)
        assert len(await fleet.look()) == 2, "it goes on"


async def test_a_replica_whose_engine_begins_no_steps_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica without steps hangs, whatever its status says; while it has steps, a call may wait."""
    monkeypatch.setattr(engine_progress, "PROGRESS_S", 0.0)
    a, b = Script("a", ["a"], PAUSE), Script("b", ["b"])
    async with Fleet(a, b) as fleet:
        fleet.set("b", load=BUSY)
        await fleet.look()
        items = fleet.replicas.generate(CALL)
        assert await anext(items) == ["a"]
        monkeypatch.setattr(engine_progress, "_LONGER_THAN_BEFORE", 0)
        for turn in range(1, 4):
            fleet.set("a", num_turns=turn)
            assert len(await fleet.look()) == 2
        await fleet.look()
        with pytest.raises(ReplicaLost):
            await anext(items)
        for _ in range(2):
            assert len(await fleet.look()) == 1
        fleet.set("a", num_turns=9)
        assert len(await fleet.look()) == 2, "it goes on"


async def test_a_sequence_stays_with_its_replica_while_that_cannot_be_reached() -> None:
    scripts = [Script(name, [name]) for name in "abc"]
    async with Fleet(*scripts) as fleet:
        [[home]] = [item async for item in fleet.replicas.infer(OF_SEQUENCE)]
        fleet.replicas._channels[home].close()
        with pytest.raises(ModelNotReady, match="that holds the sequence cannot be reached"):
            await anext(fleet.replicas.infer(OF_SEQUENCE))
        while home in fleet.replicas._channels:
            await asyncio.sleep(0)
        await fleet.look()
        assert [item async for item in fleet.replicas.infer(OF_SEQUENCE)] == [[home]]


async def test_a_replica_is_forgotten_when_it_has_neither_answers_nor_a_connection() -> None:
    a, b = Script("a", ["a"]), Script("b", ["b"])
    async with Fleet(a, b) as fleet:
        fleet.servers["a"].close()
        del fleet.statuses["a"]
        while "a" in fleet.replicas._channels:
            await asyncio.sleep(0)
        assert [status.port.replica for status in await fleet.look()] == ["b"]
        assert "a" in fleet.replicas._statuses, "its answer may be late, and its connection come back"
        for _ in range(routed_replicas._MAX_MISSED):
            await fleet.look()
        assert fleet.replicas._statuses.keys() == fleet.replicas._ranking._kept == {"b"}


async def test_a_call_that_a_replica_has_no_room_for_goes_to_another_one() -> None:
    a, b = Script("a", FULL), Script("b", ["b"])
    async with Fleet(a, b) as fleet:
        for _ in range(4):
            assert await fleet.received() == [["b"]]
        b.items = (FULL,)
        with pytest.raises(Overloaded, match="full"):
            await fleet.received()
        a.items = b.items = (["first"], FULL)   # an answer that was already running
        num_calls = len(a.calls) + len(b.calls)
        with pytest.raises(Overloaded):
            await fleet.received()
        assert len(a.calls) + len(b.calls) == num_calls + 1


def with_places(fleet: Fleet, **num_free: int | None) -> None:
    for name, places in num_free.items():
        status = fleet.statuses[name]
        fleet.statuses[name] = replace(status, load=replace(status.load, num_free=places))


async def test_a_request_is_sent_to_three_replicas_and_then_to_one_while_all_are_full() -> None:
    scripts = [Script(name, FULL) for name in "abcdef"]
    async with Fleet(*scripts) as fleet:
        num_calls = []
        for _ in range(3):
            with pytest.raises(Overloaded, match="full"):
                await fleet.received()
            num_calls.append(sum(len(script.calls) for script in scripts))
        assert num_calls == [3, 6, 7]
        assert fleet.replicas.load("").num_free == 0
        scripts[4].items = (["e"],)
        with_places(fleet, **dict.fromkeys("abcdf", 0), e=5)
        await fleet.look()
        assert await fleet.received() == [["e"]]


async def test_an_answer_that_has_begun_goes_on_at_a_replica_that_is_full_to_others() -> None:
    a = Script("a", FULL)
    async with Fleet(a) as fleet:
        with pytest.raises(Overloaded):
            await fleet.received()
        a.items = (["a"],)
        assert await fleet.received(asking(resumed_token_ids=((1,),))) == [["a"]]


async def test_a_request_that_has_waited_too_long_is_not_queued_again() -> None:
    scripts = [Script(name, LATE) for name in "abc"]
    async with Fleet(*scripts) as fleet:
        with pytest.raises(Overloaded, match="too late"):
            await fleet.received()
        assert sum(len(script.calls) for script in scripts) == 1
        assert fleet.replicas.load("").num_free is None, "which says nothing about the next one"


async def test_the_requests_of_a_sequence_go_to_one_replica_even_if_that_is_full() -> None:
    scripts = [Script(name, FULL) for name in "abc"]
    async with Fleet(*scripts) as fleet:
        for _ in range(3):
            with pytest.raises(Overloaded):
                await anext(fleet.replicas.infer(OF_SEQUENCE))
        assert sorted(len(script.calls) for script in scripts) == [0, 0, 3]


async def test_prompts_that_begin_alike_go_to_one_replica_until_it_has_too_much_to_do() -> None:
    scripts = [Script(name, ["x"], PAUSE) for name in "abc"]
    async with Fleet(*scripts, decode_tokens=8.0) as fleet:
        prompt = asking(prompt_token_ids=tuple(range(40)))
        open_calls = []
        for _ in range(4):
            items = fleet.replicas.generate(prompt)
            await anext(items)
            open_calls.append(items)
        assert sorted(len(script.calls) for script in scripts) == [0, 0, 4]
        for _ in range(10):
            items = fleet.replicas.generate(prompt)
            await anext(items)
            open_calls.append(items)
        assert min(len(script.calls) for script in scripts) > 0
        for script in scripts:
            script.resumed.set()
        for items in open_calls:
            assert [item async for item in items] == []
        assert fleet.replicas._ranking._sent_to == {}


async def test_a_replica_that_vanishes_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replica sends nothing, not even an error."""
    monkeypatch.setattr(call_protocol, "SIGN_OF_LIFE_S", 0.001)     # how often both sides look
    async with Fleet(Script("a", ["a"], PAUSE)) as fleet:
        items = fleet.replicas.generate(CALL)
        await anext(items)
        [connection] = fleet.servers["a"].connections
        silence(connection)
        monkeypatch.setattr(call_protocol, "SILENCE_S", 0.0)
        with pytest.raises(ReplicaLost):
            await anext(items)


async def test_the_calls_of_an_ingress_that_vanishes_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_protocol, "SIGN_OF_LIFE_S", 0.001)
    a = Script("a", ["a"], PAUSE)
    async with Fleet(a) as fleet:
        items = fleet.replicas.generate(CALL)
        await anext(items)
        [channel] = fleet.replicas._channels.values()
        silence(channel)
        monkeypatch.setattr(call_protocol, "SILENCE_S", 0.0)
        await a.closed.wait()


def silence(side: call_protocol.MessageProtocol) -> None:
    """Stop one side of a connection from sending and checking signs of life."""
    assert side._checking is not None
    side._checking.cancel()


async def test_signs_of_life_arrive_while_a_call_has_no_item(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_protocol, "SIGN_OF_LIFE_S", 0.001)
    a = Script("a", ["a"], PAUSE, ["end"])
    async with Fleet(a) as fleet:
        items = fleet.replicas.generate(CALL)
        await anext(items)
        [channel] = fleet.replicas._channels.values()
        last_s = channel.heard_s
        while channel.heard_s == last_s:
            await asyncio.sleep(0)
        a.resumed.set()
        assert [item async for item in items] == [["end"]]


async def test_a_call_that_no_replica_takes_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routed_replicas, "MAX_WAIT_S", 0.001)
    async with Fleet() as fleet:
        with pytest.raises(ModelNotReady, match="no replica"):
            await fleet.received()


async def test_only_so_many_calls_wait_for_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routed_replicas, "MAX_WAITING", 2)
    a = Script("a", ["a"])
    async with Fleet(a) as fleet:
        fleet.replicas._channels["a"].close()
        waiting = [asyncio.create_task(fleet.received()) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(ModelNotReady, match=r"\b2\b") as raised:
            await fleet.received()
        assert raised.value.retry_after_s > 0
        while "a" not in fleet.replicas._channels or fleet.replicas._channels["a"].is_closing:
            await fleet.look()
        assert await asyncio.gather(*waiting) == [[["a"]]] * 2


async def test_a_replica_that_cannot_be_reached_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    async with Fleet(Script("a", ["a"])) as fleet:
        port = fleet.statuses["a"].port
        assert port is not None
        unreachable = replace(port, replica="b", port=1)
        fleet.statuses = {"b": ReplicaStatus(identity="", load=ReplicaLoad(), port=unreachable)}
        await fleet.look()
        assert "cannot be called" in caplog.text
        moved = replace(port, replica="b")
        fleet.statuses = {"b": ReplicaStatus(identity="", load=ReplicaLoad(), port=moved)}
        await fleet.look()
        assert await fleet.received() == [["a"]]


@pytest.fixture
def tls_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "server.pem")
    certificate.private_key_pem.write_to_path(tmp_path / "server.key")
    monkeypatch.setenv("RAY_USE_TLS", "1")
    monkeypatch.setenv("RAY_TLS_CA_CERT", str(tmp_path / "ca.pem"))
    monkeypatch.setenv("RAY_TLS_SERVER_CERT", str(tmp_path / "server.pem"))
    monkeypatch.setenv("RAY_TLS_SERVER_KEY", str(tmp_path / "server.key"))


@pytest.mark.usefixtures("tls_cluster")
async def test_connections_are_encrypted_in_a_cluster_that_uses_tls() -> None:
    async with Fleet(Script("a", ["a"])) as fleet:
        assert await fleet.received() == [["a"]]
        port = fleet.statuses["a"].port
        assert port is not None
        reader, writer = await asyncio.open_connection(port.host, port.port)
        writer.write(frame(Frame.HELLO, call_protocol.new_hello()))
        assert await reader.read() == b"", "it is no handshake of TLS"
        writer.close()


async def test_what_a_transport_hands_over_after_a_wrong_proof_is_not_read() -> None:
    """A transport may pass data on while it closes."""
    a = Script("a", ["a"])
    async with Fleet(a) as fleet:
        port = fleet.statuses["a"].port
        assert port is not None
        reader, writer = await asyncio.open_connection(port.host, port.port)
        connection = call_server._Connection(fleet.servers["a"])
        connection.connection_made(writer.transport)    # any one that can be closed
        connection.data_received(frame(Frame.PROOF, bytes(32)))
        connection.data_received(frame(Frame.CALL, b"".join(map(bytes, encoded(("generate", CALL))))))
        await asyncio.sleep(0)
        assert not a.calls
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
