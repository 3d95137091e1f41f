"""Spans around gRPC calls, one per call and side, joined by `traceparent` in the metadata.

Invariant: a span ends exactly once, however its call ends: normally, with a status, by either side's
cancellation, at its deadline, or because the caller dropped it. Ending a stream early is how clients
stop a reply, so a cancelled call is no error. Must not know: which services run behind it.
"""

import inspect
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from grpc import aio
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context, use_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from observability import semconv
from services.rpc.call_end import CallEnd, client_end, server_end
from services.rpc.droppable_call import DroppableCall

# Streams that last as long as the process, and probes; their spans would say nothing.
_UNTRACED_SERVICES = ("grpc.health.", "grpc.reflection.")
_UNTRACED_METHODS = ("WatchLoad", "GetInfo", "Release")

_W3C = TraceContextTextMapPropagator()

Handler = Callable[[Any, Any], Any]
if TYPE_CHECKING:
    # Generic only in its stubs; None stands for a method that nobody serves.
    RpcHandler = grpc.RpcMethodHandler[Any, Any]


@dataclass(frozen=True, slots=True)
class Method:
    """A full method name, `/package.Service/Method`, taken apart."""

    service: str
    name: str

    @classmethod
    def parse(cls, path: str | bytes) -> "Method":
        path = path.decode() if isinstance(path, bytes) else path
        service, _, name = path.removeprefix("/").rpartition("/")
        return cls(service, name)

    @property
    def traced(self) -> bool:
        return not self.service.startswith(_UNTRACED_SERVICES) and self.name not in _UNTRACED_METHODS

    def start_span(self, tracer: Tracer, kind: SpanKind, parent: Context | None) -> Span:
        return tracer.start_span(
            f"{self.service}/{self.name}",
            parent,
            kind,
            {
                semconv.RPC_SYSTEM: semconv.RPC_SYSTEM_GRPC,
                semconv.RPC_SERVICE: self.service,
                semconv.RPC_METHOD: self.name,
            },
        )


def _end(span: Span, end: CallEnd) -> None:
    span.set_attribute(semconv.RPC_GRPC_STATUS_CODE, end.code.value[0])
    if end.is_error:
        span.set_attribute(semconv.ERROR_TYPE, end.error_type or end.code.name)
        # The name only: details may quote the request.
        span.set_status(Status(StatusCode.ERROR, end.code.name))
    span.end()


def _is_async(behavior: Handler) -> bool:
    return inspect.iscoroutinefunction(behavior) or inspect.isasyncgenfunction(behavior)


def _written(behavior: Handler) -> Handler:
    """A streaming handler as a coroutine that writes, so that both styles end in one place."""
    if not inspect.isasyncgenfunction(behavior):
        return behavior

    async def write_all(request: Any, context: aio.ServicerContext[Any, Any]) -> None:
        # Closed here and now: a generator that is only dropped would run its `finally` when collected.
        async with aclosing(behavior(request, context)) as messages:
            async for message in messages:
                await context.write(message)

    return write_all


def _texts(metadata: Iterable[tuple[str, str | bytes]]) -> dict[str, str]:
    return {key: value for key, value in metadata if isinstance(value, str)}


class TracingServerInterceptor(aio.ServerInterceptor):
    """Opens a SERVER span for each call and makes it current in the handler."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[RpcHandler | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "RpcHandler | None":
        """Wraps the handler; those that are neither coroutines nor generators stay as they are."""
        handler = await continuation(handler_call_details)
        method = Method.parse(handler_call_details.method)
        if handler is None or not method.traced:
            return handler
        if handler.unary_stream is not None and _is_async(handler.unary_stream):
            return grpc.unary_stream_rpc_method_handler(
                self._traced(method, _written(handler.unary_stream)),
                handler.request_deserializer,
                handler.response_serializer,
            )
        if handler.unary_unary is not None and _is_async(handler.unary_unary):
            return grpc.unary_unary_rpc_method_handler(
                self._traced(method, handler.unary_unary),
                handler.request_deserializer,
                handler.response_serializer,
            )
        return handler

    def _traced(self, method: Method, behavior: Handler) -> Handler:
        async def traced(request: Any, context: aio.ServicerContext[Any, Any]) -> Any:
            parent = _W3C.extract(_texts(context.invocation_metadata() or ()), Context())
            span = method.start_span(self._tracer, SpanKind.SERVER, parent)
            allowed_s = context.time_remaining()
            error: BaseException | None = None
            try:
                with use_span(span, record_exception=False, set_status_on_exception=False):
                    return await behavior(request, context)
            except BaseException as caught:
                error = caught
                raise
            finally:
                _end(span, server_end(context, error, allowed_s))

        return traced


class TracingClientInterceptor(aio.UnaryStreamClientInterceptor):
    """Opens a CLIENT span for each streamed call, a child of the span current at the call.

    grpc.aio files an interceptor under one kind of call only; `tracing_client_interceptors` has both.
    A call that is dropped before its end is cancelled, and its span ends, when it is collected.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    async def intercept_unary_stream(
        self,
        continuation: Callable[[grpc.aio.ClientCallDetails, Any], Any],
        client_call_details: grpc.aio.ClientCallDetails,
        request: Any,
    ) -> Any:
        """Makes the call with a span around it."""
        call = await _call(self._tracer, continuation, client_call_details, request)
        return DroppableCall(call)


class TracingUnaryClientInterceptor(aio.UnaryUnaryClientInterceptor):
    """The same for calls with one answer."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    async def intercept_unary_unary(
        self,
        continuation: Callable[[grpc.aio.ClientCallDetails, Any], Any],
        client_call_details: grpc.aio.ClientCallDetails,
        request: Any,
    ) -> Any:
        """Makes the call with a span around it."""
        return await _call(self._tracer, continuation, client_call_details, request)


def tracing_client_interceptors(tracer: Tracer) -> tuple[aio.ClientInterceptor, ...]:
    """What a channel needs for spans around calls of both kinds."""
    return TracingClientInterceptor(tracer), TracingUnaryClientInterceptor(tracer)


async def _call(
    tracer: Tracer,
    continuation: Callable[[grpc.aio.ClientCallDetails, Any], Any],
    details: grpc.aio.ClientCallDetails,
    request: Any,
) -> Any:
    method = Method.parse(details.method)
    if not method.traced:
        return await continuation(details, request)
    span = method.start_span(tracer, SpanKind.CLIENT, None)
    headers: dict[str, str] = {}
    _W3C.inject(headers, set_span_in_context(span))
    metadata = aio.Metadata(*(details.metadata or ()), *headers.items())
    try:
        call = await continuation(
            aio.ClientCallDetails(
                details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
            ),
            request,
        )
    except BaseException as error:
        _end(span, CallEnd.of_exception(error))
        raise
    call.add_done_callback(lambda ended: _end(span, client_end(ended)))
    return call
