"""Group commit: one task appends what all replies of this process have pending, in one round trip.

Invariant: log before send. An event is published only after the log answered for it; only while the
log is down are events published at once, marked unlogged, within a bound, and re-appended in order
when it is back. While a commit is in flight the next batch gathers by itself.
Must not know: who reads, what the events mean.
"""

import asyncio
import logging
from collections.abc import Callable

from gateway.event_log import AppendOutcome, AppendResult, EventLog, LogUnavailable, PendingAppend
from gateway.owned_reply import OwnedReply, num_in_log
from gateway.signals import Pulse

MAX_EVENTS_PER_COMMIT = 4096  # keeps one script far below the store's socket timeout
MAX_EVENTS_PER_REPLY = 1024
MAX_RESTORES = 8  # without progress; then the store cannot hold this reply

_log = logging.getLogger(__name__)


class GroupCommit:
    """Owns the commit loop and the knowledge whether the log is down (`degraded`)."""

    def __init__(
        self,
        log: EventLog,
        *,
        clock: Callable[[], float],
        on_append: Callable[[int, float], None] | None,
        on_settled: Callable[[OwnedReply], None],
        on_recovered: Callable[[], None],
        max_unlogged_events: int,
        probe_s: float,
    ) -> None:
        self.degraded = False
        self.num_unlogged = 0  # events published since the log last took any
        self._log = log
        self._clock = clock
        self._on_append = on_append
        self._on_settled = on_settled
        self._on_recovered = on_recovered
        self._max_unlogged_events = max_unlogged_events
        self._probe_s = probe_s
        self._dirty: dict[str, OwnedReply] = {}
        self._restores: dict[str, int] = {}
        self._wake = asyncio.Event()
        self._rounds = Pulse()
        self._probe: asyncio.Task[None] | None = None
        self._in_flight = False

    def submit(self, reply: OwnedReply) -> None:
        """Puts the reply into the next batch."""
        self._dirty[reply.meta.reply_id] = reply
        self._wake.set()

    async def run(self) -> None:
        """The commit loop; runs until it is cancelled."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                if self.degraded:
                    self._publish_unlogged()
                else:
                    await self._commit()
                self._rounds.beat()
        finally:
            if self._probe is not None:
                self._probe.cancel()

    async def drain(self) -> None:
        """Returns when nothing waits for the log, or the log is down."""
        while (self._dirty or self._in_flight) and not self.degraded:
            await self._rounds.next().wait()

    def note_down(self) -> None:
        """The log did not answer: go on from memory, and ask from time to time whether it is back."""
        if not self.degraded:
            _log.warning("event log unavailable: replies go on from memory")
            self.degraded = True
            self._probe = asyncio.create_task(self._wait_for_log())
        self._wake.set()

    async def restore(self, reply: OwnedReply) -> None:
        """The store has lost this reply: make its log anew, then append all of it again."""
        reply_id = reply.meta.reply_id
        self._restores[reply_id] = self._restores.get(reply_id, 0) + 1
        too_often = self._restores[reply_id] > MAX_RESTORES
        if too_often or not await self._log.restore(reply.meta, reply.epoch):
            self._fence(reply)
            return
        _log.info("restored the log of reply %s from memory", reply_id)
        reply.rewind(1)
        self.submit(reply)

    def _take(self) -> tuple[list[OwnedReply], list[PendingAppend]]:
        replies, batch, room = [], [], MAX_EVENTS_PER_COMMIT
        for reply_id in list(self._dirty):
            if room <= 0:
                self._wake.set()
                break
            reply = self._dirty.pop(reply_id)
            pending = reply.backlog(min(room, MAX_EVENTS_PER_REPLY))
            if pending is not None:
                replies.append(reply)
                batch.append(pending)
                room -= len(pending.events)
        return replies, batch

    async def _commit(self) -> None:
        replies, batch = self._take()
        if not batch:
            return
        started = self._clock()
        self._in_flight = True
        try:
            answers = await self._log.append(batch)
            self.num_unlogged = 0
            appended = 0
            lost = []
            for reply, pending, results in zip(replies, batch, answers, strict=True):
                appended += sum(result.outcome is AppendOutcome.APPENDED for result in results)
                if self._settle(reply, pending, results):
                    lost.append(reply)
            if self._on_append is not None and appended:
                self._on_append(appended, self._clock() - started)
            for reply in lost:
                await self.restore(reply)
        except LogUnavailable:
            for reply in replies:
                self.submit(reply)
            self.note_down()
        finally:
            self._in_flight = False

    def _settle(self, reply: OwnedReply, pending: PendingAppend, results: list[AppendResult]) -> bool:
        """Acts on the answers for one reply; True if its log has to be restored first."""
        if reply.fenced:
            return False
        if pending.events[0].seq != reply.num_logged + 1:  # restored meanwhile: this answer is outdated
            self.submit(reply)
            return False
        num_logged = num_in_log([result.outcome for result in results])
        if num_logged:
            self._restores.pop(reply.meta.reply_id, None)
            reply.mark_logged(num_logged)
        if num_logged < len(results):
            refusal = results[num_logged]
            if refusal.outcome is AppendOutcome.FENCED or refusal.expected_seq > reply.num_logged + 1:
                self._fence(reply)
                return False
            if refusal.expected_seq <= 1:
                return True
            reply.rewind(refusal.expected_seq)
        if reply.backlog(1) is not None:
            self.submit(reply)
        elif reply.settled:
            self._on_settled(reply)
        return False

    def _fence(self, reply: OwnedReply) -> None:
        _log.warning("reply %s belongs to another gateway now (fenced)", reply.meta.reply_id)
        self._dirty.pop(reply.meta.reply_id, None)
        self._restores.pop(reply.meta.reply_id, None)
        reply.fence()
        self._on_settled(reply)

    def _publish_unlogged(self) -> None:
        for reply in self._dirty.values():
            self.num_unlogged += reply.publish_unlogged()
        if self.num_unlogged > self._max_unlogged_events:
            for reply in self._dirty.values():
                reply.request_stop("overflow")

    async def _wait_for_log(self) -> None:
        healthy = False
        while not healthy:
            await asyncio.sleep(self._probe_s)  # first: a store may answer and yet take no writes
            healthy = await self._log.healthy()
        _log.info("event log is back")
        self.degraded = False
        self._on_recovered()
        self._wake.set()
