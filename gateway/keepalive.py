"""What is written on a silent stream, so that nothing in between takes it for dead.

Never numbered, never logged. Must not know: formats, settings, when it is due.
"""

from enum import StrEnum


class KeepaliveMode(StrEnum):
    """The setting `BATON_KEEPALIVE_MODE`. FORMAT leaves it to the format."""

    FORMAT = ""
    COMMENT_LINE = "comment-line"
    COMMENT_BLOCK = "comment-block"
    PING = "ping"
    OFF = "off"


KEEPALIVES = {
    KeepaliveMode.COMMENT_LINE: b": keep-alive\n",  # no blank line: it would dispatch an empty event
    KeepaliveMode.COMMENT_BLOCK: b": keep-alive\n\n",
    KeepaliveMode.PING: b'event: ping\ndata: {"type": "ping"}\n\n',
}
