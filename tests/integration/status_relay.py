"""Stands before a worker, passes every call on, and answers with an error status when told.

It breaks off the calls that do work, those in progress too; what is asked about the worker goes on.
Knows the names of two methods and none of their messages.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Self

import grpc
from grpc import aio

from services.rpc.channel import create_channel, server_options

_WORK = ("/baton.v1.Prefill/Prefill", "/baton.v1.Decode/Generate")

Handler = Callable[[bytes, "aio.ServicerContext[bytes, bytes]"], Awaitable[None]]


class StatusRelay(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic only in its stubs
    """A server on loopback in front of `target` (`host:port`). Use as an asynchronous context."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._status: grpc.StatusCode | None = None
        self._work: set[asyncio.Task[None]] = set()
        self.address = ""

    def fail(self, status: grpc.StatusCode) -> None:
        """Ends all work in progress with this status, and refuses more, until `heal`."""
        self._status = status
        for work in self._work:
            work.cancel()

    def heal(self) -> None:
        self._status = None

    async def __aenter__(self) -> Self:
        self._channel = create_channel(self._target)
        self._server = aio.server(options=server_options())
        self._server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)
        await self._channel.close()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """A unary call is a stream of one message on the wire."""
        return grpc.unary_stream_rpc_method_handler(self._relaying(handler_call_details.method))

    def _relaying(self, method: str) -> Handler:
        async def relay(request: bytes, context: "aio.ServicerContext[bytes, bytes]") -> None:
            if method in _WORK and self._status is not None:
                await context.abort(self._status, "as scripted")
            copying = asyncio.create_task(self._copy(method, request, context))
            if method in _WORK:
                self._work.add(copying)
                copying.add_done_callback(self._work.discard)
            try:
                await asyncio.wait({copying})
            finally:
                copying.cancel()
            if copying.cancelled() and self._status is not None:
                await context.abort(self._status, "as scripted")
            copying.result()

        return relay

    async def _copy(self, method: str, request: bytes, context: "aio.ServicerContext[bytes, bytes]") -> None:
        call = self._channel.unary_stream(method)(request, timeout=context.time_remaining())
        try:
            await call.initial_metadata()
            if not call.done():  # a refusal has none
                await context.send_initial_metadata(())
            async for message in call:
                await context.write(message)
        except aio.AioRpcError as error:
            await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))
        finally:
            call.cancel()
