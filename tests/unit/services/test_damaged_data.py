"""Damage to the bytes on a data connection: a typed error, or the KV cache that was sent, never another."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from baton.v1 import prefill_pb2
from services.kv.data_connection import DataConnection
from services.kv.data_server import HELLO_BYTES, DataServer
from services.kv.payload import PayloadFormat
from services.rpc.channel import DEFAULT_PINGS
from services.rpc.status import DataConnectionLost
from tests.unit.services.recorded_transfer import MAX_PAGE_BYTES, PROMPT, TRANSFER, Messages, Pair
from tests.waiting import eventually

Release = Callable[[], None]


async def record(
    pair: Pair, form: PayloadFormat = PayloadFormat.EXACT, max_page_bytes: int = MAX_PAGE_BYTES
) -> tuple[Messages, bytes, Release]:
    """Messages, the bytes of the pages that they name, and what ends the transfer at the source."""
    server = DataServer("127.0.0.1", 0)
    try:
        with server.expecting(TRANSFER) as stream:
            connection = await DataConnection.open("127.0.0.1", server.port, TRANSFER, DEFAULT_PINGS)
            await eventually(lambda: stream.is_open)
            messages, release = await pair.record(form, data=stream, max_page_bytes=max_page_bytes)
            received = bytearray(sum(_num_named(message) for message in messages))
            await connection.receive(memoryview(received))
            connection.close()
    finally:
        await server.close()
    return messages, bytes(received), release


def _num_named(message: bytes) -> int:
    parsed = prefill_pb2.PrefillMessage.FromString(message)
    return parsed.page.data_bytes if parsed.HasField("page") else 0


@asynccontextmanager
async def serving(data: bytes) -> AsyncIterator[int]:
    """A port where whoever says hello gets these bytes, then the end."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readexactly(HELLO_BYTES) == TRANSFER.encode()
        writer.write(data)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_what_was_sent_is_whole_and_what_follows_is_not_read(pair: Pair) -> None:
    messages, data, release = await record(pair)
    assert data
    for tail in (b"", b"more"):
        async with serving(data + tail) as port:
            assert await pair.receive(messages, data_port=port)
    release()


async def test_a_flipped_bit_anywhere_is_an_error(pair: Pair) -> None:
    messages, data, release = await record(pair)
    for seed in range(40):
        rng, damaged = random.Random(seed), bytearray(data)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        async with serving(bytes(damaged)) as port:
            assert not await pair.receive(messages, data_port=port)
    release()


async def test_bytes_that_are_left_out_or_swapped_are_an_error(pair: Pair) -> None:
    messages, data, release = await record(pair)
    half = len(data) // 2
    for damaged in (data[half:] + data[:half], data[1:] + b"x", b"x" + data[:-1]):
        async with serving(damaged) as port:
            assert not await pair.receive(messages, data_port=port)
    release()


async def test_messages_may_be_far_ahead_of_their_bytes(pair: Pair) -> None:
    """Small pages lie in the system's buffers by the dozen."""
    messages, data, release = await record(pair, max_page_bytes=128)
    assert len(messages) > len(PROMPT)
    async with serving(data) as port:
        assert await asyncio.wait_for(pair.receive(messages, data_port=port), 10)
    async with serving(data[: len(data) // 2]) as port:
        with pytest.raises(DataConnectionLost):
            await asyncio.wait_for(pair.receive(messages, data_port=port), 10)
    release()


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
async def test_bytes_that_end_early_are_the_connections_fault(pair: Pair, share: float) -> None:
    """Though every message has come, the result too: it is the same worker that is to be asked again."""
    messages, data, release = await record(pair)
    async with serving(data[: int(share * (len(data) - 1))]) as port:
        with pytest.raises(DataConnectionLost):
            await pair.receive(messages, data_port=port)
    release()


async def test_a_connection_that_no_page_needs_may_fail(pair: Pair) -> None:
    messages, release = await pair.record()
    async with serving(b"") as port:
        assert await pair.receive(messages, data_port=port)
    assert await pair.receive(messages, data_port=1)
    release()


async def test_a_page_on_a_connection_that_was_not_opened_is_an_error(pair: Pair) -> None:
    messages, _, release = await record(pair)
    assert not await pair.receive(messages)
    release()


async def test_pages_in_other_orders_than_their_bytes_are_an_error(pair: Pair) -> None:
    messages, data, release = await record(pair)
    named = [at for at, message in enumerate(messages) if _num_named(message)]
    first, last = named[0], named[-1]
    messages[first], messages[last] = messages[last], messages[first]
    async with serving(data) as port:
        try:
            assert not await pair.receive(messages, data_port=port)
        except DataConnectionLost:  # where they differ in length
            pytest.fail("nothing was lost")
    release()


@pytest.mark.parametrize("num_bytes", [2**63, 5 * 2**20])
async def test_a_page_larger_than_was_asked_for_is_an_error(pair: Pair, num_bytes: int) -> None:
    messages, data, release = await record(pair)
    at = next(at for at, message in enumerate(messages) if _num_named(message))
    page = prefill_pb2.PrefillMessage.FromString(messages[at])
    page.page.data_bytes = num_bytes
    messages[at] = page.SerializeToString()
    async with serving(data) as port:
        assert not await pair.receive(messages, data_port=port)
    release()
