"""One stream against a client that leaves, stalls or waits, played by the test without a socket."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from client.sse import SseDecoder
from gateway.event_log import LogUnavailable
from gateway.event_log_memory import MemoryEventLog
from gateway.event_stream import EventStream, StreamAborted, StreamSettings
from gateway.keepalive import KeepaliveMode
from gateway.owned_reply import OwnedReply
from gateway.replies import ReplyHub
from gateway.server import ABORT
from observability.telemetry import build
from tests.unit.gateway.served_gateway import begin, finish, say
from tests.unit.gateway.test_sse import META, REPLY_ID, rendering
from tests.waiting import eventually


class Client:
    """An ASGI client. `accepts` is cleared for a socket that takes nothing."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.accepts = asyncio.Event()
        self.left = asyncio.Event()
        self.aborted = asyncio.Event()
        self.accepts.set()

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.accepts.wait()
        self.sent.append(message)

    def abort(self) -> None:
        self.aborted.set()
        self.left.set()  # as the server does when a connection is dropped

    @property
    def scope(self) -> dict[str, Any]:
        return {"type": "http", "extensions": {ABORT: self.abort}}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def is_finished(self) -> bool:
        return bool(self.sent) and self.sent[-1].get("more_body") is False


class Streamed:
    """A hub with one reply, and streams of it."""

    def __init__(self, hub: ReplyHub, reply: OwnedReply) -> None:
        self.hub, self.reply = hub, reply
        self.metrics = build("gateway", "test").metrics

    def stream(self, client: Client, **settings: Any) -> "asyncio.Task[None]":
        defaults = {"keepalive_s": 60.0, "keepalive_mode": KeepaliveMode.FORMAT, "slow_client_s": 60.0}
        response = EventStream(
            self.hub,
            REPLY_ID,
            rendering("chat"),
            self.hub.read(REPLY_ID, 0),
            settings=StreamSettings(**{**defaults, **settings}),
            metrics=self.metrics,
            headers={},
        )
        return asyncio.create_task(response(client.scope, client.receive, client.send))


@asynccontextmanager
async def streamed(resume_grace_s: float = 60.0) -> AsyncIterator[Streamed]:
    hub = ReplyHub(MemoryEventLog("g1"), gateway_id="g1", lease_s=3.0, resume_grace_s=resume_grace_s)
    await hub.start()
    reply = await hub.open(META, arrived=0.0)
    begin(reply)
    try:
        yield Streamed(hub, reply)
    finally:
        await hub.close()


def is_attached(world: Streamed) -> Callable[[], Awaitable[bool]]:
    return lambda: world.hub.log.is_attached(REPLY_ID)


@pytest.mark.parametrize(
    ("mode", "keepalive"),
    [
        (KeepaliveMode.FORMAT, b": keep-alive\n"),
        (KeepaliveMode.COMMENT_BLOCK, b": keep-alive\n\n"),
        (KeepaliveMode.PING, b'event: ping\ndata: {"type": "ping"}\n\n'),
    ],
)
async def test_keepalives_flow_while_the_first_token_is_awaited(
    mode: KeepaliveMode, keepalive: bytes
) -> None:
    async with streamed() as world:
        client = Client()
        stream = world.stream(client, keepalive_s=0.01, keepalive_mode=mode)
        await eventually(lambda: client.body.count(keepalive) >= 3)
        assert [m["type"] for m in client.sent].count("http.response.start") == 1
        say(world.reply, "late")
        finish(world.reply)
        await stream
        *events, done = SseDecoder().feed(client.body)
        assert done.data == "[DONE]"
        assert any("late" in event.data for event in events)
        assert b"id: : keep" not in client.body


async def test_no_keepalive_if_switched_off() -> None:
    async with streamed() as world:
        client = Client()
        stream = world.stream(client, keepalive_s=0.001, keepalive_mode=KeepaliveMode.OFF)
        await eventually(lambda: b"assistant" in client.body)
        for letter in "abcdef":
            say(world.reply, letter)
            await world.reply.flushed()
        finish(world.reply)
        await stream
        assert b"keep-alive" not in client.body


async def test_each_event_is_sent_whole_and_the_body_ends_with_the_terminal_one() -> None:
    async with streamed() as world:
        client = Client()
        stream = world.stream(client)
        say(world.reply, "x")
        finish(world.reply)
        await stream
        frames = [message["body"] for message in client.sent if message.get("body")]
        assert all(frame.endswith(b"\n\n") and frame.count(b"\n\n") == 1 for frame in frames)
        assert client.is_finished
        assert b"[DONE]" in frames[-1]


async def test_a_client_that_leaves_before_the_first_token_is_no_longer_attached_and_leaks_nothing() -> None:
    async with streamed() as world:
        before = asyncio.all_tasks()
        client = Client()
        stream = world.stream(client)
        await eventually(is_attached(world))
        await eventually(lambda: b"assistant" in client.body)
        client.left.set()
        await stream
        await eventually(lambda: not asyncio.all_tasks() - before)
        assert not await world.hub.log.is_attached(REPLY_ID)
        assert world.reply.num_readers == 0
        assert not client.is_finished


async def test_nobody_left_means_that_the_reply_is_abandoned() -> None:
    async with streamed(resume_grace_s=0.05) as world:
        client = Client()
        stream = world.stream(client)
        await eventually(is_attached(world))
        client.left.set()
        await stream
        await eventually(lambda: world.reply.stop_reason == "abandoned")


async def test_a_client_that_accepts_nothing_is_cut_off_and_the_reply_goes_on() -> None:
    async with streamed() as world:
        before = asyncio.all_tasks()
        client = Client()
        stream = world.stream(client, slow_client_s=0.05)
        await eventually(lambda: b"assistant" in client.body)
        client.accepts.clear()
        say(world.reply, "unread")
        await asyncio.wait_for(stream, 10)
        assert client.aborted.is_set()
        assert not client.is_finished
        assert world.reply.stop_reason is None
        assert b"baton_slow_clients_total 1" in world.metrics.render()[0]
        await eventually(lambda: not asyncio.all_tasks() - before)


async def test_a_client_that_stops_accepting_at_the_very_end_is_cut_off_too() -> None:
    async with streamed() as world:
        client = Client()
        say(world.reply, "x")
        finish(world.reply)
        accept = client.send

        async def send(message: Any) -> None:
            await accept(message)
            if b"[DONE]" in message.get("body", b""):
                client.accepts.clear()

        client.send = send  # type: ignore[method-assign]
        await asyncio.wait_for(world.stream(client, slow_client_s=0.05), 10)
        assert client.aborted.is_set()


class FailingLog(MemoryEventLog):
    """Answers the first question and then never again."""

    async def state(self, reply_id: str) -> Any:
        raise LogUnavailable("down")


async def test_a_log_that_fails_leaves_the_body_visibly_unfinished() -> None:
    hub = ReplyHub(FailingLog("g1"), gateway_id="g1", lease_s=3.0, resume_grace_s=60.0)
    world = Streamed(hub, None)  # type: ignore[arg-type]
    client = Client()
    await asyncio.wait_for(world.stream(client), 10)  # owned elsewhere, and the log does not answer
    assert client.aborted.is_set()
    assert not client.is_finished


async def test_a_server_that_cannot_abort_is_told_by_an_exception() -> None:
    hub = ReplyHub(FailingLog("g1"), gateway_id="g1", lease_s=3.0, resume_grace_s=60.0)
    client = Client()
    stream = EventStream(
        hub,
        REPLY_ID,
        rendering("chat"),
        hub.read(REPLY_ID, 0),
        settings=StreamSettings(60.0, KeepaliveMode.FORMAT, 60.0),
        metrics=build("gateway", "test").metrics,
        headers={},
    )
    with pytest.raises(StreamAborted):
        await stream({"type": "http"}, client.receive, client.send)


async def test_the_first_text_is_stamped_once_when_it_was_handed_over() -> None:
    async with streamed() as world:
        clients = [Client(), Client()]
        streams = [world.stream(client) for client in clients]
        await eventually(lambda: all(b"assistant" in client.body for client in clients))
        assert world.reply.first_text_sent_at is None
        say(world.reply, "x")
        await eventually(lambda: all(b'"x"' in client.body for client in clients))
        stamped = world.reply.first_text_sent_at
        assert stamped is not None
        assert world.reply.first_delta_committed_at is not None
        assert stamped >= world.reply.first_delta_committed_at
        say(world.reply, "y")
        finish(world.reply)
        await asyncio.gather(*streams)
        assert world.reply.first_text_sent_at == stamped
