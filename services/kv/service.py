"""The Prefill service as both ends use it: the generated one, but for messages that stay bytes.

gRPC lets a method choose how its messages become bytes; `codec.py` says why ours do. On the wire
nothing is different.
"""

from collections.abc import AsyncIterator
from typing import Protocol

import grpc
from grpc import aio

from baton.v1 import prefill_pb2, prefill_pb2_grpc
from services.kv import codec

_SERVICE = prefill_pb2.DESCRIPTOR.services_by_name["Prefill"].full_name


class PrefillCall(Protocol):
    """A Prefill call in progress: encoded PrefillMessages; iterate once."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...
    def cancel(self) -> bool: ...


class PrefillClient:
    """Calls one prefill worker.

    Attributes:
        stub: the generated one, for the other methods.
    """

    def __init__(self, channel: aio.Channel) -> None:
        self.stub = prefill_pb2_grpc.PrefillStub(channel)
        self._prefill: aio.UnaryStreamMultiCallable[prefill_pb2.PrefillRequest, bytes] = channel.unary_stream(
            f"/{_SERVICE}/Prefill", request_serializer=prefill_pb2.PrefillRequest.SerializeToString
        )

    def prefill(self, request: prefill_pb2.PrefillRequest, timeout: float | None) -> PrefillCall:
        """See prefill.proto."""
        call: PrefillCall = self._prefill(request, timeout=timeout)
        return call


def add_to_server(servicer: prefill_pb2_grpc.PrefillServicer, server: aio.Server) -> None:
    """Serves Prefill; its handler may write encoded messages beside PrefillMessages."""
    prefill_pb2_grpc.add_PrefillServicer_to_server(servicer, server)
    own = grpc.unary_stream_rpc_method_handler(
        servicer.Prefill,
        request_deserializer=prefill_pb2.PrefillRequest.FromString,
        response_serializer=codec.encode,
    )
    server.add_registered_method_handlers(_SERVICE, {"Prefill": own})
