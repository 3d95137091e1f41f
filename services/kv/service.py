"""The Prefill service as both ends use it: the generated one, but for messages that stay bytes.

gRPC lets a method choose how its messages become bytes; `codec.py` says why ours do. On the wire
nothing is different.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Protocol

import grpc
from grpc import aio

from baton.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc
from services.engine.request import ModelIdentity
from services.kv import codec
from services.kv.mapped_pool import MappedPool, map_pool

_INFO_S = 2.0
_SERVICE = prefill_pb2.DESCRIPTOR.services_by_name["Prefill"].full_name


class PrefillCall(Protocol):
    """A Prefill call in progress: encoded PrefillMessages; iterate once."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...
    def cancel(self) -> bool: ...


class PrefillClient:
    """Calls one prefill worker.

    Attributes:
        stub: the generated one, for the other methods.
        pool: the worker's KV pool, once it has been mapped.
    """

    def __init__(self, channel: aio.Channel) -> None:
        self.stub = prefill_pb2_grpc.PrefillStub(channel)
        self.pool: MappedPool | None = None
        self._mapping: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._channel = channel
        self._prefill: aio.UnaryStreamMultiCallable[prefill_pb2.PrefillRequest, bytes] = channel.unary_stream(
            f"/{_SERVICE}/Prefill", request_serializer=prefill_pb2.PrefillRequest.SerializeToString
        )

    def prefill(self, request: prefill_pb2.PrefillRequest, timeout: float | None) -> PrefillCall:
        """See prefill.proto."""
        call: PrefillCall = self._prefill(request, timeout=timeout)
        return call

    def map_pool(self, identity: ModelIdentity) -> "asyncio.Task[None]":
        """Tries once, in the background, to reach the worker's pool; until then pages are in messages."""
        if self._mapping is None:
            self._mapping = asyncio.create_task(self._map_pool(identity))
        return self._mapping

    def forget_pool(self) -> None:
        """It is not, or no longer, the worker's: somebody else may answer at its address."""
        self.pool = None
        self._mapping = None
        self._watching = None

    async def _map_pool(self, identity: ModelIdentity) -> None:
        try:
            info = await self.stub.GetInfo(common_pb2.GetInfoRequest(), timeout=_INFO_S)
            pool = map_pool(info, identity)
        except aio.AioRpcError:
            if self._mapping is asyncio.current_task():
                self._mapping = None  # asked again by the next transfer
            return
        if self._mapping is asyncio.current_task() and pool is not None:
            self.pool = pool
            self._watching = asyncio.create_task(self._forget_with_connection())

    async def _forget_with_connection(self) -> None:
        """A dead worker's pool would stay in memory, and nobody may ever call its address again."""
        ready = grpc.ChannelConnectivity.READY
        with suppress(Exception):  # whatever a channel that is being closed raises
            while self._channel.get_state() is ready:
                await self._channel.wait_for_state_change(ready)
        if self._watching is asyncio.current_task():
            self.forget_pool()

    async def release(self, transfer_id: str) -> None:
        """Tells the worker that a transfer's pages have been read; else the end of the call does."""
        with suppress(aio.AioRpcError):
            await self.stub.Release(prefill_pb2.ReleaseRequest(transfer_id=transfer_id), timeout=_INFO_S)


def add_to_server(servicer: prefill_pb2_grpc.PrefillServicer, server: aio.Server) -> None:
    """Serves Prefill; its handler may write encoded messages beside PrefillMessages."""
    prefill_pb2_grpc.add_PrefillServicer_to_server(servicer, server)
    own = grpc.unary_stream_rpc_method_handler(
        servicer.Prefill,
        request_deserializer=prefill_pb2.PrefillRequest.FromString,
        response_serializer=codec.encode,
    )
    server.add_registered_method_handlers(_SERVICE, {"Prefill": own})
