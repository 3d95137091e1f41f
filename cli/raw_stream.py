"""One SSE response on one socket, which can be cut for real: what the demo shows a drop with.

Unlike the resuming client this hides nothing: every event with its ID, and whether the body was ended
properly or just stopped.
"""

import http.client
import json
import socket
from collections.abc import Iterator, Mapping
from typing import Any, Self
from urllib.parse import urlsplit

from cli.errors import CommandError
from client.sse import ServerSentEvent, SseDecoder


class RawStream:
    """An open response.

    Attributes:
        ended: whether the server closed the body properly.
    """

    def __init__(
        self,
        url: str,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        last_event_id: str = "",
        api_key: str = "",
        timeout: float = 60.0,
    ) -> None:
        """Raises CommandError if nobody answers, or not with an event stream."""
        where = urlsplit(url)
        self.ended = False
        self._connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=timeout)
        headers = {"Accept": "text/event-stream", "Content-Type": "application/json"}
        if last_event_id:
            headers["Last-Event-ID"] = last_event_id
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        try:
            self._connection.request(method, path, json.dumps(body) if body is not None else None, headers)
            self._response = self._connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise CommandError(f"{method} {url}{path}: {error}") from error
        if self._response.status != 200:
            said = self._response.read(2000).decode(errors="replace")
            self._connection.close()
            raise CommandError(f"{method} {path} was answered {self._response.status}: {said}")

    def events(self) -> Iterator[ServerSentEvent]:
        """Events as they arrive, until the body or the connection ends."""
        decoder = SseDecoder()
        try:
            while received := self._response.read1(65536):
                yield from decoder.feed(received)
            self.ended = True
        except (OSError, http.client.HTTPException):
            self.ended = False

    def drop(self) -> None:
        """Closes the socket here and now, in the middle of whatever is being sent."""
        if self._connection.sock is not None:
            self._connection.sock.shutdown(socket.SHUT_RDWR)
        self.close()

    def close(self) -> None:
        self._response.close()
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
