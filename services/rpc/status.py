"""One table from exceptions to gRPC status, and the metadata that carries what a status cannot.

Every server aborts through `abort`, every client reads `field_of`. The HTTP half of the table is
`gateway/errors.py`. Knows the engine's exception types, nothing else of it.
"""

from typing import NoReturn

import grpc
from grpc import aio

from services.engine import errors

FIELD_KEY = "baton-field"  # trailing metadata: the request or identity field at fault


class Draining(Exception):
    """The worker takes no new work; another will."""


class PrefillUnavailable(Exception):
    """No prefill worker answered and running the prompt here is not allowed."""


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
)


def status_of(error: BaseException) -> grpc.StatusCode:
    """The status for an exception; INTERNAL for what the table does not name."""
    for kind, code in STATUS_TABLE:
        if isinstance(error, kind):
            return code
    return grpc.StatusCode.INTERNAL


async def abort(context: aio.ServicerContext, error: Exception) -> NoReturn:  # type: ignore[type-arg]
    """Ends the call with the exception's status, its text and the field at fault."""
    field = getattr(error, "field", None)
    metadata = ((FIELD_KEY, str(field)),) if field else ()
    await context.abort(status_of(error), str(error) or type(error).__name__, metadata)


def field_of(error: aio.AioRpcError) -> str | None:
    """The field at fault that a server named, if it named one."""
    for key, value in error.trailing_metadata() or ():
        if key == FIELD_KEY:
            return value.decode() if isinstance(value, bytes) else str(value)
    return None
