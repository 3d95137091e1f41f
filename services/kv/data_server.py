"""Where decode workers connect for the bytes of pages: one connection a transfer, beside its Prefill call.

A connection begins with the transfer's ID, which only whoever makes the call knows; then bytes go the other
way, in the order in which the call's messages name them. It may come before its call, late, or never: a
page goes on it if it is there by then, else in its message. Nothing here waits for a connection.
"""

import asyncio
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import structlog

from services.kv import data_socket
from services.rpc.status import DataConnectionLost

log = structlog.get_logger()

HELLO_BYTES = 32  # of a transfer's ID
HELLO_S = 5.0  # for the ID to arrive, and its call after it
MOST_STRANGERS = 256  # connections whose call is not known yet
_RETRY_S = 0.1


class DataStream:
    """The way for one transfer's pages, as soon as its connection is there."""

    def __init__(self) -> None:
        self._end: socket.socket | None = None

    @property
    def is_open(self) -> bool:
        return self._end is not None

    async def send(self, pieces: Iterable[memoryview]) -> None:
        """Returns when the system has taken them. Raises DataConnectionLost."""
        if self._end is None:
            raise DataConnectionLost("the data connection is closed")
        try:
            await data_socket.send(self._end, pieces)
        except OSError as error:
            raise DataConnectionLost(f"the data connection broke: {error}") from error

    def attach(self, end: socket.socket) -> None:
        """Takes a connection; of two for one transfer the first stays."""
        if self._end is None:
            self._end = end
        else:
            end.close()

    def close(self) -> None:
        if self._end is not None:
            self._end.close()
            self._end = None


class _Early(NamedTuple):
    """A connection whose call is not known yet."""

    end: socket.socket
    taken: "asyncio.Future[None]"


class DataServer:
    """Belongs to the running event loop.

    Args:
        host: where to listen.
        port: 0 picks a free one.

    Raises OSError if it cannot listen there.
    """

    def __init__(self, host: str, port: int) -> None:
        family, _, _, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            data_socket.prepare(self._listener)
            self._listener.bind(address)
            self._listener.listen()
        except OSError:
            self._listener.close()
            raise
        self.port: int = self._listener.getsockname()[1]
        self._expected: dict[str, DataStream] = {}
        self._early: dict[str, _Early] = {}
        self._strangers: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept())

    @property
    def num_strangers(self) -> int:
        """Connections whose call is not known yet."""
        return len(self._strangers)

    @contextmanager
    def expecting(self, transfer_id: str) -> Iterator[DataStream]:
        """A transfer's stream, as long as its call lasts."""
        stream = DataStream()
        if (early := self._early.pop(transfer_id, None)) is not None:
            stream.attach(early.end)
            early.taken.set_result(None)
        self._expected[transfer_id] = stream
        try:
            yield stream
        finally:
            if self._expected.get(transfer_id) is stream:
                del self._expected[transfer_id]
            stream.close()

    async def close(self) -> None:
        """Closes what is open. Idempotent."""
        tasks = [self._accepting, *self._strangers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()
        for stream in self._expected.values():
            stream.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                end, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # too many open files, most likely: pages go in messages
                log.warning("cannot accept data connections", reason=str(error))
                await asyncio.sleep(_RETRY_S)
                continue
            if len(self._strangers) >= MOST_STRANGERS:
                end.close()
                continue
            end.settimeout(0)
            stranger = asyncio.create_task(self._meet(end))
            self._strangers.add(stranger)
            stranger.add_done_callback(self._strangers.discard)

    async def _meet(self, end: socket.socket) -> None:
        """Brings a connection to its transfer, or closes it."""
        taken = asyncio.get_running_loop().create_future()
        transfer_id = ""
        try:
            transfer_id = await _hello(end)
            if (stream := self._expected.get(transfer_id)) is not None:
                stream.attach(end)
                taken.set_result(None)
            elif transfer_id not in self._early:
                self._early[transfer_id] = _Early(end, taken)
                await asyncio.wait((taken,), timeout=HELLO_S)
        except (OSError, EOFError, ValueError, TimeoutError):
            pass  # somebody who is no decode worker, or has gone
        finally:
            if not taken.done():
                end.close()
                if (early := self._early.get(transfer_id)) and early.end is end:
                    del self._early[transfer_id]


async def _hello(end: socket.socket) -> str:
    """The transfer's ID. Raises OSError, EOFError, ValueError or TimeoutError."""
    hello = bytearray(HELLO_BYTES)
    async with asyncio.timeout(HELLO_S):
        await data_socket.receive(end, memoryview(hello), HELLO_S)
    return hello.decode("ascii")
