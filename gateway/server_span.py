"""The SERVER span of one HTTP request, from its arrival to the last byte of its response.

A resume is a trace of its own, linked to the one of the generation it replays.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.requests import Request

from gateway.errors import GatewayError
from observability import semconv

_W3C = TraceContextTextMapPropagator()
_MAX_TRACESTATE = 512  # characters that W3C asks to pass on; gRPC refuses calls with many more


def start_server_span(tracer: Tracer, request: Request, route: str, linked_to: str = "") -> Span:
    """Opens the span as a child of the caller's `traceparent`; `linked_to` is another traceparent."""
    links = []
    if linked_to:
        context = _W3C.extract({"traceparent": linked_to}, Context())
        links.append(Link(trace.get_current_span(context).get_span_context()))
    return tracer.start_span(
        f"{request.method} {route}",
        _W3C.extract(_carrier(request), Context()),
        SpanKind.SERVER,
        {semconv.HTTP_REQUEST_METHOD: request.method, semconv.HTTP_ROUTE: route},
        links,
    )


def _carrier(request: Request) -> dict[str, str]:
    """The caller's trace headers, without a state too large to travel on in metadata."""
    headers = {name: request.headers.get(name, "") for name in ("traceparent", "tracestate")}
    if len(headers["tracestate"]) > _MAX_TRACESTATE:
        del headers["tracestate"]
    return headers


@contextmanager
def ends_on_error(span: Span) -> Iterator[None]:
    """Makes the span current; ends it if the block raises. Else the response does, by `end_span`."""
    try:
        with trace.use_span(span, record_exception=False, set_status_on_exception=False):
            yield
    except GatewayError as error:
        end_span(span, error.shape.status)
        raise
    except BaseException as error:
        span.set_attribute(semconv.ERROR_TYPE, type(error).__name__)
        span.end()
        raise


def end_span(span: Span, status: int) -> None:
    """Ends the span of a request that was answered."""
    span.set_attribute(semconv.HTTP_RESPONSE_STATUS_CODE, status)
    if status >= 500:
        span.set_status(Status(StatusCode.ERROR))
        span.set_attribute(semconv.ERROR_TYPE, str(status))
    span.end()
