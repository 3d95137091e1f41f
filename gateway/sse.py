"""Server-Sent Events on the wire: frames, event IDs and cursors.

Invariant: a frame is `event:` (where there is a name), one `data:` line, then `id:` last, with LF only:
some clients store an ID as soon as they read its line, so an ID ahead of its data would lose the event.
Must not know: HTTP, the log, formats' contents.
"""

import re
from dataclasses import dataclass

from gateway.errors import InvalidRequest
from gateway.events import Event
from gateway.formats import Format, Frame

RETRY_MS = 1000  # how long a browser waits before it reconnects

_CURSOR = re.compile(r"([A-Za-z0-9_-]{1,64}):(\d{1,15})(?:\.(\d{1,15}))?", re.ASCII)
# Some clients take these for ends of lines; in JSON an escape says the same.
_LINE_ENDS = (("\x85", "\\u0085"), ("\u2028", "\\u2028"), ("\u2029", "\\u2029"))
_ENCODED_LINE_ENDS = tuple((text.encode(), escape.encode()) for text, escape in _LINE_ENDS)


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in a reply's log: after event `seq`, which `epoch` wrote, if the ID said so."""

    reply_id: str
    seq: int
    epoch: int | None = None


def parse_cursor(event_id: str, param: str) -> Cursor:
    """`<reply>:<seq>` or `<reply>:<seq>.<epoch>`. Raises InvalidRequest naming `param`."""
    match = _CURSOR.fullmatch(event_id)
    if match is None:
        raise InvalidRequest(
            f"`{param}` is not an event ID of this server: it looks like <reply>:<number>.",
            param=param,
            code="malformed_cursor",
        )
    reply_id, seq, epoch = match.groups()
    return Cursor(reply_id, int(seq), int(epoch) if epoch else None)


def encode_event(reply_id: str, event: Event, format: Format) -> bytes | None:
    """The whole frame of an event, ready to send; None if the format does not show it."""
    frame = format.render(event)
    if frame is None:
        return None
    parts = [b"event: %s\n" % frame.name.encode()] if frame.name else []
    parts.append(b"data: %s\n" % _one_line(frame))
    if format.is_first_frame(event):
        parts.append(b"retry: %d\n" % RETRY_MS)
    epoch = "" if event.logged else f".{event.epoch}"
    parts.append(f"id: {reply_id}:{event.seq}{epoch}\n\n".encode())
    return b"".join(parts)


def _one_line(frame: Frame) -> bytes:
    data = frame.data
    for raw, escape in _ENCODED_LINE_ENDS:
        if raw in data:
            data = data.replace(raw, escape)
    return data
