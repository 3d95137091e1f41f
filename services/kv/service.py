"""The Prefill service as both ends use it: the generated one, but for messages that stay bytes.

gRPC lets a method choose how its messages become bytes; `codec.py` says why ours do. On the wire
nothing is different.
"""

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Protocol

import grpc
from grpc import aio

from baton.v1 import prefill_pb2, prefill_pb2_grpc
from services.kv import codec
from services.kv.shortcuts import Shortcuts

_RELEASE_S = 2.0
_SERVICE = prefill_pb2.DESCRIPTOR.services_by_name["Prefill"].full_name


class PrefillCall(Protocol):
    """A Prefill call in progress: encoded PrefillMessages; iterate once."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...
    def cancel(self) -> bool: ...


class PrefillClient:
    """Calls one prefill worker.

    Args:
        target: its `host:port`.

    Attributes:
        stub: the generated one, for the other methods.
        shortcuts: ways for pages past the messages.
    """

    def __init__(self, channel: aio.Channel, target: str) -> None:
        self.shortcuts = Shortcuts(channel, target.rpartition(":")[0].strip("[]"))
        self.stub = prefill_pb2_grpc.PrefillStub(channel)
        self._prefill: aio.UnaryStreamMultiCallable[prefill_pb2.PrefillRequest, bytes] = channel.unary_stream(
            f"/{_SERVICE}/Prefill", request_serializer=prefill_pb2.PrefillRequest.SerializeToString
        )

    def prefill(self, request: prefill_pb2.PrefillRequest, timeout: float | None) -> PrefillCall:
        """See prefill.proto."""
        call: PrefillCall = self._prefill(request, timeout=timeout)
        return call

    async def release(self, transfer_id: str) -> None:
        """Tells the worker that a transfer's pages have been read; else the end of the call does."""
        with suppress(aio.AioRpcError):
            await self.stub.Release(prefill_pb2.ReleaseRequest(transfer_id=transfer_id), timeout=_RELEASE_S)


def add_to_server(servicer: prefill_pb2_grpc.PrefillServicer, server: aio.Server) -> None:
    """Serves Prefill; its handler may write encoded messages beside PrefillMessages."""
    prefill_pb2_grpc.add_PrefillServicer_to_server(servicer, server)
    own = grpc.unary_stream_rpc_method_handler(
        servicer.Prefill,
        request_deserializer=prefill_pb2.PrefillRequest.FromString,
        response_serializer=codec.encode,
    )
    server.add_registered_method_handlers(_SERVICE, {"Prefill": own})
