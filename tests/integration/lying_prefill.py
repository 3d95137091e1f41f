"""A prefill worker that stands between decode and an honest one, and tampers with the messages."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
from grpc import aio

from baton.v1 import prefill_pb2, prefill_pb2_grpc

Tamper = Callable[[list[prefill_pb2.PrefillMessage]], list[prefill_pb2.PrefillMessage]]


class LyingPrefill(prefill_pb2_grpc.PrefillServicer):
    """Fetches the honest answer, changes it, then delivers it and perhaps fails."""

    def __init__(self, honest: str, tamper: Tamper, then_fail: grpc.StatusCode | None = None) -> None:
        self._honest = honest
        self._tamper = tamper
        self._then_fail = then_fail
        self.num_calls = 0

    async def Prefill(self, request, context):  # type: ignore[no-untyped-def]
        self.num_calls += 1
        async with aio.insecure_channel(self._honest) as channel:
            honest = [message async for message in prefill_pb2_grpc.PrefillStub(channel).Prefill(request)]
        for message in self._tamper(honest):
            await context.write(message)
        if self._then_fail is not None:
            await context.abort(self._then_fail, "as scripted")

    async def GetInfo(self, request, context):  # type: ignore[no-untyped-def]
        async with aio.insecure_channel(self._honest) as channel:
            info = await prefill_pb2_grpc.PrefillStub(channel).GetInfo(request)
        info.instance = "a liar"
        info.ClearField(
            "shared_pool"
        )  # it passes on whole answers, and the honest one would wait for a reader
        return info

    async def WatchLoad(self, request, context):  # type: ignore[no-untyped-def]
        async with aio.insecure_channel(self._honest) as channel:
            async for load in prefill_pb2_grpc.PrefillStub(channel).WatchLoad(request):
                yield load


@asynccontextmanager
async def lying_prefill(
    honest: str, tamper: Tamper, then_fail: grpc.StatusCode | None = None
) -> AsyncIterator[tuple[str, LyingPrefill]]:
    """Serves a LyingPrefill on a free loopback port; yields its address and itself."""
    server = aio.server()
    servicer = LyingPrefill(honest, tamper, then_fail)
    prefill_pb2_grpc.add_PrefillServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", servicer
    finally:
        await server.stop(None)
