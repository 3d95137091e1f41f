"""Renderings of the one log: each format turns an event into at most one frame.

Invariant: a frame depends on the reply's meta and the event alone, so that a resumed stream is the
undisturbed one byte for byte. Must not know: HTTP, logs, who reads.
"""

from dataclasses import dataclass
from typing import Protocol

from gateway.events import Event
from gateway.keepalive import KeepaliveMode


@dataclass(frozen=True, slots=True)
class Frame:
    """What one event looks like: the SSE event name (empty for none) and its data."""

    data: bytes
    name: str = ""


class Format(Protocol):
    """One rendering of one reply."""

    keepalive_mode: KeepaliveMode  # where the settings leave it to the format

    def render(self, event: Event) -> Frame | None:
        """The event's frame; None if this format does not show it."""
        ...

    def is_first_frame(self, event: Event) -> bool:
        """Whether this event renders to the first frame of the whole stream."""
        ...
