"""A streamed client call that ends with its reader: cancelled with it, or when nobody holds it any more.

grpc.aio means to do that itself, but its channel hangs a callback on every call, which keeps call and
server busy until the reply is done (seen with grpcio 1.85, with and without interceptors). Here the
callbacks hang on a wrapper that the running call does not hold. Must not know: what is called.
"""

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from grpc import aio

DoneCallback = Callable[[Any], None]


class DroppableCall(aio.UnaryStreamCall):  # type: ignore[type-arg]  # generic only in its stubs
    """Passes everything on to `call`, cancels it when collected."""

    def __init__(self, call: "aio.UnaryStreamCall[Any, Any]") -> None:
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._callbacks: list[DoneCallback] = []
        this = weakref.ref(self)

        def on_done(_call: object) -> None:
            wrapper = this()
            if wrapper is not None:
                wrapper._fire()

        call.add_done_callback(on_done)

    def __del__(self) -> None:
        if hasattr(self, "_call") and not self._call.done():
            self.cancel()

    def _fire(self) -> None:
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)

    def add_done_callback(self, callback: DoneCallback) -> None:
        """Calls back with this call once it is done; at once if it is."""
        if self._call.done():
            callback(self)
        else:
            self._callbacks.append(callback)

    def cancel(self) -> bool:
        """Cancels; False if the call is done already."""
        if self._call.done() or self._loop.is_closed():
            return False
        if _running_loop() is self._loop:
            return self._call.cancel()
        # The collector runs in whichever thread allocates; calls belong to their loop.
        self._loop.call_soon_threadsafe(self._call.cancel)
        return True

    def cancelled(self) -> bool:
        return self._call.cancelled()

    def done(self) -> bool:
        return self._call.done()

    def time_remaining(self) -> float | None:
        return self._call.time_remaining()

    async def initial_metadata(self) -> aio.Metadata:
        return await self._call.initial_metadata()

    async def trailing_metadata(self) -> aio.Metadata:
        return await self._call.trailing_metadata()

    async def code(self) -> grpc.StatusCode:
        return await self._call.code()

    async def details(self) -> str:
        return await self._call.details()

    async def debug_error_string(self) -> str:
        """Core's own account of an error; grpc.aio has it on every call, though not in its interface."""
        return str(await self._call.debug_error_string())  # type: ignore[attr-defined]

    async def wait_for_connection(self) -> None:
        await self._call.wait_for_connection()

    async def __aiter__(self) -> AsyncIterator[Any]:
        try:
            async for message in self._call:
                yield message
        except asyncio.CancelledError:
            # grpc.aio cancels too, except where it still waits for the request to be sent.
            self.cancel()
            raise

    async def read(self) -> Any:
        try:
            return await self._call.read()
        except asyncio.CancelledError:
            self.cancel()
            raise


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
