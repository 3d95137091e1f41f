"""The tests' own proxy: forwards, counts, and breaks exactly as it is told."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.tcp_proxy import TcpProxy
from tests.waiting import eventually

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def echoing() -> AsyncIterator[TcpProxy]:
    """A proxy in front of a server that sends back what it gets."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while received := await reader.read(65536):
                writer.write(received)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, TcpProxy(f"127.0.0.1:{port}") as proxy:
        yield proxy


async def connect(proxy: TcpProxy) -> Connection:
    host, _, port = proxy.address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def test_what_goes_in_comes_out_and_is_counted() -> None:
    async with echoing() as proxy:
        reader, writer = await connect(proxy)
        sent = bytes(range(256)) * 4096
        writer.write(sent)
        assert await reader.readexactly(len(sent)) == sent
        await proxy.to_client.wait_for(len(sent))
        assert (proxy.to_target.num_bytes, proxy.to_client.num_bytes) == (len(sent), len(sent))
        writer.close()
        await eventually(lambda: proxy.num_connections == 0)


async def test_a_half_closed_connection_brings_the_rest() -> None:
    async with echoing() as proxy:
        reader, writer = await connect(proxy)
        writer.write(b"x" * 300_000)
        writer.write_eof()
        assert len(await reader.read(-1)) == 300_000


async def test_reset_ends_every_connection_with_rst_and_lets_new_ones_in() -> None:
    async with echoing() as proxy:
        connections = [await connect(proxy) for _ in range(3)]
        for reader, writer in connections:
            writer.write(b"a")
            assert await reader.readexactly(1) == b"a"
        await proxy.reset()
        for reader, _ in connections:
            with pytest.raises(ConnectionResetError):
                await reader.read(1)
        reader, writer = await connect(proxy)
        writer.write(b"b")
        assert await reader.readexactly(1) == b"b"
        assert proxy.num_accepted == 4


async def test_black_means_open_and_silent_until_healed() -> None:
    async with echoing() as proxy:
        reader, writer = await connect(proxy)
        writer.write(b"a")
        await reader.readexactly(1)
        proxy.go_black()
        writer.write(b"b")
        late_reader, late_writer = await connect(proxy)
        late_writer.write(b"c")
        await eventually(lambda: proxy.num_accepted == 2)
        with pytest.raises(AssertionError, match="1 bytes forwarded"):
            await proxy.to_target.wait_for(2, timeout=0.2)
        assert not reader.at_eof()
        proxy.heal()
        assert await reader.readexactly(1) == b"b"
        assert await late_reader.readexactly(1) == b"c"


async def test_a_black_proxy_can_be_reset() -> None:
    async with echoing() as proxy:
        reader, writer = await connect(proxy)
        writer.write(b"a")
        await reader.readexactly(1)
        proxy.go_black()
        late_reader, _ = await connect(proxy)
        await eventually(lambda: proxy.num_accepted == 2)
        await proxy.reset()
        for end in (reader, late_reader):
            with pytest.raises(ConnectionResetError):
                await end.read(1)
        assert proxy.num_connections == 0


async def test_a_limit_holds_for_all_connections_together_and_can_be_taken_off() -> None:
    async with echoing() as proxy:
        proxy.limit(100_000)
        began = time.monotonic()
        connections = [await connect(proxy) for _ in range(2)]
        for _, writer in connections:
            writer.write(b"x" * 20_000)
        await proxy.to_client.wait_for(40_000)
        assert time.monotonic() - began >= 0.35  # 40,000 bytes at 100,000 a second
        reader, writer = connections[0]
        writer.write(b"y" * 5_000_000)  # 50 s at that rate
        proxy.heal()
        async with asyncio.timeout(10):
            assert len(await reader.readexactly(5_020_000)) == 5_020_000


async def test_a_limited_flow_can_be_caught_between_two_counts() -> None:
    async with echoing() as proxy:
        _, writer = await connect(proxy)
        proxy.limit(200_000)
        writer.write(b"x" * 1_000_000)
        await proxy.to_target.wait_for(20_000)
        assert proxy.to_target.num_bytes < 1_000_000


async def test_a_target_that_is_gone_shows_as_a_reset() -> None:
    async with echoing() as proxy:
        target = proxy.address
    async with TcpProxy(target) as proxy:
        reader, _ = await connect(proxy)
        with pytest.raises(ConnectionResetError):
            await reader.read(1)
        await eventually(lambda: proxy.num_connections == 0)
