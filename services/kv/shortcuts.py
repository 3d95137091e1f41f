"""Ways to a prefill worker past the messages, learned in the background; pages are in messages till then."""

import asyncio
import time
from contextlib import suppress

import grpc
from grpc import aio

from baton.v1 import common_pb2, prefill_pb2_grpc
from services.engine.request import ModelIdentity
from services.kv.mapped_pool import MappedPool, map_pool
from services.settings import KvTransport

INFO_S = 2.0
_NO_DATA_S = 30.0


class Shortcuts:
    """Belongs to the running event loop.

    Args:
        host: of the worker.

    Attributes:
        pool: the worker's KV pool, once it has been mapped.
    """

    def __init__(self, channel: aio.Channel, host: str) -> None:
        self.pool: MappedPool | None = None
        self._channel = channel
        self._stub = prefill_pb2_grpc.PrefillStub(channel)
        self._host = host
        self._data_port = 0
        self._no_data_until = 0.0  # monotonic
        self._learning: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def data_address(self) -> tuple[str, int] | None:
        """Where data connections are to be opened, if they are."""
        if not self._data_port or time.monotonic() < self._no_data_until:
            return None
        return self._host, self._data_port

    def learn(self, identity: ModelIdentity, transport: KvTransport) -> "asyncio.Task[None]":
        """Asks the worker, once, until all is forgotten again."""
        if self._learning is None:
            self._learning = asyncio.create_task(self._learn(identity, transport))
        return self._learning

    def forget(self) -> None:
        """They are not, or no longer, the worker's: somebody else may answer at its address."""
        self.pool = None
        self._data_port = 0
        self._learning = None
        self._watching = None

    def leave_data(self) -> None:
        """A data connection has failed: there shall be none for a while."""
        self._no_data_until = time.monotonic() + _NO_DATA_S

    async def _learn(self, identity: ModelIdentity, transport: KvTransport) -> None:
        try:
            info = await self._stub.GetInfo(common_pb2.GetInfoRequest(), timeout=INFO_S)
        except aio.AioRpcError:
            if self._learning is asyncio.current_task():
                self._learning = None  # asked again by the next transfer
            return
        if self._learning is not asyncio.current_task():
            return
        if transport is KvTransport.AUTO:
            self.pool = map_pool(info, identity)
        if transport is not KvTransport.GRPC and info.data_port < 2**16:
            self._data_port = info.data_port
        self._watching = asyncio.create_task(self._forget_with_connection())

    async def _forget_with_connection(self) -> None:
        """A dead worker's pool would stay in memory, and nobody may ever call its address again."""
        ready = grpc.ChannelConnectivity.READY
        with suppress(Exception):  # whatever a channel that is being closed raises
            while self._channel.get_state() is ready:
                await self._channel.wait_for_state_change(ready)
        if self._watching is asyncio.current_task():
            self.forget()
