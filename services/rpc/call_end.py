"""How a gRPC call ended, read off each side's call object.

Knows grpc.aio's ways of telling, which differ by side; nothing of spans or services.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

import grpc
from grpc import aio

# The conventions: what the server is to blame for. A client counts every status but OK and CANCELLED.
_SERVER_ERRORS = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)
_CLIENT_SUCCESSES = frozenset({grpc.StatusCode.OK, grpc.StatusCode.CANCELLED})
_CODES = {code.value[0]: code for code in grpc.StatusCode}

# A deadline reaches the server as a cancellation, a little early: core rounds timeouts up to three digits.
_DEADLINE_SLACK_S = 0.01
_DEADLINE_SLACK_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call's status and whether this side counts it as a failure."""

    code: grpc.StatusCode
    is_error: bool
    error_type: str | None = None  # the exception's class, where one got out of a handler

    @classmethod
    def of_exception(cls, error: BaseException) -> "CallEnd":
        """The end of a call that was never made."""
        if isinstance(error, asyncio.CancelledError):
            return cls(grpc.StatusCode.CANCELLED, is_error=False)
        return cls(grpc.StatusCode.UNKNOWN, is_error=True, error_type=type(error).__name__)


def server_end(
    context: aio.ServicerContext[Any, Any], error: BaseException | None, allowed_s: float | None
) -> CallEnd:
    """The end of a call whose handler is through.

    Args:
        error: what got out of the handler.
        allowed_s: the time the call had left when it arrived; None without a deadline.
    """
    if isinstance(error, asyncio.CancelledError) or context.cancelled():
        code = grpc.StatusCode.CANCELLED
        if _deadline_passed(context.time_remaining(), allowed_s):
            code = grpc.StatusCode.DEADLINE_EXCEEDED
        return CallEnd(code, code in _SERVER_ERRORS)
    if error is None or isinstance(error, aio.AbortError):
        code = _as_code(context.code())
        return CallEnd(code, code in _SERVER_ERRORS)
    return CallEnd(grpc.StatusCode.UNKNOWN, is_error=True, error_type=type(error).__name__)


def client_end(call: aio.Call) -> CallEnd:
    """The end of a call that is done, without waiting."""
    pending = call.code()
    try:
        # `code` is a coroutine for calls that still run; for one that is done it returns at the first
        # step. A task instead would need a loop, and a dropped call may end after its loop.
        pending.send(None)
    except StopIteration as stop:
        code = _as_code(stop.value)
        return CallEnd(code, code not in _CLIENT_SUCCESSES)
    pending.close()
    raise RuntimeError("a call that is done has no status")


def _deadline_passed(remaining_s: float | None, allowed_s: float | None) -> bool:
    if remaining_s is None or allowed_s is None:
        return False
    return remaining_s <= _DEADLINE_SLACK_S + _DEADLINE_SLACK_SHARE * allowed_s


def _as_code(code: grpc.StatusCode | int | None) -> grpc.StatusCode:
    """A server context knows its status as a number, and as nothing while nobody has set it."""
    if isinstance(code, grpc.StatusCode):
        return code
    return _CODES[code or 0]
