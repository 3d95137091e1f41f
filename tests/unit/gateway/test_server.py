"""What a client may make a connection hold, and for how long, on raw sockets."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from gateway.owned_reply import OwnedReply
from tests.unit.gateway.served_gateway import QUESTION, Served, finish, say, saying, served
from tests.waiting import eventually

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: baton\r\n"


def posted(**fields: object) -> bytes:
    body = json.dumps({**QUESTION, **fields}).encode()
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[Served]:
    async with served(tmp_path, slow_client_s=0.2, keepalive_s=0.05) as running:
        yield running


async def connected(world: Served) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    streams = await asyncio.open_connection("127.0.0.1", world.port)
    await eventually(lambda: len(world.server.server_state.connections) == 1)
    return streams


async def pour(writer: asyncio.StreamWriter, num_bytes: int) -> None:
    for _ in range(0, num_bytes, 16384):
        writer.write(b"x" * 16384)
        await writer.drain()


async def dropped(world: Served) -> None:
    await eventually(lambda: not world.server.server_state.connections)
    await eventually(lambda: not world.server.server_state.tasks)


@pytest.mark.parametrize(
    "part",
    [
        b"",
        b"\r\n",
        HEAD,
        HEAD + b"Content-Length: 10\r\n\r\n",
        HEAD + b"Content-Length: 10\r\n\r\n{",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
        b"GET /livez HTTP/1.1\r\nHost: baton\r\n\r\nGET",
        b"GET /livez HTTP/1.1\r\nHost: baton\r\nContent-Length: 10\r\n\r\n",
    ],
)
async def test_a_client_that_sends_no_whole_request_is_dropped(world: Served, part: bytes) -> None:
    _, writer = await connected(world)
    writer.write(part)
    await dropped(world)
    writer.close()


@pytest.mark.parametrize(
    "endless",
    [HEAD + b"X-Long: ", HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nX-Trailer: "],
)
async def test_a_head_or_a_trailer_without_an_end_is_refused(world: Served, endless: bytes) -> None:
    _, writer = await connected(world)
    writer.write(endless)
    with pytest.raises(ConnectionError):
        await pour(writer, 16 * 2**20)
    await dropped(world)


async def test_a_client_that_never_reads_a_whole_response_is_dropped(world: Served) -> None:
    world.generations.script = saying("x" * 12_000_000)
    with closing(socket.create_connection(("127.0.0.1", world.port))) as client:
        client.sendall(posted())
        await eventually(lambda: bool(world.generations.replies) and world.reply.settled)
        await dropped(world)


@pytest.mark.parametrize("pipelined", [b"", posted(), HEAD])
async def test_a_silent_stream_whose_client_waits_is_not_dropped(world: Served, pipelined: bytes) -> None:
    last_words = asyncio.Event()

    async def script(reply: OwnedReply) -> None:
        await last_words.wait()
        say(reply, "at last")
        finish(reply)

    world.generations.script = script
    reader, writer = await connected(world)
    writer.write(posted(stream=True) + pipelined)
    for _ in range(3 * round(0.2 / 0.05)):
        await reader.readuntil(b": keep-alive\n")
    last_words.set()
    assert b"at last" in await reader.readuntil(b"0\r\n\r\n")
    writer.close()
