"""A gRPC service for the interceptors' tests: real server, real channel, bytes for messages.

The request says what the handler does; handlers come in both styles that grpc.aio knows.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc import aio
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from observability.telemetry import build
from services.rpc.channel import create_channel, server_options
from services.rpc.interceptors import TracingServerInterceptor, tracing_client_interceptors
from tests.waiting import eventually

SERVICE = "test.v1.Echo"


class EchoService:
    """`Write` is a coroutine that writes, `Yield` a generator, `Ask` has one answer."""

    def __init__(self) -> None:
        self.num_released = 0
        self.num_started = 0
        self.spans: list[trace.Span] = []
        self.tracer: trace.Tracer | None = None

    async def Write(self, request: bytes, context: Any) -> None:
        self._begin()
        try:
            await self._behave(request, context)
            for i in range(3):
                await context.write(b"%d" % i)
            if request == b"hang-after":
                await asyncio.Event().wait()
            if request == b"code":
                context.set_code(grpc.StatusCode.NOT_FOUND)
        finally:
            self.num_released += 1

    async def Yield(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        self._begin()
        try:
            await self._behave(request, context)
            for i in range(3):
                yield b"%d" % i
            if request == b"hang-after":
                await asyncio.Event().wait()
            while request == b"endless":
                yield b"."
        finally:
            self.num_released += 1

    async def Ask(self, request: bytes, context: Any) -> bytes:
        self._begin()
        try:
            await self._behave(request, context)
        finally:
            self.num_released += 1
        return request

    async def WatchLoad(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"load"

    def handlers(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Write": grpc.unary_stream_rpc_method_handler(self.Write),
                "Yield": grpc.unary_stream_rpc_method_handler(self.Yield),
                "WatchLoad": grpc.unary_stream_rpc_method_handler(self.WatchLoad),
                "Ask": grpc.unary_unary_rpc_method_handler(self.Ask),
            },
        )

    def _begin(self) -> None:
        self.num_started += 1
        self.spans.append(trace.get_current_span())

    async def _behave(self, request: bytes, context: Any) -> None:
        if request == b"hang":
            await asyncio.Event().wait()
        elif request == b"abort":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "draining: the secret prompt")
        elif request == b"refuse":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no")
        elif request == b"crash":
            raise LookupError("the secret prompt")
        elif request == b"child":
            assert self.tracer is not None

            async def work() -> None:
                with self.tracer.start_as_current_span("work"):
                    await asyncio.sleep(0)

            await asyncio.create_task(work())


@dataclass(slots=True)
class Echo:
    """A running service, a channel to it, and the spans that ended on either side."""

    service: EchoService
    channel: aio.Channel
    server: aio.Server
    tracer: trace.Tracer
    address: str
    exporter: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)

    def stream(self, method: str, request: bytes, **options: Any) -> Any:
        return self.channel.unary_stream(f"/{SERVICE}/{method}")(request, **options)

    def ask(self, request: bytes, **options: Any) -> Any:
        return self.channel.unary_unary(f"/{SERVICE}/Ask")(request, **options)

    def ended(self, kind: SpanKind) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.kind is kind]

    async def both(self) -> tuple[ReadableSpan, ReadableSpan]:
        """The only client and the only server span, once both have ended."""
        await eventually(lambda: len(self.exporter.get_finished_spans()) >= 2)
        (client,), (server,) = self.ended(SpanKind.CLIENT), self.ended(SpanKind.SERVER)
        return client, server


@asynccontextmanager
async def running_echo() -> AsyncIterator[Echo]:
    """Serves an EchoService on loopback, traced on both sides."""
    service = EchoService()
    exporter = InMemorySpanExporter()
    telemetry = build("baton-echo", "test", span_exporter=exporter)
    service.tracer = telemetry.tracer
    server = aio.server(options=server_options(), interceptors=[TracingServerInterceptor(telemetry.tracer)])
    server.add_generic_rpc_handlers((service.handlers(),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    channel = create_channel(address, tracing_client_interceptors(telemetry.tracer))
    try:
        yield Echo(service, channel, server, telemetry.tracer, address, exporter)
    finally:
        await channel.close()
        await server.stop(None)
        telemetry.shutdown()
