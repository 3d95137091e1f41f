"""The replies of this gateway: the owner's side of the log, and the one place connections read from.

Invariant: for each reply that this process owns there is one `OwnedReply`; everything else is read
from the log. A reply is stopped only by a cancel, by its fence, or because no client anywhere was
attached for the whole grace period. Must not know: HTTP, SSE, formats, workers.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from functools import partial
from typing import Any

from gateway.attendance import Attendance
from gateway.event_log import (
    SCHEMA_VERSION,
    EventLog,
    LogUnavailable,
    ReplyGone,
    ReplyMeta,
    ReplyState,
    ReplyUnknown,
    check_reply_id,
)
from gateway.events import Event
from gateway.following import ReplyMoved, follow_from, until_logged, until_moved
from gateway.group_commit import GroupCommit
from gateway.leases import lapsed_lease
from gateway.orphans import Orphans
from gateway.owned_reply import OwnedReply
from gateway.signals import Pulse

_log = logging.getLogger(__name__)


class ReplyHub:
    """Opens, owns, reads, cancels and takes over replies."""

    def __init__(
        self,
        log: EventLog,
        *,
        gateway_id: str,
        lease_s: float,
        resume_grace_s: float,
        clock: Callable[[], float] = time.monotonic,
        on_append: Callable[[int, float], None] | None = None,
        max_unlogged_events: int = 50_000,
        outage_patience_s: float = 60.0,
    ) -> None:
        self.log = log
        self.gateway_id = gateway_id
        self._lease_s = lease_s
        self._clock = clock
        self._outage_patience_s = outage_patience_s
        self._owned: dict[str, OwnedReply] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._adoptions = Pulse()
        self.orphans = Orphans(log, self.take_over, self._spawn)
        self._commit = GroupCommit(
            log,
            clock=clock,
            on_append=on_append,
            on_settled=self._retire,
            on_recovered=lambda: self._spawn(self.renew()),
            max_unlogged_events=max_unlogged_events,
            probe_s=min(0.25, lease_s / 4),
        )
        self._new_reply = partial(OwnedReply, submit=self._commit.submit, clock=clock)
        self._attendance = Attendance(log, grace_s=resume_grace_s, clock=clock)
        self._attendance_s = max(0.02, min(1.0, resume_grace_s / 4))

    @property
    def degraded(self) -> bool:
        """The log is down: replies go on from memory and cannot be resumed elsewhere."""
        return self._commit.degraded

    async def start(self) -> None:
        self._spawn(self._commit.run())
        self._spawn(self._hear_cancels())
        self._spawn(self._every(self._lease_s / 3, self.renew))
        self._spawn(self._every(self._attendance_s, self.check_attendance))

    async def close(self) -> None:
        """Commits what is pending (2 s at most), then ends this hub's tasks."""
        with suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                await self._commit.drain()
                await self._attendance.all_left()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def open(self, meta: ReplyMeta, *, arrived: float) -> OwnedReply:
        """Creates the reply and owns it. With the log down it lives in memory (`resumable` False).

        Raises ReplyExists, InvalidReplyId. `arrived`: the request's monotonic stamp.
        """
        check_reply_id(meta.reply_id)
        epoch, resumable = 1, not self.degraded
        if resumable:
            try:
                epoch = await self.log.create(meta)
            except LogUnavailable:
                self._commit.note_down()
                resumable = False
        return self._own(self._new_reply(meta, epoch, arrived=arrived, resumable=resumable))

    async def adopt(self, reply_id: str, lease_token: str) -> OwnedReply | None:
        """Claims a reply whose lease has lapsed (see leases.py), with all its events; None if lost.

        The generation continues from `events`. Raises ReplyUnknown, ReplyGone, LogUnavailable.
        """
        meta = await self.log.meta(reply_id)
        if meta.schema > SCHEMA_VERSION:
            return None
        epoch = await self.log.claim(reply_id, lease_token)
        if epoch is None:
            return None
        events: list[Event] = []
        while page := await self.log.read(reply_id, len(events)):
            events.extend(page)
        # As if the request had arrived here, so that the events' stamps go on rising.
        arrived = (
            self._clock() - max((event.payload.get("at_ms", 0.0) for event in events), default=0.0) / 1000
        )
        reply = self._own(self._new_reply(meta, epoch, arrived=arrived, resumable=True, events=events))
        self._adoptions.beat()
        return reply

    async def take_over(self, reply_id: str) -> OwnedReply | None:
        """Waits until the owner's lease has lapsed, then adopts; None if it lives or the reply ended."""
        token = await lapsed_lease(self.log, reply_id, lease_s=self._lease_s, clock=self._clock)
        return await self.adopt(reply_id, token) if token is not None else None

    def owned(self, reply_id: str) -> OwnedReply | None:
        return self._owned.get(reply_id)

    async def meta(self, reply_id: str) -> ReplyMeta:
        """From memory where owned, so it also answers while the log is down."""
        reply = self._owned.get(reply_id)
        return reply.meta if reply is not None else await self.log.meta(reply_id)

    async def state(self, reply_id: str) -> ReplyState:
        """From memory where owned, so it also answers while the log is down."""
        reply = self._owned.get(reply_id)
        if reply is None or reply.fenced:
            return await self.log.state(reply_id)
        return reply.state(self.gateway_id)

    async def until_logged(self, reply_id: str, seq: int, epoch: int | None) -> None:
        """Gives an owner elsewhere the time of a lease to log `seq` again. Raises LogUnavailable."""
        if self.log.is_durable and reply_id not in self._owned:
            patience_s = self._lease_s
            await until_logged(self.log, reply_id, seq, epoch, patience_s=patience_s, clock=self._clock)

    def attach(self, reply_id: str) -> AbstractAsyncContextManager[None]:
        """Counts one local client of the reply for as long as the context is open."""
        return self._attendance.attached(reply_id, self._last_client_left)

    async def read(
        self, reply_id: str, after: int, after_epoch: int | None = None
    ) -> AsyncGenerator[list[Event], None]:
        """Events with seq > after, in pages, until the terminal one. Close it with `aclosing`.

        `after_epoch` comes from an `id:` of the form seq.epoch. Raises CursorConflict, ReplyUnknown,
        ReplyGone, and LogUnavailable if the log is down at the start or for long.
        """
        cursor, epoch, ended = after, after_epoch, False
        while not ended:
            reply = self._owned.get(reply_id)
            source = reply.read(cursor, epoch) if reply else self._elsewhere(reply_id, cursor, epoch)
            try:
                async with aclosing(source) as pages:
                    async for page in pages:
                        cursor, epoch, ended = page[-1].seq, page[-1].epoch, page[-1].is_terminal
                        yield page
                ended = ended or reply is None or not reply.fenced
            except ReplyMoved:
                _log.debug("reply %s is read from memory from event %d on", reply_id, cursor)
            finally:
                if reply is not None:
                    self._retire(reply)

    def _elsewhere(
        self, reply_id: str, after: int, after_epoch: int | None
    ) -> AsyncGenerator[list[Event], None]:
        """Follows the log until the reply has ended; looks after a silent owner. Raises ReplyMoved."""
        pages = follow_from(
            self.log, reply_id, after, after_epoch, patience_s=self._outage_patience_s, clock=self._clock
        )
        return until_moved(
            pages,
            changes=self._adoptions,
            has_moved=lambda: reply_id in self._owned,
            silence_s=self._lease_s,
            on_silence=lambda: self.orphans.rescue(reply_id),
        )

    async def cancel(self, reply_id: str) -> None:
        """Asks the owner, wherever it is, to end the reply; ends it here if that owner is dead.

        Idempotent, and nothing for a finished reply. Raises ReplyUnknown, ReplyGone, LogUnavailable.
        """
        reply = self._owned.get(reply_id)
        if reply is not None and not reply.fenced:
            reply.request_stop("cancelled")
            with suppress(LogUnavailable, ReplyUnknown, ReplyGone):
                await self.log.request_cancel(reply_id)  # so that a successor would know
            return
        await self.log.request_cancel(reply_id)
        self.orphans.cancel(reply_id)

    async def renew(self) -> None:
        """One round of leases and attachment marks; called by the timer and after an outage."""
        live = {rid: r.epoch for rid, r in self._owned.items() if not (r.settled or r.fenced)}
        try:
            renewed = await self.log.renew(live) if live else {}
            for reply_id, held in renewed.items():
                reply = self._owned.get(reply_id)
                if not held and reply is not None and not reply.fenced:
                    await self._find_out(reply)
            await self._attendance.renew_marks()
        except LogUnavailable:
            if live:
                self._commit.note_down()

    async def check_attendance(self) -> None:
        """Stops replies that nobody has been attached to for the grace period."""
        if self.degraded:
            self._attendance.restart_grace()
            return
        live = [r for r in self._owned.values() if not r.ended and r.meta.on_disconnect != "continue"]
        for reply in live:
            if await self._attendance.is_abandoned(reply.meta.reply_id):
                reply.request_stop("abandoned")

    def _own(self, reply: OwnedReply) -> OwnedReply:
        self._owned[reply.meta.reply_id] = reply
        self._attendance.watch(reply.meta.reply_id)
        return reply

    def _retire(self, reply: OwnedReply) -> None:
        """Lets go of a reply that is whole in the log (or lost to another owner) and has no reader."""
        reply_id = reply.meta.reply_id
        if self._owned.get(reply_id) is reply and (
            reply.fenced or (reply.settled and reply.num_readers == 0)
        ):
            del self._owned[reply_id]
            self._attendance.unwatch(reply_id)

    async def _find_out(self, reply: OwnedReply) -> None:
        """A lease could not be renewed: has the store lost the reply, or has another gateway it?"""
        try:
            state = await self.log.state(reply.meta.reply_id)
        except ReplyGone:
            lost = False
        except ReplyUnknown:
            lost = True
        else:
            if state.epoch == reply.epoch:  # restored meanwhile
                return
            lost = state.epoch < reply.epoch
        if lost:
            await self._commit.restore(reply)
        else:
            reply.fence()
            self._retire(reply)

    async def _last_client_left(self, reply_id: str) -> None:
        reply = self._owned.get(reply_id)
        if reply is None or reply.ended or reply.meta.on_disconnect != "cancel":
            return
        if await self._attendance.is_unattended(reply_id):
            reply.request_stop("abandoned")

    async def _hear_cancels(self) -> None:
        async for reply_id in self.log.cancels():
            reply = self._owned.get(reply_id)
            if reply is not None:
                reply.request_stop("cancelled")

    async def _every(self, seconds: float, action: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            await asyncio.sleep(seconds)
            await action()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._reap)

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.critical("a task of the reply hub died", exc_info=error)
