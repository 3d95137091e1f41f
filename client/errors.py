"""Why there is no whole reply.

    StreamError
    ├── RequestRefused      the server answered the request with an error status; nothing was generated
    ├── ResumeRefused       the server has the rest no more, or never had it (404, 409, 410, ...)
    ├── ReplyFailed         the reply ended with an error event: final, the text so far is all there is
    ├── ConnectionLost      no progress within the retry policy: the reply may be resumed later
    ├── ReplyIncomplete     the result was asked for before the terminal event had come
    └── ProtocolViolation   the server sent what it must not: events of another reply, or backwards

Invariant: text that came before any of these is a fragment, and only the stream's `text` shows it.
"""


class StreamError(Exception):
    """Base of everything this client raises by itself."""


class RequestRefused(StreamError):
    """An error status instead of a stream."""

    def __init__(self, status: int, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status
        self.message = message
        self.retry_after_s = retry_after_s


class ResumeRefused(RequestRefused):
    """The cut stream cannot be resumed any more."""


class ReplyFailed(StreamError):
    """The reply's terminal event is an error."""

    def __init__(self, message: str, kind: str = "", code: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.code = code


class ConnectionLost(StreamError):
    """The connection broke and did not come back in time; `last_event_id` is where to resume."""

    def __init__(self, message: str, last_event_id: str | None = None) -> None:
        super().__init__(message)
        self.last_event_id = last_event_id


class ReplyIncomplete(StreamError):
    """There is no terminal event yet."""


class ProtocolViolation(StreamError):
    """The stream breaks its own rules; nothing after the break is trusted."""
