"""Clients that leave, stall or cancel, over a real server; and what the state route says of it."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.app import create_app
from gateway.events import ReplyStatus
from tests.e2e.sse_client import frames
from tests.unit.gateway.served_gateway import QUESTION, Served, saying, served, until_stopped
from tests.waiting import eventually


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[Served]:
    async with served(tmp_path) as running:
        yield running


def ask(world: Served, **fields: Any) -> "asyncio.Task[httpx.Response]":
    return asyncio.create_task(world.chat(**fields))


async def gone(client: "asyncio.Task[httpx.Response]") -> None:
    client.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await client


@pytest.mark.parametrize("how", [{}, {"stream": True}])
async def test_a_client_that_leaves_before_admission_leaves_nothing_behind(
    world: Served, how: dict[str, bool]
) -> None:
    world.generations.admits.clear()
    client = ask(world, **how)
    await eventually(lambda: world.generations.num_waiting == 1)
    await gone(client)
    await eventually(lambda: world.generations.num_waiting == 0)
    world.generations.admits.set()
    assert not world.generations.replies


async def test_a_client_that_leaves_a_buffered_reply_cancels_it_at_once(world: Served) -> None:
    world.generations.script = until_stopped
    client = ask(world)
    await eventually(lambda: len(world.generations.replies) == 1)
    await gone(client)
    await eventually(lambda: world.reply.stop_reason == "cancelled")


async def test_a_client_that_leaves_a_stream_before_the_first_token_cancels_nothing(world: Served) -> None:
    world.generations.script = until_stopped
    client = ask(world, stream=True)
    await eventually(lambda: world.is_followed)
    await gone(client)
    await eventually(lambda: not world.is_followed)
    await eventually(lambda: world.reply.num_readers == 0)
    assert world.reply.stop_reason is None


async def test_cancel_is_idempotent_and_ends_the_stream(world: Served) -> None:
    world.generations.script = until_stopped
    client = ask(world, stream=True)
    await eventually(lambda: world.is_followed)
    path = f"/v1/streams/{world.reply.meta.reply_id}"
    for _ in range(3):
        assert (await world.http.post(f"{path}/cancel")).status_code == 200
    *_, last_chunk, done = frames((await client).content)
    choice = json.loads(last_chunk.data)["choices"][0]
    assert (choice["finish_reason"], choice["baton_finish_reason"]) == ("stop", "cancelled")
    assert done.data == "[DONE]"
    state = (await world.get(f"{path}/state")).json()
    assert (state["status"], state["finish_reason"]) == (ReplyStatus.CANCELLED, "cancelled")


async def test_the_state_of_a_finished_and_of_a_running_reply(world: Served) -> None:
    path = (await world.streamed()).headers["location"]
    state = (await world.get(f"{path}/state")).json()
    last_seq = len(frames((await world.get(f"{path}?format=baton")).content))
    assert state == {
        "id": path.rpartition("/")[2],
        "status": "done",
        "text": "Hello world",
        "finish_reason": "stop",
        "usage": (await world.chat()).json()["usage"],
        "timings": {"ttft": 1.0},
        "first_seq": 1,
        "last_seq": last_seq,
        "owner_epoch": 1,
    }
    world.generations.script = until_stopped
    client = ask(world, stream=True)
    await eventually(lambda: world.is_followed)
    running = await world.get(f"/v1/streams/{world.reply.meta.reply_id}/state")
    assert (running.json()["status"], running.json()["text"]) == ("running", "")
    assert running.json()["finish_reason"] is None
    assert running.json()["usage"] is None
    await gone(client)


@pytest.mark.parametrize("how", [{}, {"stream": True}])
async def test_a_client_that_leaves_in_the_moment_of_admission_cancels_the_reply(
    world: Served, how: dict[str, bool]
) -> None:
    """Driven without a socket, so that both happen in the same turn of the loop."""
    world.generations.script = until_stopped
    world.generations.admits.clear()
    left = asyncio.Event()
    body: list[dict[str, Any]] = [{"type": "http.request", "body": json.dumps({**QUESTION, **how}).encode()}]
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        if body:
            return body.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        **{"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b""},
        **{"headers": [], "http_version": "1.1", "scheme": "http", "root_path": ""},
    }
    request = asyncio.create_task(create_app(world.gateway)(scope, receive, send))
    await eventually(lambda: world.generations.num_waiting == 1)
    left.set()
    world.generations.admits.set()
    await asyncio.wait_for(request, 10)
    assert all(reply.stop_reason == "cancelled" for reply in world.generations.replies)
    assert not world.is_followed


async def test_a_socket_that_nobody_reads_is_dropped_and_the_reply_can_be_resumed(tmp_path: Path) -> None:
    async with served(tmp_path, slow_client_s=0.2) as world:
        world.generations.script = saying(*["x" * 100_000] * 200)  # more than the kernel holds
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port, limit=1024)
        body = json.dumps({**QUESTION, "stream": True}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await eventually(lambda: b"baton_slow_clients_total 1" in world.gateway.telemetry.metrics.render()[0])
        await eventually(lambda: not world.is_followed)
        assert world.reply.stop_reason is None
        received = b""
        with contextlib.suppress(ConnectionError):
            while more := await reader.read(1 << 20):
                received += more
        assert not received.endswith(b"0\r\n\r\n")
        assert b"[DONE]" not in received
        writer.close()
        whole = await world.get(f"/v1/streams/{world.reply.meta.reply_id}")
        assert frames(whole.content)[-1].data == "[DONE]"


async def test_a_drain_cuts_open_streams_at_its_deadline_without_a_terminal_event(world: Served) -> None:
    world.generations.script = until_stopped
    stream = ask(world, stream=True)
    await eventually(lambda: world.is_followed)
    world.server.should_exit = True
    with pytest.raises(httpx.RemoteProtocolError):  # the chunked body was never closed
        await stream
    assert world.reply.stop_reason is None
