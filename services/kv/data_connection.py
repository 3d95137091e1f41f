"""Decode's end of the connection that the bytes of a transfer's pages come on. See `data_server.py`."""

import asyncio
import socket
from typing import Self

from services.kv import data_socket
from services.rpc.channel import Pings
from services.rpc.status import DataConnectionLost

_CONNECT_S = 2.0


class DataConnection:
    """Open. Made by `open`; whoever has it closes it.

    Args:
        silence_s: without a byte for so long, while some are awaited, it counts as broken.
    """

    def __init__(self, end: socket.socket, silence_s: float) -> None:
        self._end = end
        self._silence_s = silence_s

    @classmethod
    async def open(cls, host: str, port: int, transfer_id: str, pings: Pings) -> Self:
        """Raises DataConnectionLost."""
        end: socket.socket | None = None
        try:
            async with asyncio.timeout(_CONNECT_S):
                end = await _connect(host, port)
                await data_socket.send(end, [memoryview(transfer_id.encode())])
        except BaseException as error:
            if end is not None:
                end.close()
            if not isinstance(error, (OSError, TimeoutError)):
                raise
            raise DataConnectionLost(f"no data connection to {host}:{port}: {error!r}") from error
        # A worker that is silent itself is found out by its pings before that, and that ends the call.
        return cls(end, pings.every_s + pings.timeout_s)

    async def receive(self, into: memoryview) -> None:
        """Fills it. Raises DataConnectionLost."""
        try:
            await data_socket.receive(self._end, into, self._silence_s)
        except (OSError, EOFError, TimeoutError) as error:
            raise DataConnectionLost(f"the data connection broke: {error!r}") from error

    def close(self) -> None:
        """Idempotent."""
        self._end.close()


async def _connect(host: str, port: int) -> socket.socket:
    """To the first of the host's addresses that answers. Raises OSError."""
    loop = asyncio.get_running_loop()
    failure = OSError("it has no address")
    for family, _, _, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        end = socket.socket(family, socket.SOCK_STREAM)
        try:
            data_socket.prepare(end)
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
