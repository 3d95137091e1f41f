"""Server-Sent Events: bytes in, whole events out, however the bytes are cut.

Follows the WHATWG rules. httpx-sse 0.4.3 is not used, because it fails these vectors: a blank line
dispatches although there is no data (after any `id:`, or when only `event:` or `retry:` came), a
leading BOM spoils the first field, `retry:` takes signs and digits of other scripts, and an event
whose last byte is CR waits for the next read.

Invariant: an event exists once its blank line is here, and its id counts from then on, not from the
line that carried it. Must not know: HTTP, JSON, what the events mean.
"""

import codecs
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """One dispatched event. `id` is sticky: that of the last event that had one, or empty."""

    data: str
    event: str = "message"
    id: str = ""


class SseDecoder:
    """Decodes one response body; a new connection takes a new decoder.

    Attributes:
        last_event_id: what a reconnecting client has to send.
        retry_ms: reconnection time asked for by the server; None if it said nothing.
    """

    def __init__(self, last_event_id: str = "") -> None:
        self.last_event_id = last_event_id
        self.retry_ms: int | None = None
        self._utf8 = codecs.getincrementaldecoder("utf-8-sig")("replace")  # drops one leading BOM
        self._line: list[str] = []  # the unfinished line, in pieces
        self._after_cr = False
        self._event = ""
        self._id = last_event_id
        self._data: list[str] = []

    def feed(self, received: bytes) -> list[ServerSentEvent]:
        """Events that these bytes complete. What is unfinished at the end of a body never was one."""
        text = self._utf8.decode(received)
        if self._after_cr and text:
            text = text.removeprefix("\n")
            self._after_cr = False
        self._after_cr = self._after_cr or text.endswith("\r")
        # Only CR, LF and CRLF end lines: str.splitlines would also split at U+0085 or U+2028.
        *ended, rest = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        events = []
        for piece in ended:
            self._line.append(piece)
            event = self._take_line("".join(self._line))
            self._line.clear()
            if event is not None:
                events.append(event)
        if rest:
            self._line.append(rest)
        return events

    def _take_line(self, line: str) -> ServerSentEvent | None:
        if not line:
            return self._dispatch()
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match name:
            case "data":
                self._data.append(value)
            case "event":
                self._event = value
            case "id" if "\0" not in value:
                self._id = value
            case "retry" if value.isascii() and value.isdigit():
                self.retry_ms = int(value)
            case _:  # a comment (no name before its colon) or a field that nobody knows
                pass
        return None

    def _dispatch(self) -> ServerSentEvent | None:
        self.last_event_id = self._id
        data, event = self._data, self._event
        self._data, self._event = [], ""
        if not data:
            return None
        return ServerSentEvent("\n".join(data), event or "message", self._id)
