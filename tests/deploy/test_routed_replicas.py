"""The calls of an ingress over real connections, to replicas that answer by a script."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trustme

from genserve.deploy.calls import call_protocol, call_server, routed_replicas
from genserve.deploy.calls.call_protocol import SECRET_BYTES, CallPort
from genserve.deploy.calls.call_server import CallServer
from genserve.deploy.calls.routed_replicas import RoutedReplicas
from genserve.deploy.replica.description import ReplicaStatus
from genserve.deploy.replica.replica_load import ReplicaLoad
from genserve.deploy.replica_messages import GenerationCall
from genserve.errors import (
    Closed,
    ContextLengthExceeded,
    GenserveError,
    ModelFailed,
    ModelNotReady,
    Overloaded,
    ReplicaLost,
)
from genserve.inference import InferenceRequest
from genserve.sampling.sampling_params import SamplingParams

CALL = GenerationCall(
    model="m", prompt="", prompt_token_ids=(5,), params=SamplingParams(), seeds=(1,)
)
PAUSE = object()
FULL = Overloaded("full", retry_after_s=1.0)


class Script:
    """A replica each call of which yields these items; PAUSE goes on with `resumed`, errors are raised.

    Attributes:
        calls: the arguments of the calls so far.
        closed: set when a call has ended, however it did.
    """

    def __init__(self, name: str, *items: object) -> None:
        self.id = name
        self.items = items
        self.calls: list[Any] = []
        self.resumed, self.closed = asyncio.Event(), asyncio.Event()

    async def generate(self, call: object) -> AsyncIterator[Any]:
        self.calls.append(call)
        try:
            for item in self.items:
                if isinstance(item, BaseException):
                    raise item
                if item is PAUSE:
                    await self.resumed.wait()
                else:
                    yield item
        finally:
            self.closed.set()

    infer = generate


class Fleet:
    """Scripted replicas that listen, and an ingress's view of them."""

    def __init__(self, *scripts: Script, **weights: float) -> None:
        self.servers = {script.id: CallServer(script) for script in scripts}    # type: ignore[arg-type]
        self.statuses: dict[str, ReplicaStatus] = {}
        self.replicas = RoutedReplicas(self._broadcast, weights)

    async def __aenter__(self) -> Fleet:
        for name, server in self.servers.items():
            port = await server.start("127.0.0.1")
            load = ReplicaLoad(block_size=4, num_blocks=100)
            self.statuses[name] = ReplicaStatus(digest="", load=load, port=port)
        await self.look()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.replicas.close()
        for server in self.servers.values():
            await server.stop()
            server.close()
        await asyncio.sleep(0)      # the connections close

    async def _broadcast(self, _method: str) -> list[Any]:
        return list(self.statuses.values())

    async def look(self) -> None:
        """Ask all for their status, and connect to those that are new."""
        await self.replicas.broadcast("status")
        await asyncio.gather(*self.replicas._connecting.values())

    async def received(self, call: GenerationCall = CALL) -> list[Any]:
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


async def test_a_replica_waits_for_an_ingress_that_does_not_read() -> None:
    large = b"x" * 1_000_000
    a = Script("a", *[large] * 64)
    async with Fleet(a) as fleet:
        items = fleet.replicas.generate(CALL)
        await anext(items)
        [channel] = fleet.replicas._channels.values()
        channel._transport.pause_reading()
        [connection] = fleet.servers["a"].connections
        while connection._writable.is_set():
            await asyncio.sleep(0)
        assert not a.closed.is_set()
        channel._transport.resume_reading()
        assert len([item async for item in items]) == 63


class Touch:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self._path,)


async def test_nothing_is_unpickled_of_who_does_not_know_the_secret(tmp_path: Path) -> None:
    async with Fleet(Script("a")) as fleet:
        port = fleet.statuses["a"].port
        assert port is not None
        message = pickle.dumps(Touch(tmp_path / "made"))
        framed = len(message).to_bytes(8) + message
        for secret, is_closed in ((bytes(SECRET_BYTES), True), (port.secret, False)):
            reader, writer = await asyncio.open_connection(port.host, port.port)
            writer.write(secret + framed)
            if is_closed:
                assert await reader.read() == b""
            while not is_closed and not (tmp_path / "made").exists():
                await asyncio.sleep(0)
            assert (tmp_path / "made").exists() != is_closed
            writer.close()
            await writer.wait_closed()


def test_a_secret_is_not_shown() -> None:
    assert "secret" not in repr(CallPort(replica="a", host="127.0.0.1", port=1, secret=b"secret"))


async def test_a_lost_replica_ends_its_calls_and_gets_no_more() -> None:
    a, b = Script("a", ["a"], PAUSE), Script("b", ["b"])
    async with Fleet(a, b) as fleet:
        del fleet.statuses["b"]
        await fleet.look()
        items = fleet.replicas.generate(CALL)
        await anext(items)
        fleet.servers["a"].close()
        with pytest.raises(ReplicaLost, match="died"):
            await anext(items)
        waiting = asyncio.create_task(fleet.received())     # nobody takes it yet
        await asyncio.sleep(0)
        fleet.statuses = {"b": ReplicaStatus(digest="", load=ReplicaLoad(), port=await port_of(fleet, "b"))}
        await fleet.look()
        assert await waiting == [["b"]]


async def test_a_call_at_the_moment_of_a_loss_goes_to_another_replica() -> None:
    """A connection closes before its channel is told so."""
    a, b = Script("a", ["a"]), Script("b", ["b"])
    async with Fleet(a, b) as fleet:
        busy = replace(fleet.statuses["b"], load=ReplicaLoad(running=50, block_size=4, num_blocks=100))
        fleet.statuses["b"] = busy
        await fleet.look()
        assert await fleet.received() == [["a"]]
        fleet.replicas._channels["a"]._transport.abort()
        assert await fleet.received() == [["b"]]


async def port_of(fleet: Fleet, name: str) -> CallPort:
    server = fleet.servers[name]
    assert server._server is not None
    port: int = server._server.sockets[0].getsockname()[1]
    return CallPort(replica=name, host="127.0.0.1", port=port, secret=server.secret)


async def test_a_replica_that_stops_ends_its_answers_and_gets_no_more_calls() -> None:
    a, b = Script("a", ["a"], PAUSE, ["end"]), Script("b", ["b"])
    async with Fleet(a, b) as fleet:
        busy = replace(fleet.statuses["b"], load=ReplicaLoad(running=50, block_size=4, num_blocks=100))
        fleet.statuses["b"] = busy
        await fleet.look()
        items = fleet.replicas.generate(CALL)
        assert await anext(items) == ["a"]
        stopping = asyncio.create_task(fleet.servers["a"].stop())
        while "a" in fleet.replicas._channels:
            await asyncio.sleep(0)
        assert await fleet.received() == [["b"]]
        assert not stopping.done()
        a.resumed.set()
        assert [item async for item in items] == [["end"]]
        await stopping


async def test_a_replica_that_stops_rejects_what_reaches_it_nevertheless() -> None:
    async with Fleet(Script("a", ["a"])) as fleet:
        fleet.servers["a"].stopping = True
        with pytest.raises(Closed, match="is stopping"):
            await fleet.received()


async def test_a_call_that_a_replica_has_no_room_for_goes_to_another_one() -> None:
    a, b = Script("a", FULL), Script("b", ["b"])
    async with Fleet(a, b) as fleet:
        for _ in range(4):
            assert await fleet.received() == [["b"]]
        b.items = (FULL,)
        with pytest.raises(Overloaded, match="full"):
            await fleet.received()
        a.items = b.items = (["first"], FULL)   # of one that was already running
        num_calls = len(a.calls) + len(b.calls)
        with pytest.raises(Overloaded):
            await fleet.received()
        assert len(a.calls) + len(b.calls) == num_calls + 1


async def test_the_requests_of_a_sequence_go_to_one_replica_even_if_that_is_full() -> None:
    scripts = [Script(name, FULL) for name in "abc"]
    async with Fleet(*scripts) as fleet:
        request = InferenceRequest(model_name="m", inputs={}, correlation_id=7)
        for _ in range(3):
            with pytest.raises(Overloaded):
                await anext(fleet.replicas.infer(request))
        assert sorted(len(script.calls) for script in scripts) == [0, 0, 3]


async def test_prompts_that_begin_alike_go_to_one_replica_until_it_has_too_much_to_do() -> None:
    scripts = [Script(name, ["x"], PAUSE) for name in "abc"]
    async with Fleet(*scripts, decode_tokens=8.0) as fleet:
        prompt = replace(CALL, prompt_token_ids=tuple(range(40)))
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
    """Nothing comes, not even an error."""
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
    """Let one side of a connection neither give signs of life nor look for them."""
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


async def test_a_replica_that_cannot_be_reached_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    async with Fleet(Script("a", ["a"])) as fleet:
        port = fleet.statuses["a"].port
        assert port is not None
        unreachable = replace(port, replica="b", port=1)
        fleet.statuses = {"b": ReplicaStatus(digest="", load=ReplicaLoad(), port=unreachable)}
        await fleet.look()
        assert "cannot be reached" in caplog.text
        fleet.statuses = {"b": ReplicaStatus(digest="", load=ReplicaLoad(), port=replace(port, replica="b"))}
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
        writer.write(port.secret)
        assert await reader.read() == b"", "it is no handshake"
        writer.close()


async def test_what_a_transport_hands_over_after_a_wrong_secret_is_not_unpickled(tmp_path: Path) -> None:
    """It may do so while it closes."""
    async with Fleet(Script("a")) as fleet:
        port = fleet.statuses["a"].port
        assert port is not None
        message = pickle.dumps(Touch(tmp_path / "made"))
        reader, writer = await asyncio.open_connection(port.host, port.port)
        connection = call_server._Connection(fleet.servers["a"])
        connection.connection_made(writer.transport)    # any one that can be closed
        connection.data_received(bytes(SECRET_BYTES))
        connection.data_received(len(message).to_bytes(8) + message)
        assert not (tmp_path / "made").exists()
        assert await reader.read() == b""
