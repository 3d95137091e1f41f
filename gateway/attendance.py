"""Who is listening: local clients counted here, those of other gateways by their marks in the log.

Invariant: a reply counts as abandoned only if it had no local client and no live mark at every look
for the whole grace period. While the log cannot be asked, nobody is abandoned.
Must not know: generations. It answers; the hub acts.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from gateway.event_log import EventLog, LogUnavailable

FIRST_CLIENT_S = 1.0  # a shorter grace does not count until the first client had this long to come

_log = logging.getLogger(__name__)


class Attendance:
    """Local client counts, this gateway's marks, and the grace clocks of the replies owned here."""

    def __init__(self, log: EventLog, *, grace_s: float, clock: Callable[[], float]) -> None:
        self._log = log
        self._grace_s = grace_s
        self._clock = clock
        self._num_clients: Counter[str] = Counter()
        self._alone_since: dict[str, float | None] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    def watch(self, reply_id: str) -> None:
        """A reply is owned here from now on; its grace starts before its first client comes."""
        begins = self._clock() + max(0.0, FIRST_CLIENT_S - self._grace_s)
        self._alone_since[reply_id] = None if self._num_clients[reply_id] else begins

    def restart_grace(self) -> None:
        """Marks could not be renewed or read for a while: every grace period starts anew."""
        self._alone_since = dict.fromkeys(self._alone_since)

    def unwatch(self, reply_id: str) -> None:
        self._alone_since.pop(reply_id, None)

    @asynccontextmanager
    async def attached(
        self, reply_id: str, on_last_left: Callable[[str], Awaitable[None]]
    ) -> AsyncIterator[None]:
        """One local client. The last one to leave also takes back the mark, in a task of its own,
        so that a cancelled connection does so too."""
        self._num_clients[reply_id] += 1
        if reply_id in self._alone_since:
            self._alone_since[reply_id] = None
        try:
            if self._num_clients[reply_id] == 1:
                await self._mark(reply_id)
            yield
        finally:
            self._num_clients[reply_id] -= 1
            if not self._num_clients[reply_id]:
                del self._num_clients[reply_id]
                if reply_id in self._alone_since:
                    self._alone_since[reply_id] = self._clock()
                task = asyncio.create_task(self._leave(reply_id, on_last_left))
                self._leaving.add(task)
                task.add_done_callback(self._leaving.discard)

    async def renew_marks(self) -> None:
        """Renews this gateway's marks in one round trip. Raises LogUnavailable."""
        if self._num_clients:
            await self._log.attach(*[reply_id for reply_id, n in self._num_clients.items() if n])

    async def is_unattended(self, reply_id: str) -> bool:
        """Whether nobody, here or elsewhere, is attached now. False if the log cannot tell."""
        if self._num_clients.get(reply_id):
            return False
        try:
            attached = await self._log.is_attached(reply_id)
        except LogUnavailable:
            return False
        return not attached and not self._num_clients.get(reply_id)

    async def is_abandoned(self, reply_id: str) -> bool:
        """Whether the whole grace period has passed unattended."""
        since = self._alone_since.get(reply_id)
        if self._num_clients.get(reply_id) or reply_id not in self._alone_since:
            return False
        if not await self.is_unattended(reply_id):
            self._alone_since[reply_id] = None
            return False
        if since is None:
            self._alone_since[reply_id] = self._clock()
            return False
        return self._clock() - since >= self._grace_s

    async def all_left(self) -> None:
        """Returns when the marks of clients that have left are taken back."""
        if self._leaving:
            await asyncio.wait(self._leaving)

    async def _mark(self, reply_id: str) -> None:
        try:
            await self._log.attach(reply_id)
        except LogUnavailable:
            _log.debug("no mark for %s: the log is down; the next renewal sets it", reply_id)

    async def _leave(self, reply_id: str, on_last_left: Callable[[str], Awaitable[None]]) -> None:
        try:
            if not self._num_clients.get(reply_id):
                await self._log.detach(reply_id)
            if self._num_clients.get(reply_id):  # a client came back meanwhile
                await self._log.attach(reply_id)
        except LogUnavailable:
            _log.debug("mark of %s not removed: the log is down; it expires by itself", reply_id)
        await on_last_left(reply_id)
