"""Connections find their transfers, whichever comes first; nobody else keeps one; bytes arrive in order."""

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator

import pytest

from services.kv import data_server
from services.kv.data_connection import DataConnection
from services.kv.data_server import DataServer, DataStream
from services.rpc.channel import DEFAULT_PINGS
from services.rpc.status import DataConnectionLost
from tests.waiting import eventually

TRANSFER = "7f" * 16


@pytest.fixture
async def server() -> AsyncIterator[DataServer]:
    server = DataServer("127.0.0.1", 0)
    yield server
    await server.close()


async def connect(server: DataServer, transfer_id: str = TRANSFER) -> DataConnection:
    return await DataConnection.open("127.0.0.1", server.port, transfer_id, DEFAULT_PINGS)


async def is_open(stream: DataStream) -> None:
    await eventually(lambda: stream.is_open)


@pytest.mark.parametrize("is_early", [True, False], ids=["before its call", "after its call"])
async def test_a_connection_finds_its_transfer(
    server: DataServer,
    is_early: bool,  # noqa: FBT001
) -> None:
    if is_early:
        connection = await connect(server)
        await eventually(lambda: server.num_strangers == 1)
    with server.expecting(TRANSFER) as stream:
        if not is_early:
            assert not stream.is_open
            with pytest.raises(DataConnectionLost):
                await stream.send([memoryview(b"x")])
            connection = await connect(server)
        await is_open(stream)
        received = bytearray(6)
        await stream.send([memoryview(b"abc"), memoryview(b""), memoryview(b"def")])
        await connection.receive(memoryview(received))
        assert received == b"abcdef"
    with pytest.raises(DataConnectionLost, match="broke"):
        await connection.receive(memoryview(received))
    connection.close()
    await eventually(lambda: server.num_strangers == 0)


async def test_pieces_arrive_whole_and_in_order_though_few_go_at_once(server: DataServer) -> None:
    pieces = [memoryview(secrets.token_bytes(size)) for size in (*range(1, 1500), 20_000_000, 1, 3_000_000)]
    whole = b"".join(pieces)
    with server.expecting(TRANSFER) as stream:
        connection = await connect(server)
        await is_open(stream)
        received = bytearray(len(whole))
        await asyncio.gather(stream.send(pieces), connection.receive(memoryview(received)))
    assert received == whole
    connection.close()


async def test_a_reader_that_goes_is_an_error_for_the_sender(server: DataServer) -> None:
    with server.expecting(TRANSFER) as stream:
        connection = await connect(server)
        await is_open(stream)
        sending = asyncio.create_task(stream.send([memoryview(bytes(64_000_000))]))
        await connection.receive(memoryview(bytearray(1_000_000)))
        connection.close()
        with pytest.raises(DataConnectionLost):
            await asyncio.wait_for(sending, 10)


async def test_a_sender_that_is_cancelled_lets_the_next_one_know(server: DataServer) -> None:
    """What has begun to go cannot be taken back: the connection ends with its call."""
    with server.expecting(TRANSFER) as stream:
        connection = await connect(server)
        await is_open(stream)
        sending = asyncio.create_task(stream.send([memoryview(bytes(64_000_000))]))
        await connection.receive(memoryview(bytearray(1_000_000)))
        sending.cancel()
        await asyncio.wait((sending,))
    with pytest.raises(DataConnectionLost):
        await connection.receive(memoryview(bytearray(64_000_000)))
    connection.close()


@pytest.mark.parametrize("hello", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 32, b"0" * 32])
async def test_a_stranger_is_turned_away(
    server: DataServer, hello: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_server, "HELLO_S", 0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(hello)
    async with asyncio.timeout(5):
        assert await reader.read() == b""
    writer.close()
    await eventually(lambda: server.num_strangers == 0)


async def test_of_two_connections_of_one_transfer_the_first_stays(server: DataServer) -> None:
    early = await connect(server)
    await eventually(lambda: server.num_strangers == 1)
    for _ in range(2):  # while nobody expects them, and while somebody has the first
        with pytest.raises(DataConnectionLost):
            await (await connect(server)).receive(memoryview(bytearray(1)))
        with server.expecting(TRANSFER) as stream:
            await is_open(stream)
            with pytest.raises(DataConnectionLost):
                await (await connect(server)).receive(memoryview(bytearray(1)))
            await stream.send([memoryview(b"x")])
            await early.receive(memoryview(bytearray(1)))
        early = await connect(server)
        await eventually(lambda: server.num_strangers == 1)


async def test_many_strangers_do_not_keep_a_connection_of_a_known_call_out_for_long(
    server: DataServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_server, "MOST_STRANGERS", 3)
    strangers = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(4)]
    await eventually(lambda: server.num_strangers == 3)
    with server.expecting(TRANSFER) as stream:
        with pytest.raises(DataConnectionLost):
            await (await connect(server)).receive(memoryview(bytearray(1)))
        assert not stream.is_open
        for stranger in strangers:
            stranger.close()
        await eventually(lambda: server.num_strangers == 0)
        await connect(server)
        await is_open(stream)


async def test_nothing_is_left_when_it_closes() -> None:
    server = DataServer("127.0.0.1", 0)
    early = await connect(server)
    with server.expecting("1" * 32) as stream:
        attached = await connect(server, "1" * 32)
        await is_open(stream)
        await server.close()
        await server.close()
        for connection in (early, attached):
            with pytest.raises(DataConnectionLost):
                await connection.receive(memoryview(bytearray(1)))
    with pytest.raises(DataConnectionLost, match="no data connection"):
        await connect(server)


@pytest.mark.parametrize("host", ["localhost", "::1", "[::1]", "0.0.0.0"])
async def test_it_listens_where_the_worker_does(host: str) -> None:
    server = DataServer(host, 0)
    target = {"0.0.0.0": "127.0.0.1"}.get(host, host.strip("[]"))
    connection = await DataConnection.open(target, server.port, TRANSFER, DEFAULT_PINGS)
    connection.close()
    await server.close()


async def test_a_port_that_is_taken_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        DataServer("127.0.0.1", taken.getsockname()[1])


async def test_where_nobody_listens_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(DataConnectionLost, match=f"127.0.0.1:{port}"):
        await DataConnection.open("127.0.0.1", port, TRANSFER, DEFAULT_PINGS)
