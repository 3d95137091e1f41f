"""Decode's end of the connection that the bytes of a transfer's pages come on. See `data_server.py`."""

import asyncio
import socket
from typing import Self

from services.kv import data_socket
from services.rpc.channel import Pings
from services.rpc.status import DataConnectionLost

_CONNECT_S = 2.0


class DataConnection:
    """Open. Made by `open`; whoever has it closes it."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    @classmethod
    async def open(cls, host: str, port: int, transfer_id: str, pings: Pings) -> Self:
        """Raises DataConnectionLost."""
        try:
            async with asyncio.timeout(_CONNECT_S):
                end = await _connect(host, port, pings)
                await data_socket.send(end, [memoryview(transfer_id.encode())])
        except (OSError, TimeoutError) as error:
            raise DataConnectionLost(f"no data connection to {host}:{port}: {error!r}") from error
        return cls(end)

    async def receive(self, into: memoryview) -> None:
        """Fills it. Raises DataConnectionLost."""
        try:
            await data_socket.receive(self._end, into)
        except (OSError, EOFError) as error:
            raise DataConnectionLost(f"the data connection broke: {error}") from error

    def close(self) -> None:
        """Idempotent."""
        self._end.close()


async def _connect(host: str, port: int, pings: Pings) -> socket.socket:
    """To the first of the host's addresses that answers. Raises OSError."""
    loop = asyncio.get_running_loop()
    failure = OSError("it has no address")
    for family, _, _, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        end = socket.socket(family, socket.SOCK_STREAM)
        try:
            data_socket.prepare(end)
            _notice_silence(end, pings)
            await loop.sock_connect(end, address)
        except OSError as error:
            end.close()
            failure = error
        except BaseException:
            end.close()
            raise
        else:
            return end
    raise failure


def _notice_silence(end: socket.socket, pings: Pings) -> None:
    """A link that has gone black is found out as gRPC's is: nothing else is sent while bytes are awaited.

    A worker that has stopped is not, for its kernel answers; the call beside the connection ends then.
    """
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    every_s, timeout_s = max(1, round(pings.every_s)), max(1, round(pings.timeout_s))
    for name, value in (("TCP_KEEPIDLE", every_s), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", timeout_s)):
        if (option := getattr(socket, name, None)) is not None:  # Linux's names
            end.setsockopt(socket.IPPROTO_TCP, option, value)
