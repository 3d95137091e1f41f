"""A reply that this gateway owns: what the generation emits into and local readers read from.

Invariant: `events` holds only what the log holds, contiguous from seq 1 (or, while the log is down,
what was published with `logged=False`), so a reader can never be ahead of the log unknowingly.
Must not know: Redis, HTTP, formats. The methods below "for the commit" are `group_commit.py`'s.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from gateway.event_log import AppendOutcome, CursorConflict, PendingAppend, ReplyMeta, ReplyState
from gateway.events import Event, EventKind, ReplyStatus
from gateway.signals import Pulse

StopReason = Literal["cancelled", "abandoned", "fenced", "overflow"]
PAGE = 512


class ReplyClosed(Exception):
    """Nothing can be emitted any more: the terminal event is out, or the reply has another owner."""


class OwnedReply:
    """One generation's end of the log.

    `stop` asks the generation to end: "cancelled" and "abandoned" still want their ending emitted;
    "overflow" (log down, memory bound reached) wants an error event; after "fenced" nothing is taken.
    """

    def __init__(
        self,
        meta: ReplyMeta,
        epoch: int,
        *,
        arrived: float,
        resumable: bool,
        submit: Callable[["OwnedReply"], None],
        clock: Callable[[], float],
        events: Sequence[Event] = (),
    ) -> None:
        self.meta = meta
        self.epoch = epoch
        self.arrived = arrived
        self.resumable = resumable  # False: opened while the log was down
        self.stop = asyncio.Event()
        self.stop_reason: StopReason | None = None
        self.first_delta_emitted_at: float | None = None
        self.first_delta_committed_at: float | None = None
        self.first_text_sent_at: float | None = None  # handed to the first client's socket
        self.events: list[Event] = list(events)
        self.num_logged = len(self.events)
        self.num_readers = 0
        self._pending: deque[Event] = deque()
        self._last = self.events[-1] if self.events else None
        self._cancelled = False
        self._started = bool(self.events)
        self._submit = submit
        self._clock = clock
        self._grown = Pulse()

    @property
    def fenced(self) -> bool:
        return self.stop_reason == "fenced"

    @property
    def ended(self) -> bool:
        """Whether the terminal event has been emitted (it may not be in the log yet)."""
        return self._last is not None and self._last.is_terminal

    @property
    def settled(self) -> bool:
        """Whether all that will ever be emitted is in the log."""
        return self.ended and not self._pending and self.num_logged == len(self.events)

    @property
    def status(self) -> ReplyStatus:
        """Where the reply stands, by what was emitted."""
        if self._last is not None and self._last.kind is EventKind.ERROR:
            abandoned = self._last.payload.get("code") == "abandoned"
            return ReplyStatus.ABANDONED if abandoned else ReplyStatus.ERROR
        if self.ended:
            return ReplyStatus.CANCELLED if self._cancelled else ReplyStatus.DONE
        return ReplyStatus.RUNNING if self._started else ReplyStatus.QUEUED

    def state(self, gateway_id: str) -> ReplyState:
        """As the log would tell it, from what is published."""
        last = self.events[-1] if self.events else None
        return ReplyState(
            status=self.status_at(last) if last is not None else self.status,
            epoch=self.epoch,
            last_seq=last.seq if last is not None else 0,
            terminal_seq=last.seq if last is not None and last.is_terminal else None,
            cancel_requested=self.stop_reason == "cancelled",
            owner_gateway=gateway_id,
            lease_token="",  # nobody claims from oneself
        )

    def emit(self, kind: EventKind, payload: dict[str, Any]) -> Event:
        """Queues the next event for the group commit. Raises ReplyClosed, and then wrote nothing."""
        if self.ended or self.fenced:
            raise ReplyClosed(self.stop_reason or "ended")
        event = Event(self._last.seq + 1 if self._last else 1, kind, payload, self.epoch)
        if kind is EventKind.DELTA and self.first_delta_emitted_at is None:
            self.first_delta_emitted_at = self._clock()
        self._started = self._started or kind is not EventKind.CREATED
        self._cancelled = self._cancelled or payload.get("reason") == "cancelled"
        self._last = event
        self._pending.append(event)
        self._submit(self)
        return event

    async def flushed(self) -> None:
        """Returns when all emitted so far is in the log, or published unlogged while it is down.

        Raises ReplyClosed if another gateway took the reply over first.
        """
        goal = self._last.seq if self._last else 0
        while len(self.events) < goal:
            grown = self._grown.next()
            if self.fenced:
                raise ReplyClosed("fenced")
            await grown.wait()

    def request_stop(self, reason: StopReason) -> None:
        """Tells the generation to end; the first reason stays, except that a fence beats all."""
        if self.ended and reason != "fenced":
            return
        if self.stop_reason is None or reason == "fenced":
            self.stop_reason = reason
            self.stop.set()

    async def read(self, after: int, after_epoch: int | None = None) -> AsyncGenerator[list[Event], None]:
        """Pages of published events with seq > after; ends after the terminal one, or when fenced."""
        cursor = after
        if cursor > len(self.events):
            raise CursorConflict(f"cursor {after} is ahead of the log")
        if after_epoch is not None and cursor and self.events[cursor - 1].epoch != after_epoch:
            raise CursorConflict(f"event {after} was not written by epoch {after_epoch}")
        self.num_readers += 1
        try:
            while True:
                grown = self._grown.next()
                if cursor < len(self.events):
                    page = self.events[cursor : cursor + PAGE]
                    cursor = page[-1].seq
                    yield page
                elif self.fenced or (cursor and self.events[cursor - 1].is_terminal):
                    return
                else:
                    await grown.wait()
        finally:
            self.num_readers -= 1

    # for the commit

    def backlog(self, limit: int) -> PendingAppend | None:
        """The next events that the log lacks, oldest first."""
        missing = self.events[self.num_logged : self.num_logged + limit]
        for event in self._pending:
            if len(missing) >= limit:
                break
            missing.append(event)
        if not missing or self.fenced:
            return None
        return PendingAppend(self.meta.reply_id, self.epoch, tuple(missing), self.status_at(missing[-1]))

    def status_at(self, event: Event) -> ReplyStatus:
        """Never a final status ahead of the terminal event."""
        return self.status if event is self._last or not self.ended else ReplyStatus.RUNNING

    def mark_logged(self, num_events: int) -> None:
        """The first `num_events` of the backlog are in the log: publish those that were pending."""
        goal = self.num_logged + num_events
        for index in range(self.num_logged, min(goal, len(self.events))):
            if not self.events[index].logged:
                self.events[index] = replace(self.events[index], logged=True)
        while len(self.events) < goal:
            self._publish(self._pending.popleft())
        self.num_logged = goal
        self._grown.beat()

    def publish_unlogged(self) -> int:
        """The log is down: readers get what is pending all the same; returns how many."""
        num_events = len(self._pending)
        while self._pending:
            self._publish(replace(self._pending.popleft(), logged=False))
        self._grown.beat()
        return num_events

    def rewind(self, expected_seq: int) -> None:
        """The log lost data: it wants to hear from `expected_seq` on again."""
        self.num_logged = min(self.num_logged, expected_seq - 1)

    def fence(self) -> None:
        """Another gateway owns the reply: drop what it never saw, stop, send readers to the log."""
        self._pending.clear()
        self.request_stop("fenced")
        self._grown.beat()

    def _publish(self, event: Event) -> None:
        self.events.append(event)
        if event.kind is EventKind.DELTA and self.first_delta_committed_at is None:
            self.first_delta_committed_at = self._clock()


def num_in_log(outcomes: Sequence[AppendOutcome]) -> int:
    """How many of the first events are in the log, now or already."""
    held = (AppendOutcome.APPENDED, AppendOutcome.DUPLICATE)
    return next((i for i, outcome in enumerate(outcomes) if outcome not in held), len(outcomes))
