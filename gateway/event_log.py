"""The event log: one interface, two homes (`event_log_redis.py`, `event_log_memory.py`).

Invariants, held by one contract suite for both: an event is appended only directly after its
predecessor; only the holder of the highest epoch seen appends; nothing follows a terminal event;
what was appended never changes.
"""

import re
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from gateway.events import Event, ReplyStatus

SCHEMA_VERSION = 1
TOMBSTONE_S = 24 * 3600.0  # how long, after a log has expired, "gone" can be told from "unknown"

_REPLY_ID = re.compile(r"[A-Za-z0-9_-]{16,64}")


class EventLogError(Exception):
    """Base of what an event log raises."""


class ReplyExists(EventLogError):
    """A reply of this ID exists or has existed; IDs are never reused."""


class ReplyUnknown(EventLogError):
    """No reply of this ID is or was here, as far as the log remembers."""


class InvalidReplyId(ReplyUnknown):
    """Not the shape of a reply ID, so no reply can ever have it."""


class CursorConflict(EventLogError):
    """The cursor is no point of this log: it lies ahead of it, or another owner wrote that event."""


class ReplyGone(EventLogError):
    """The reply was here; its log has expired (the tombstone remains)."""


class LogUnavailable(EventLogError):
    """The log's store does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyMeta:
    """What is stored beside the events when a reply is created."""

    reply_id: str  # [A-Za-z0-9_-]{16,64}, at least 128 random bits
    owner_hash: str  # digest of the API key; "" when no keys are configured
    model: str
    fingerprint: str
    format: str  # the creating format: "chat"
    format_options: dict[str, Any] = field(default_factory=dict)  # e.g. {"include_usage": true}
    request: dict[str, Any] = field(default_factory=dict)  # what a continuation needs
    prompt_token_ids: tuple[int, ...] = ()
    seed: int = 0
    traceparent: str = ""
    on_disconnect: str = "grace"  # cancel | grace | continue
    created: int = 0  # unix seconds
    schema: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyState:
    """The changing part of a reply's meta."""

    status: ReplyStatus
    epoch: int
    last_seq: int
    terminal_seq: int | None
    cancel_requested: bool
    owner_gateway: str
    lease_token: str  # changes with every renewal; same token for a full lease: the owner is gone


class AppendOutcome(Enum):
    """What became of one event."""

    APPENDED = "appended"
    DUPLICATE = "duplicate"  # already there, written by the same epoch
    GAP = "gap"  # its predecessor is missing: the log lost data, or the caller skipped
    FENCED = "fenced"  # a higher epoch owns the reply, wrote that event, or the log has ended


@dataclass(frozen=True, slots=True)
class AppendResult:
    """Outcome of one event; `expected_seq` is the next seq that the log takes after the whole batch."""

    outcome: AppendOutcome
    expected_seq: int


@dataclass(frozen=True, slots=True)
class PendingAppend:
    """Events of one reply that its owner wants appended, in order.

    `epoch` is the owner's, for the fence; each event keeps the epoch of whoever wrote it first.
    """

    reply_id: str
    epoch: int
    events: tuple[Event, ...]
    status: ReplyStatus  # stored with the events


def check_reply_id(reply_id: str) -> None:
    """Raises InvalidReplyId. Both logs call this before an ID becomes a key."""
    if _REPLY_ID.fullmatch(reply_id) is None:
        raise InvalidReplyId(f"not a reply ID: {reply_id[:80]!r}")


def continuing(last: Event | None, page: list[Event]) -> list[Event]:
    """A follower's page, read from its last event on, without that event. Raises CursorConflict.

    An empty page is a log that has not been filled again yet.
    """
    if last is None or not page:
        return page
    if page[0] != last:
        raise CursorConflict(f"event {last.seq} is not what it was")
    return page[1:]


class EventLog(Protocol):
    """Where replies live. All methods may raise LogUnavailable."""

    async def start(self) -> None:
        """Connects and starts the process's one follower task."""
        ...

    async def close(self) -> None: ...

    @property
    def is_durable(self) -> bool:
        """Whether replies outlive this process."""
        ...

    async def healthy(self) -> bool:
        """Whether the store answers now (never raises)."""
        ...

    async def create(self, meta: ReplyMeta) -> int:
        """Creates an empty log owned by this gateway; returns its epoch (1). Raises ReplyExists."""
        ...

    async def restore(self, meta: ReplyMeta, epoch: int) -> bool:
        """Makes an owned reply's log appendable again after the store lost data; then re-append.

        Leaves an intact log as it is. False: a higher epoch owns it, or it has ended and expired.
        """
        ...

    async def append(self, batch: Sequence[PendingAppend]) -> list[list[AppendResult]]:
        """Appends events of many replies in one round trip; results per reply, per event.

        After a terminal event the log's time-to-live starts. Replies never affect each other.
        """
        ...

    async def read(self, reply_id: str, after: int, limit: int = 512) -> list[Event]:
        """Events with seq > after, oldest first. Raises ReplyUnknown, ReplyGone."""
        ...

    def follow(self, reply_id: str, after: int) -> AsyncGenerator[list[Event], None]:
        """Pages from the cursor, then what is appended, until the terminal event.

        For replies owned elsewhere; needs no connection of its own. Raises ReplyUnknown, ReplyGone, and
        CursorConflict where the last event it gave has become another one (the store lost its data).
        """
        ...

    async def meta(self, reply_id: str) -> ReplyMeta:
        """Raises ReplyUnknown, ReplyGone."""
        ...

    async def state(self, reply_id: str) -> ReplyState:
        """Raises ReplyUnknown, ReplyGone."""
        ...

    async def claim(self, reply_id: str, lease_token: str) -> int | None:
        """Takes over a reply whose lease still shows `lease_token`; the new epoch, None if lost."""
        ...

    async def renew(self, epochs: dict[str, int]) -> dict[str, bool]:
        """Renews this gateway's leases (reply ID to epoch); False: fenced or missing."""
        ...

    async def attach(self, *reply_ids: str) -> None:
        """Marks this gateway as having a client on each reply, for twice the lease time.

        Also renews marks, of many replies in one round trip. Replies that are not there are passed over.
        """
        ...

    async def detach(self, reply_id: str) -> None:
        """Removes this gateway's mark."""
        ...

    async def is_attached(self, reply_id: str) -> bool:
        """Whether any gateway's mark is live."""
        ...

    async def request_cancel(self, reply_id: str) -> None:
        """Sets the cancel flag and wakes the owner, wherever it is. Idempotent."""
        ...

    def cancels(self) -> AsyncIterator[str]:
        """IDs of replies owned here whose cancel was asked for at another gateway."""
        ...
