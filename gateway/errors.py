"""One exception tree, and the one table from exceptions and gRPC statuses to HTTP.

    GatewayError
    ├── InvalidRequest          400  the field at fault in `param`
    │   └── ContextTooLong      400  code context_length_exceeded
    ├── Unauthorized            401
    ├── NotFound                404  model, reply, path
    ├── MethodNotAllowed        405
    ├── CursorAhead             409  x-should-retry: false
    ├── ReplyExpired            410
    ├── BodyTooLarge            413
    ├── Overloaded              429  Retry-After
    ├── InternalError           500
    ├── Unavailable             503  Retry-After
    └── DeadlineExceeded        504

Before the headers these are HTTP statuses, after them the same fields travel in the `error` event.
Must not know: formats beyond OpenAI's error JSON, which all present formats share.
"""

from dataclasses import dataclass
from typing import Any

import grpc
from grpc import aio

from gateway.event_log import CursorConflict, EventLogError, LogUnavailable, ReplyGone, ReplyUnknown
from services.rpc.status import field_of


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """How one kind of error looks outside."""

    status: int
    type: str
    code: str | None = None
    headers: tuple[tuple[str, str], ...] = ()


class GatewayError(Exception):
    """Base of everything that a client is told. The message is written for the client."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self._code = code

    @property
    def shape(self) -> ErrorShape:
        return SHAPES[type(self)]

    @property
    def code(self) -> str | None:
        return self._code or self.shape.code

    def body(self) -> dict[str, Any]:
        """OpenAI's error JSON."""
        error = {"message": self.message, "type": self.shape.type, "param": self.param, "code": self.code}
        return {"error": error}

    def payload(self, at_ms: float) -> dict[str, Any]:
        """The payload of an `error` event."""
        code = self.code or self.shape.type
        return {
            "status": self.shape.status,
            "type": self.shape.type,
            "code": code,
            "message": self.message,
            "at_ms": at_ms,
        }


class InvalidRequest(GatewayError):
    """The request itself is at fault."""


class ContextTooLong(InvalidRequest):
    """Prompt and reply do not fit the model."""


class Unauthorized(GatewayError):
    """No key, or one that is not known."""


class NotFound(GatewayError):
    """No such model, reply or path; also what others see of a reply that is not theirs."""


class MethodNotAllowed(GatewayError):
    """The path exists, not with this method."""


class CursorAhead(GatewayError):
    """The cursor is no point of this reply's log."""


class ReplyExpired(GatewayError):
    """The reply was here; its time-to-live is over."""


class BodyTooLarge(GatewayError):
    """The body exceeds the bound; it was never held whole."""


class Overloaded(GatewayError):
    """Every queue is full."""


class InternalError(GatewayError):
    """A fault of ours."""


class Unavailable(GatewayError):
    """Something this gateway needs is not there now."""


class DeadlineExceeded(GatewayError):
    """The time for the request is over."""


SHAPES: dict[type[GatewayError], ErrorShape] = {
    GatewayError: ErrorShape(500, "server_error", "internal_error"),
    InvalidRequest: ErrorShape(400, "invalid_request_error"),
    ContextTooLong: ErrorShape(400, "invalid_request_error", "context_length_exceeded"),
    Unauthorized: ErrorShape(
        401, "authentication_error", "invalid_api_key", (("WWW-Authenticate", "Bearer"),)
    ),
    NotFound: ErrorShape(404, "invalid_request_error", "not_found"),
    MethodNotAllowed: ErrorShape(405, "invalid_request_error", "method_not_allowed"),
    CursorAhead: ErrorShape(
        409, "invalid_request_error", "cursor_ahead_of_log", (("x-should-retry", "false"),)
    ),
    ReplyExpired: ErrorShape(410, "invalid_request_error", "reply_expired"),
    BodyTooLarge: ErrorShape(413, "invalid_request_error", "body_too_large"),
    Overloaded: ErrorShape(429, "rate_limit_error", "overloaded", (("Retry-After", "1"),)),
    InternalError: ErrorShape(500, "server_error", "internal_error"),
    Unavailable: ErrorShape(503, "server_error", "unavailable", (("Retry-After", "1"),)),
    DeadlineExceeded: ErrorShape(504, "server_error", "timeout"),
}


def headers_for(status: int) -> dict[str, str]:
    """What goes with a status, for an error read back from a log, which keeps no more than that."""
    return next((dict(shape.headers) for shape in SHAPES.values() if shape.status == status), {})


RPC_ERRORS: dict[grpc.StatusCode, type[GatewayError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.FAILED_PRECONDITION: Unavailable,
    grpc.StatusCode.ABORTED: Unavailable,
    grpc.StatusCode.CANCELLED: Unavailable,
    grpc.StatusCode.DATA_LOSS: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
}


def from_rpc(error: aio.AioRpcError) -> GatewayError:
    """The client's view of a failed call to a worker; statuses not in the table are our fault."""
    kind = RPC_ERRORS.get(error.code(), InternalError)
    if kind is InvalidRequest:
        return InvalidRequest(error.details() or "invalid request", param=field_of(error))
    if kind is InternalError:
        return InternalError("the decode worker failed")
    return kind(error.details() or error.code().name.lower().replace("_", " "))


UNKNOWN_REPLY = "No such stream."  # also for the replies of others: the same body


def from_log(error: EventLogError) -> GatewayError:
    """The client's view of what the event log raised."""
    if isinstance(error, ReplyUnknown):
        return NotFound(UNKNOWN_REPLY, code="stream_not_found")
    if isinstance(error, ReplyGone):
        return ReplyExpired("This stream has ended and its log has expired.")
    if isinstance(error, CursorConflict):
        return CursorAhead(f"This event ID is no point of the stream: {error}.")
    if isinstance(error, LogUnavailable):
        return Unavailable("The event log does not answer now; the stream can be resumed later.")
    return InternalError("the event log failed")
