"""One table from exceptions to gRPC status, and the metadata that carries what a status cannot.

Every server aborts through `abort`, every client reads `field_of`, `reason_of` and
`failed_targets_of`. The HTTP half of the table is `gateway/errors.py`. Knows the engine's exception
types, nothing else of it.
"""

from collections.abc import Sequence
from typing import NoReturn

import grpc
from grpc import aio

from services.engine import errors

# Trailing metadata.
FIELD_KEY = "baton-field"  # the request or identity field at fault
REASON_KEY = "baton-reason"  # the exception's name: one status has several reasons
FAILED_TARGETS_KEY = "baton-failed-prefill-targets"  # joined by commas


class Draining(Exception):
    """The worker takes no new work; another will."""


class PrefillUnavailable(Exception):
    """No prefill worker answered and running the prompt here is not allowed.

    Args:
        failed_targets: those that are themselves at fault.
    """

    def __init__(self, message: str, failed_targets: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.failed_targets = tuple(failed_targets)


class DataConnectionLost(Exception):
    """What carries the bytes of a transfer beside its call has broken; another call can do without."""


class Superseded(Exception):
    """A call with a higher epoch has taken over the reply."""


# First match wins, so subclasses stand before their base.
STATUS_TABLE: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (errors.InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.QueueFull, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.IncompatibleModel, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.UnsupportedModel, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.InvalidKvPage, grpc.StatusCode.DATA_LOSS),
    (errors.NoTokenToChoose, grpc.StatusCode.INTERNAL),  # the model may be at fault, or this worker
    (errors.SequenceReleased, grpc.StatusCode.CANCELLED),
    (errors.EngineStopped, grpc.StatusCode.UNAVAILABLE),
    (Draining, grpc.StatusCode.UNAVAILABLE),
    (PrefillUnavailable, grpc.StatusCode.UNAVAILABLE),
    (Superseded, grpc.StatusCode.ABORTED),
    (DataConnectionLost, grpc.StatusCode.ABORTED),
)


def status_of(error: BaseException) -> grpc.StatusCode:
    """The status for an exception; INTERNAL for what the table does not name."""
    for kind, code in STATUS_TABLE:
        if isinstance(error, kind):
            return code
    return grpc.StatusCode.INTERNAL


# What a worker that works well does not answer. Full, of another model, badly asked, cancelled: no fault.
_FAULTS = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DATA_LOSS,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    }
)
_NO_FAULTS = frozenset({Draining.__name__, PrefillUnavailable.__name__})  # of whoever says so


def is_fault(error: aio.AioRpcError) -> bool:
    """Whether a failed call speaks against the worker that was called."""
    return error.code() in _FAULTS and reason_of(error) not in _NO_FAULTS


async def abort(context: aio.ServicerContext, error: Exception) -> NoReturn:  # type: ignore[type-arg]
    """Ends the call with the exception's status, its text, its name and the field at fault."""
    metadata = [(REASON_KEY, type(error).__name__)]
    if field := getattr(error, "field", None):
        metadata.append((FIELD_KEY, str(field)))
    if isinstance(error, PrefillUnavailable) and error.failed_targets:
        metadata.append((FAILED_TARGETS_KEY, ",".join(error.failed_targets)))
    await context.abort(status_of(error), str(error) or type(error).__name__, tuple(metadata))


def field_of(error: aio.AioRpcError) -> str | None:
    """The field at fault that a server named, if it named one."""
    return _metadata_of(error, FIELD_KEY)


def reason_of(error: aio.AioRpcError) -> str | None:
    """The name of the exception that a server ended the call with; None if it was not the server's word."""
    return _metadata_of(error, REASON_KEY)


def failed_targets_of(error: aio.AioRpcError) -> tuple[str, ...]:
    """The prefill workers at fault for the end of a call to decode."""
    joined = _metadata_of(error, FAILED_TARGETS_KEY)
    return tuple(joined.split(",")) if joined else ()


def _metadata_of(error: aio.AioRpcError, wanted: str) -> str | None:
    for key, value in error.trailing_metadata() or ():
        if key == wanted:
            return value.decode() if isinstance(value, bytes) else str(value)
    return None
