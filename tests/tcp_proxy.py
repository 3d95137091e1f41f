"""A TCP proxy on loopback that a test breaks on purpose: reset, black, or slow, at any moment.

Buffers on the way are small and data is read only when it can go on, so what counts as forwarded has
all but arrived, and what has not been forwarded yet holds up its sender. Must not know what it carries.
"""

import asyncio
import socket
import struct
from typing import Self

_BUFFER_BYTES = 64 * 1024
_TICKS_PER_S = 50  # a limited flow moves in so many pieces a second
_NO_LINGER = struct.pack("ii", 1, 0)  # closing sends RST


class Flow:
    """One direction, all connections together.

    Attributes:
        num_bytes: forwarded since the proxy started.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._bytes_per_s: float | None = None
        self._free_at = 0.0  # loop time from which a limited flow may send again
        self._open = asyncio.Event()
        self._open.set()
        self._moved = asyncio.Event()

    async def wait_for(self, num_bytes: int, timeout: float = 10.0) -> None:
        """Returns once `num_bytes` have been forwarded in all; fails after `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                while self.num_bytes < num_bytes:
                    self._moved.clear()
                    await self._moved.wait()
        except TimeoutError:
            raise AssertionError(
                f"{self.num_bytes} bytes forwarded within {timeout} s, not {num_bytes}"
            ) from None

    def limit(self, bytes_per_s: float | None) -> None:
        """Slows the flow down; None takes the limit off."""
        self._bytes_per_s = bytes_per_s

    def block(self) -> None:
        """Nothing goes on until `unblock`; nothing is lost."""
        self._open.clear()

    def unblock(self) -> None:
        self._open.set()

    @property
    def most_bytes(self) -> int:
        """How much to take at once."""
        if self._bytes_per_s is None:
            return _BUFFER_BYTES
        return max(1, min(_BUFFER_BYTES, int(self._bytes_per_s / _TICKS_PER_S)))

    async def turn(self, num_bytes: int) -> None:
        """Waits until so many bytes may go on."""
        if self._bytes_per_s is not None:
            now = asyncio.get_running_loop().time()
            self._free_at = max(now, self._free_at) + num_bytes / self._bytes_per_s
            await asyncio.sleep(self._free_at - now)
        await self._open.wait()

    async def unblocked(self) -> None:
        """Waits while the flow is blocked."""
        await self._open.wait()

    def note(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._moved.set()


class TcpProxy:
    """Forwards connections to `target` (`host:port`). Use as an asynchronous context.

    Attributes:
        address: where it listens.
        to_target, to_client: the two directions.
        num_accepted: connections since it started.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.socket()
        self._accepting: asyncio.Task[None] | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._sockets: set[socket.socket] = set()
        self.to_target = Flow()
        self.to_client = Flow()
        self.num_accepted = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    @property
    def num_connections(self) -> int:
        """Sockets held, of both sides."""
        return len(self._sockets)

    async def reset(self) -> None:
        """Ends every connection with RST, on both sides; new ones are welcome."""
        connections = list(self._connections)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        for end in tuple(self._sockets):  # of those that were cancelled before their first step
            self._reset(end)

    def go_black(self) -> None:
        """Keeps connections open, accepts new ones, forwards nothing, until `heal`."""
        self.to_target.block()
        self.to_client.block()

    def limit(self, bytes_per_s: float) -> None:
        """Slows both directions down, until `heal`."""
        self.to_target.limit(bytes_per_s)
        self.to_client.limit(bytes_per_s)

    def heal(self) -> None:
        """Forwards everything at full speed again, what was held back included."""
        for flow in (self.to_target, self.to_client):
            flow.limit(None)
            flow.unblock()

    async def __aenter__(self) -> Self:
        _keep_buffers_small(self._listener)  # accepted sockets take after it
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self._listener.settimeout(0)
        self._accepting = asyncio.create_task(self._accept())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._accepting is not None
        self._accepting.cancel()
        await asyncio.gather(self._accepting, return_exceptions=True)
        self._listener.close()
        await self.reset()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            client, _ = await loop.sock_accept(self._listener)
            self.num_accepted += 1
            self._hold(client)
            connection = asyncio.create_task(self._serve(client))
            self._connections.add(connection)
            connection.add_done_callback(self._connections.discard)

    async def _serve(self, client: socket.socket) -> None:
        """Carries one connection until both directions are through; an error on one side resets both."""
        target = socket.socket()
        self._hold(target)
        try:
            await self.to_target.unblocked()
            await asyncio.get_running_loop().sock_connect(target, self._target)
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump(client, target, self.to_target))
                pumps.create_task(self._pump(target, client, self.to_client))
            for end in (client, target):
                self._sockets.remove(end)
                end.close()
        except* OSError:
            pass
        finally:
            self._reset(client)
            self._reset(target)

    async def _pump(self, source: socket.socket, sink: socket.socket, flow: Flow) -> None:
        loop = asyncio.get_running_loop()
        while True:
            received = await loop.sock_recv(source, flow.most_bytes)
            await flow.turn(len(received))
            if not received:
                sink.shutdown(socket.SHUT_WR)
                return
            await loop.sock_sendall(sink, received)
            flow.note(len(received))

    def _hold(self, end: socket.socket) -> None:
        _keep_buffers_small(end)
        end.settimeout(0)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sockets.add(end)

    def _reset(self, end: socket.socket) -> None:
        if end in self._sockets:
            self._sockets.remove(end)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            end.close()


def _keep_buffers_small(end: socket.socket) -> None:
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
